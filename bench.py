"""Measures the worker beside what this machine can do at all, and beside another worker.

    python bench.py [--quick] [--vs 'COMMAND --port {port}']

Prints one Markdown table. Times are medians (p50) and p95. A *floor* is the same work without
a worker, measured in the same run: forking and ending a process that has imported what a cell
needs, copying from a loopback socket to a file, and from a file to a loopback socket. Compare
ratios, not milliseconds: both are from one machine at one time.

Everything is bounded, talks to loopback only and ends what it started.
"""

import argparse
import contextlib
import http.server
import json
import os
import re
import shlex
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
MIB = 2**20
BOUNDARY = "strata-bench"


# ---------------------------------------------------------------------------------------
# A worker and a client with next to no cost of its own
# ---------------------------------------------------------------------------------------


class Worker:
    """A worker process under test; ``command`` holds ``{port}``."""

    def __init__(self, command, **env):
        self.port = free_port()
        self.log = tempfile.NamedTemporaryFile("r", prefix="bench-log-")
        began = time.perf_counter()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
        self.process = subprocess.Popen(
            shlex.split(command.format(port=self.port)),
            env={**clean, **env},
            stdout=subprocess.DEVNULL,
            stderr=open(self.log.name, "w"),
        )
        self.wait_healthy()
        self.start_seconds = time.perf_counter() - began

    def wait_healthy(self, seconds=60):
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen("http://127.0.0.1:%d/health" % self.port, timeout=5).close()
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit("the worker does not answer: %s" % Path(self.log.name).read_text()[-2000:])
            time.sleep(0.002)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    @property
    def running_seconds(self):
        """What the worker's log says that its last cell took by itself; None for another worker."""
        found = re.findall(r"running ([\d.]+) s", Path(self.log.name).read_text())
        return float(found[-1]) if found else None


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def push(source, inputs=(), build_id=None):
    """The bytes of a push request, but for the content of its last input (of so many bytes)."""
    metadata = {
        "protocol_version": "v1",
        "build_id": build_id,
        "transform": {"ref": "notebook_cell@v1", "params": {"source": source, "timeout_seconds": 120}},
        "inputs": [{"name": name, "format": "file/path", "file": name + ".bin"} for name, _ in inputs],
    }
    head = part("metadata", "metadata.json") + json.dumps(metadata).encode() + b"\r\n"
    size = 0
    for name, size in inputs:
        head += part(name, name + ".bin")
    tail = b"\r\n--%s--\r\n" % BOUNDARY.encode()
    length = len(head) + size + len(tail)
    request = "POST /v1/execute HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=%s\r\nContent-Length: %d\r\n\r\n"
    return (request % (BOUNDARY, length)).encode() + head, tail


def part(name, file):
    return (
        '--%s\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n' % (BOUNDARY, name, file)
    ).encode()


def ask(sock, data, expect=200):
    """Send a request, read its whole answer and throw it away; the size of its body."""
    sock.sendall(data)
    return read_answer(sock, expect)


def read_answer(sock, expect=200):
    buffer = bytearray()
    while b"\r\n\r\n" not in buffer:
        piece = sock.recv(65536)
        if not piece:
            raise SystemExit("the worker closed the connection: %r" % bytes(buffer[:300]))
        buffer += piece
    head, _, body = bytes(buffer).partition(b"\r\n\r\n")
    if int(head.split(None, 2)[1]) != expect:
        raise SystemExit("unexpected answer: %r" % bytes(buffer[:500]))
    length = int(re.search(rb"(?i)content-length: *(\d+)", head).group(1))
    left, scratch = length - len(body), bytearray(MIB)
    while left > 0:
        left -= sock.recv_into(scratch, min(left, MIB)) or left
    return length


def connect(port):
    sock = socket.create_connection(("127.0.0.1", port), timeout=120)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def p50_p95(times):
    times = sorted(times)
    return statistics.median(times), times[min(len(times) - 1, int(len(times) * 0.95))]


# ---------------------------------------------------------------------------------------
# Floors: what this machine takes without a worker
# ---------------------------------------------------------------------------------------

FORK = """
import gc, os, sys, time, statistics
for name in sys.argv[1].split(","):
    __import__(name)
gc.collect(); gc.freeze()
times = []
for _ in range(100):
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    times.append(time.perf_counter() - began)
print(statistics.median(times))
"""


def fork_floor(modules):
    """Seconds to fork, end and reap a process that has imported these; None without them."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, modules], capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def loopback(serve):
    """A connected loopback pair, with ``serve`` running on its far end in another process."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        serve(listener.accept()[0])
        os._exit(0)
    sock = connect(listener.getsockname()[1])
    listener.close()
    return sock, pid


def copy_in_floor(size):
    """Seconds to take so many bytes from a loopback socket into a file."""

    def serve(sock):
        with tempfile.TemporaryFile(buffering=0) as file:
            buffer, left = memoryview(bytearray(MIB)), size
            while left:
                count = sock.recv_into(buffer)
                file.write(buffer[:count])
                left -= count
        sock.sendall(b"x")

    sock, pid = loopback(serve)
    seconds = timed(lambda: (send_zeros(sock, size), sock.recv(1)))
    os.waitpid(pid, 0)
    return seconds


def copy_out_floor(size):
    """Seconds to get so many bytes of a file through a loopback socket, by sendfile."""
    file = tempfile.TemporaryFile(buffering=0)
    send_to = memoryview(bytes(MIB))
    for _ in range(size // MIB):
        file.write(send_to)

    def serve(sock):
        sock.recv(1)
        sock.sendfile(file, 0, size)

    sock, pid = loopback(serve)

    def take():
        sock.sendall(b"x")
        left, scratch = size, bytearray(MIB)
        while left:
            left -= sock.recv_into(scratch)

    seconds = timed(take)
    os.waitpid(pid, 0)
    return seconds


def send_zeros(sock, size):
    zeros = memoryview(bytes(MIB))
    while size:
        piece = zeros[: min(MIB, size)]
        sock.sendall(piece)
        size -= len(piece)


# ---------------------------------------------------------------------------------------
# Measurements: each takes the command of a worker and gives a number
# ---------------------------------------------------------------------------------------


def cell_seconds(worker, source, count):
    data = b"".join(push(source))
    with connect(worker.port) as sock:
        for _ in range(3):
            ask(sock, data)
        return p50_p95([timed(lambda: ask(sock, data)) for _ in range(count)])


CLIENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import bench
sock, data = bench.connect(int(sys.argv[2])), b"".join(bench.push("x = 1"))
bench.ask(sock, data)
print("ready", flush=True)
sys.stdin.readline()
count, end = 0, time.perf_counter() + float(sys.argv[3])
while time.perf_counter() < end:
    bench.ask(sock, data)
    count += 1
print(count)
"""


def cells_per_second(worker, seconds, clients=8):
    command = [sys.executable, "-c", CLIENT, str(HERE), str(worker.port), str(seconds)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(clients)
    ]
    for client in running:
        client.stdout.readline()
    for client in running:
        client.stdin.write("go\n")
        client.stdin.flush()
    return sum(int(client.communicate()[0]) for client in running) / seconds


def push_seconds(worker, size):
    head, tail = push("x = 1", [("data", size)])
    with connect(worker.port) as sock:
        return timed(lambda: (sock.sendall(head), send_zeros(sock, size), ask(sock, tail)))


def output_seconds(worker, size):
    """An output of so many bytes, beyond what the cell itself takes."""
    data = b"".join(push("import numpy as np\nblob = np.zeros(%d // 8)" % size))
    with connect(worker.port) as sock:
        return timed(lambda: ask(sock, data)) - (worker.running_seconds or 0)


def growth(worker, call):
    """How far the worker's memory rises above where it was, in bytes."""
    Path("/proc/%d/clear_refs" % worker.process.pid).write_text("5")
    before = memory(worker.process.pid, "VmRSS")
    call()
    return memory(worker.process.pid, "VmHWM") - before


def memory(pid, field):
    return int(re.search(field + r":\s*(\d+)", Path("/proc/%d/status" % pid).read_text()).group(1)) * 1024


def pull_seconds(worker, size):
    with Store(size) as url:
        manifest = {
            "build_id": "bench",
            "inputs": [{"artifact_id": "a", "version": 1, "url": url + "/in"}],
            "metadata": {
                "executor_ref": "notebook_cell@v1",
                "params": {
                    "source": "blob = bytes(%d)" % size,
                    "timeout_seconds": 120,
                    "input_specs": {
                        "data": {"uri": "strata://artifact/a@v=1", "content_type": "file/path", "file": "data.bin"}
                    },
                },
            },
            "output": {"url": url + "/out", "max_bytes": 4 * size},
            "finalize_url": url + "/finalize",
        }
        body = json.dumps(manifest).encode()
        with connect(worker.port) as sock:
            return timed(
                lambda: ask(sock, b"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            )


class Store:
    """Serves one input of zeros and swallows what is uploaded."""

    def __init__(self, size):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", str(size))
                self.end_headers()
                send_zeros(self.connection, size)

            def do_POST(self):
                left, scratch = int(self.headers["Content-Length"]), bytearray(MIB)
                while left:
                    left -= self.rfile.readinto(memoryview(scratch)[: min(left, MIB)])
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return "http://127.0.0.1:%d" % self.server.server_address[1]

    def __exit__(self, *exc_info):
        self.server.shutdown()
        self.server.server_close()


def health_under_load(worker, seconds):
    """p50 and p99 of /health while a cell burns each core and 256 MiB come in, again and again."""
    stop = time.monotonic() + seconds
    burn = b"".join(push("import time\nend = time.time() + %g\nwhile time.time() < end: pass" % seconds))
    load = [threading.Thread(target=lambda: ask(connect(worker.port), burn)) for _ in range(os.cpu_count())]

    def upload():
        while time.monotonic() < stop:
            push_seconds(worker, 256 * MIB)

    load.append(threading.Thread(target=upload))
    for thread in load:
        thread.start()
    time.sleep(0.5)
    times, request = [], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(worker.port) as sock:
        while time.monotonic() < stop:
            times.append(timed(lambda: ask(sock, request)))
            time.sleep(0.01)
    for thread in load:
        thread.join()
    times.sort()
    return statistics.median(times), times[int(len(times) * 0.99)]


def refusal(worker, status):
    """Seconds until a 256 MiB upload is refused, and the bytes of it that had arrived by then:
    an upper bound of what the worker read, since its system holds some unread."""
    head, _ = push("x = 1", [("data", 256 * MIB)])
    with connect(worker.port) as sock:
        sock.setblocking(False)
        began, answer, zeros = time.perf_counter(), b"", bytes(MIB)
        pending = memoryview(head)
        while b"\r\n\r\n" not in answer and time.perf_counter() - began < 60:
            with contextlib.suppress(BlockingIOError):
                pending = pending[sock.send(pending) :] or memoryview(zeros)
            with contextlib.suppress(BlockingIOError):
                answer += sock.recv(65536)
        seconds, arrived = time.perf_counter() - began, acknowledged(sock)
    if int(answer.split(None, 2)[1]) != status:
        raise SystemExit("expected a %d: %r" % (status, answer[:300]))
    return seconds, arrived


def acknowledged(sock):
    """tcpi_bytes_acked of linux/tcp.h."""
    return struct.unpack_from("<Q", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 120)[0]


def idle_cells(worker, count=8):
    """PSS of each of so many cells that wait, on average, in bytes; whatever process they are."""
    before = family(worker.process.pid)
    data = b"".join(push("import time\ntime.sleep(3)"))
    threads = [threading.Thread(target=lambda: ask(connect(worker.port), data)) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    added = [pid for pid in family(worker.process.pid) if pid not in before]
    total = sum(pss(pid) for pid in added)
    for thread in threads:
        thread.join()
    return total / count


def family(pid):
    found = []
    for task in Path("/proc/%d/task" % pid).glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *family(child)]
    return found


def pss(pid):
    try:
        return int(re.search(r"Pss:\s*(\d+)", Path("/proc/%d/smaps_rollup" % pid).read_text()).group(1)) * 1024
    except (OSError, AttributeError):
        return 0


# ---------------------------------------------------------------------------------------
# Table
# ---------------------------------------------------------------------------------------


class Table:
    def __init__(self, other):
        self.other = other
        print("| what | floor | this worker |%s target | met |" % (" other | ratio |" if other else ""))
        print("|---|---|---|%s---|---|" % ("---|---|" if other else ""), flush=True)

    def row(self, what, floor, ours, theirs, ratio, target, met):
        cells = (
            [what, floor or "", ours]
            + ([theirs or "", ratio or ""] if self.other else [])
            + [target, "" if met is None else "yes" if met else "NO"]
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def ms(seconds):
    return "%.1f ms" % (seconds * 1e3) if seconds < 1 else "%.2f s" % seconds


def mib(size):
    return "%.1f MiB" % (size / MIB)


def rate(size, seconds):
    return "%.0f MB/s" % (size / seconds / 1e6)


OURS = "%s %s --port {port}" % (shlex.quote(sys.executable), shlex.quote(str(HERE / "strata_worker.py")))


def pair(other, measure, **env):
    """The same measurement of a fresh worker of ours and of the other."""
    found = []
    for command in filter(None, (OURS, other)):
        with Worker(command, **env) as worker:
            time.sleep(2)  # let it finish what it does at start: only starts are measured there
            found.append(measure(worker))
    return found + [None] * (2 - len(found))


def bench_cells(table, other, count):
    floor = fork_floor("pandas,pyarrow") or fork_floor("pyarrow")
    for source in ("x = 1", "import pandas\nx = 1"):
        ours, theirs = pair(
            other,
            lambda worker, s=source: cell_seconds(
                worker, s, count if "strata_worker.py" in " ".join(worker.process.args) else min(count, 10)
            ),
        )
        ratio = theirs and theirs[0] / ours[0]
        met = ours[0] <= 3 * floor and (ratio is None or ratio >= 50)
        table.row(
            "`%s`, p50 (p95)" % source.replace("\n", "; "),
            ms(floor),
            "%s (%s)" % (ms(ours[0]), ms(ours[1])),
            theirs and "%s (%s)" % (ms(theirs[0]), ms(theirs[1])),
            ratio and "%.0f ×" % ratio,
            "50 × the other, 3 × the floor",
            met,
        )


def bench_rate(table, other, seconds):
    ours, theirs = pair(other, lambda worker: cells_per_second(worker, seconds))
    ratio = theirs and ours / theirs
    table.row(
        "cells per second, 8 clients",
        None,
        "%.0f" % ours,
        theirs and "%.1f" % theirs,
        ratio and "%.0f ×" % ratio,
        "40 × the other",
        ratio and ratio >= 40,
    )


def bench_copies(table, other, quick):
    for size in (256 * MIB, 1024 * MIB):
        floor = min(copy_in_floor(size) for _ in range(3))
        ours, theirs = pair(
            other if size < 512 * MIB or not quick else None,
            lambda worker, s=size: min(push_seconds(worker, s) for _ in range(2 if s < 512 * MIB else 1)),
        )
        table.row(
            "%d MiB pushed" % (size / MIB),
            rate(size, floor),
            rate(size, ours),
            theirs and rate(size, theirs),
            theirs and "%.1f ×" % (theirs / ours),
            "60% of the floor",
            floor / ours >= 0.6,
        )
    size = 512 * MIB
    floor = min(copy_out_floor(size) for _ in range(3))
    ours, _ = pair(None, lambda worker: min(output_seconds(worker, size) for _ in range(2)))
    table.row(
        "512 MiB output, beyond the cell",
        rate(size, floor),
        rate(size, ours),
        None,
        None,
        "60% of the floor",
        floor / ours >= 0.6,
    )


def bench_memory(table, other, quick):
    size = (256 if quick else 1024) * MIB
    what = "%d MiB in and out, " % (size / MIB)
    calls = {
        "push": lambda worker: growth(worker, lambda: (push_seconds(worker, size), output_seconds(worker, size))),
        "pull": lambda worker: growth(worker, lambda: pull_seconds(worker, size)),
    }
    for name, call in calls.items():
        ours, _ = pair(None, call, STRATA_WORKER_ALLOW_LOCAL_HOSTS="1")
        table.row(what + name + ": memory grows by", None, mib(ours), None, None, "under 32 MiB", ours < 32 * MIB)


def bench_process(table, other):
    starts = []
    for command in filter(None, (OURS, other)):
        times = []
        for _ in range(5):
            with Worker(command) as worker:
                times.append(worker.start_seconds)
        starts.append(statistics.median(times))
    theirs = starts[1] if other else None
    table.row(
        "start to first /health",
        None,
        ms(starts[0]),
        theirs and ms(theirs),
        theirs and "%.0f ×" % (theirs / starts[0]),
        "under 250 ms",
        starts[0] < 0.25,
    )
    ours, theirs = pair(other, lambda worker: memory(worker.process.pid, "VmRSS"))
    table.row(
        "server process at rest",
        None,
        mib(ours),
        theirs and mib(theirs),
        theirs and "%.1f ×" % (theirs / ours),
        "under 40 MiB",
        ours < 40 * MIB,
    )
    ours, _ = pair(None, idle_cells)
    table.row("each of eight waiting cells, PSS", None, mib(ours), None, None, "under 25 MiB", ours < 25 * MIB)


def bench_health(table, other, seconds):
    ours, theirs = pair(other, lambda worker: health_under_load(worker, seconds))
    shown = [value and "%s (%s)" % (ms(value[0]), ms(value[1])) for value in (ours, theirs)]
    table.row(
        "/health under load, p50 (p99)",
        None,
        shown[0],
        shown[1],
        theirs and "%.1f ×" % (theirs[1] / ours[1]),
        "p99 under 25 ms",
        ours[1] < 0.025,
    )


def bench_refusals(table, other):
    for status, env in (
        (401, {"STRATA_WORKER_TOKEN": "t", "STRATA_WORKER_HOST": "127.0.0.1"}),
        (503, {"STRATA_WORKER_MAX_CONCURRENT": "1"}),
    ):

        def measure(worker, status=status):
            if status == 503:
                holder = threading.Thread(
                    target=lambda: ask(connect(worker.port), b"".join(push("import time\ntime.sleep(4)")))
                )
                holder.start()
                time.sleep(1)
            result = refusal(worker, status)
            if status == 503:
                holder.join()
            return result

        (seconds, size), _ = pair(None, measure, **env)
        table.row(
            "a 256 MiB upload refused, %d" % status,
            None,
            "%s, at most %s read" % (ms(seconds), mib(size)),
            None,
            None,
            "20 ms, 1 MiB",
            seconds < 0.02 and size < MIB,
        )


def bench_locked(table, count):
    sys.path.insert(0, str(HERE))
    import test_worker

    with tempfile.TemporaryDirectory() as folder:
        block = test_worker.lock_block(Path(folder) / "notebook")
        with test_worker.WorkerProcess(
            STRATA_WORKER_ENV_ROOT=folder + "/envs", PATH=test_worker.path_with_uv()
        ) as client:
            client.run("import six", environment=block, timeout_seconds=60)
            time.sleep(2)
            plain, locked = ([], [])
            for _ in range(count):
                plain.append(timed(lambda: client.run("x = 1")))
                locked.append(timed(lambda: client.run("x = 1", environment=block)))
    extra = statistics.median(locked) - statistics.median(plain)
    table.row(
        "a cell in a locked environment",
        ms(statistics.median(plain)),
        ms(statistics.median(locked)),
        None,
        None,
        "within 20 ms of a plain cell",
        extra < 0.02,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--vs", metavar="COMMAND", help="another worker's command, with {port} in it")
    options = parser.parse_args()
    count, seconds = (30, 3) if options.quick else (200, 10)
    print(
        "%s, %d cores, Python %s, Linux %s\n"
        % (time.strftime("%Y-%m-%d"), os.cpu_count(), sys.version.split()[0], os.uname().release)
    )
    table = Table(options.vs)
    bench_cells(table, options.vs, count)
    bench_rate(table, options.vs, seconds)
    bench_copies(table, options.vs, options.quick)
    bench_memory(table, options.vs, options.quick)
    bench_process(table, options.vs)
    bench_health(table, options.vs, seconds)
    bench_refusals(table, options.vs)
    try:
        bench_locked(table, count // 2)
    except BaseException as problem:  # no uv, or no pytest for its helpers
        print("\nlocked environments were not measured: %s" % problem)


if __name__ == "__main__":
    main()
