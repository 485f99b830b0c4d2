"""Measures the worker beside what this machine can do at all, and beside another worker.

    python bench.py [--quick] [--vs 'COMMAND --port {port}']

Prints one Markdown table. A *floor* is the same work without a worker, in the same run: fork,
exit and wait of a process that has imported what a cell needs; a bare copy from a loopback socket
to a file; one from a file to a loopback socket by sendfile. Read the ratios: milliseconds are of
this machine at this hour. What a row compares is measured in turns, so that other work on the
machine falls on all of it alike; the load average is printed because it still falls on all of it.

Times are medians, with p95 (p99 for /health) in parentheses, and as the client sees them: a push
or a refusal counts from before it connects. Every cell has to succeed and every output to be as
large as it should, or the row says that it failed. What is counted:

    cells per second  answers between two of them, so that none under way at either end counts
    start             from the exec: of the installed command, whose bytecode pip has written, and of
                      the file as a script, which Python compiles whole each time
    512 MiB output    beyond the cell: the whole request less the "running" time, which is the
                      cell and its serialisation, in the worker's log; without such a log, the whole
    server grows by   VmHWM of the server process (cells are others) over VmRSS before;
                      256 MiB each way with --quick, 1 GiB without
    at rest           VmRSS of the server process, a second after some cells. CPython keeps a script's
                      syntax tree until the script ends: 14 MiB here, which the installed one has not
    waiting cells     PSS of the processes that are new under the server, by cell; beside it what
                      its whole tree grew by. The larger one is held against the target
    refused           bytes that the other end's kernel acknowledged, its receive buffer included:
                      an upper bound of what the server read. (rchar in /proc does not count recv.)
                      The client sends on until it is cut off, or for 2.5 s after the answer
    locked            an environment without packages, built offline: the way to its cells is
                      measured, not their imports

Linux only. Loopback only; ends what it started, and itself after 115 s (--quick) or 15 minutes.
"""

import argparse
import contextlib
import http.server
import itertools
import json
import os
import re
import select
import selectors
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALLED = "import sys; sys.path[0] = %r; import strata_worker; sys.exit(strata_worker.main())"
OURS = "%s %s --port {port}" % (shlex.quote(sys.executable), shlex.quote(str(HERE / "strata_worker.py")))
MIB = 2**20
ZEROS = memoryview(bytes(MIB))
TOKEN = "bench"
BOUNDARY = "0123456789abcdef" * 2  # as long as the server's own: a parser may skip by its length
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Failed(Exception):
    """A worker did not do what was measured."""


class OutOfTime(BaseException):
    """The alarm: not an error of whatever it interrupts."""


# ---------------------------------------------------------------------------------------
# Samples: several things measured in turns
# ---------------------------------------------------------------------------------------


class Sample:
    """What one thing measured gave, in order of size; false without a value."""

    def __init__(self):
        self.values, self.spent, self.problem = [], 0.0, None

    def __bool__(self):
        return bool(self.values) and not self.problem

    def take(self, call):
        began = time.perf_counter()
        try:
            self.values.append(call())
        except (Failed, OSError) as problem:
            self.problem = problem
        self.spent += time.perf_counter() - began

    @property
    def p50(self):
        return statistics.median(self.values)

    def at(self, part):
        return sorted(self.values)[min(len(self.values) - 1, int(len(self.values) * part))]

    def show(self, form, tail=0.95):
        if self.problem:
            return complaint(self.problem)
        if not self.values:
            return ""
        return form(self.p50) + (" (%s)" % form(self.at(tail)) if len(self.values) > 1 else "")

    def most(self, text, form):
        return text % form(self.at(1)) if self else ""

    def show_pair(self, form, text):
        return text % tuple(map(form, self.values[0])) if self else self.show(form)

    def column(self, index):
        """One of the numbers of each value."""
        return self.of([value[index] for value in self.values])

    def flat(self):
        return self.of([number for value in self.values for number in value])

    def of(self, values):
        found = Sample()
        found.values, found.problem = values, self.problem
        return found


def complaint(problem, word="failed"):
    return "%s: %s" % (word, " ".join(str(problem).split())[:80].replace("|", "/"))


def in_turns(calls, count, seconds):
    """A Sample for each call: made ``count`` times, or until it has had its ``seconds``; None is not made."""
    samples = [Sample() for _ in calls]
    for _ in range(count):
        for sample, call in zip(samples, calls):
            if call and not sample.problem and sample.spent < seconds:
                sample.take(call)
    return samples


def timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------------
# A worker, and a client with next to no cost of its own
# ---------------------------------------------------------------------------------------


class Worker:
    """A worker process under test; ``command`` holds ``{port}``."""

    def __init__(self, command, **env):
        self.port = free_port()
        self.log = tempfile.NamedTemporaryFile("r", prefix="bench-log-")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
        command = shlex.split(command.replace("{port}", str(self.port)))
        began = time.perf_counter()
        with open(self.log.name, "w") as log:
            self.process = subprocess.Popen(command, env={**clean, **env}, stdout=subprocess.DEVNULL, stderr=log)
        try:
            self.wait_healthy()
        except BaseException:
            self.__exit__()
            raise
        self.start_seconds = time.perf_counter() - began

    def wait_healthy(self, seconds=60):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                return health(self.port)
            time.sleep(0.002)
        raise Failed("does not start: %s" % Path(self.log.name).read_text()[-300:])

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def running_seconds(self, build_id):
        """What the log says that the cell of this run took; None if it never says. It says so after the answer."""
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            found = re.search(r"run %s: .* running ([\d.]+) s" % build_id, Path(self.log.name).read_text())
            if found:
                return float(found.group(1))
            time.sleep(0.01)


@contextlib.contextmanager
def installed():
    """The command of a worker whose bytecode is there, as pip leaves it; a script is compiled at each start."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        shutil.copy(HERE / "strata_worker.py", folder)
        for name in ("harness.py", "harness.R"):
            shutil.copy(HERE / name, folder)
        subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True)
        yield "%s -c %s --port {port}" % (shlex.quote(sys.executable), shlex.quote(INSTALLED % folder))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def connect(port, timeout=60):
    sock = socket.create_connection(("127.0.0.1", port), timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def health(port):
    with connect(port, 10) as sock:
        sock.sendall(HEALTH)
        read_answer(sock)


def post(path, length, content_type="application/json", token=None):
    head = "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n" % (path, content_type, length)
    return (head + ("Authorization: Bearer %s\r\n" % token if token else "") + "\r\n").encode()


def push(source, size=None, build_id=None, token=None, **params):
    """The bytes of a push: those before its file input of so many bytes, and those after it."""
    metadata = {
        "protocol_version": "v1",
        "build_id": build_id,
        "transform": {"ref": "notebook_cell@v1", "params": {"source": source, "timeout_seconds": 120, **params}},
        "inputs": [] if size is None else [{"name": "data", "format": "file/path", "file": "data.bin"}],
    }
    head = part("metadata", "metadata.json") + json.dumps(metadata).encode() + b"\r\n"
    head += b"" if size is None else part("data", "data.bin")
    tail = b"\r\n--%s--\r\n" % BOUNDARY.encode()
    length = len(head) + (size or 0) + len(tail)
    return post("/v1/execute", length, "multipart/form-data; boundary=" + BOUNDARY, token) + head, tail


def part(name, file):
    return b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n' % (
        BOUNDARY.encode(),
        name.encode(),
        file.encode(),
    )


class Answer:
    """An answer that arrives in pieces: fed those, it knows when it is whole. A large body is not kept."""

    def __init__(self):
        self.data, self.head, self.length, self.left = bytearray(), None, 0, 1

    def feed(self, data):
        if not data:
            raise Failed("the connection was closed: %r" % bytes(self.data[:100]))
        self.data += data
        if self.head is None and b"\r\n\r\n" in self.data:
            head, _, body = self.data.partition(b"\r\n\r\n")
            self.head, self.data, data = bytes(head), body, body
            self.length = self.left = int(re.search(rb"(?i)content-length: *(\d+)|$", head).group(1) or 0)
        if self.head is not None:
            self.left -= len(data)
        return self.left <= 0

    @property
    def status(self):
        return int(self.head.split(None, 2)[1])

    def check(self, cell=True):
        """A cell that failed answers faster than one that ran: it must not count."""
        if self.status != 200 or cell and self.length < MIB and not re.search(rb'"success": ?true', self.data):
            raise Failed("%d %r" % (self.status, bytes(self.data[:200])))
        return self.length


def read_answer(sock, cell=False):
    """Read a whole answer, of a cell that has to have succeeded if ``cell``; the size of its body."""
    answer = Answer()
    while not answer.feed(sock.recv(65536)):
        if answer.length > MIB:
            drain(sock, answer.left)
            break
    return answer.check(cell)


def drain(sock, size):
    scratch = bytearray(MIB)
    while size > 0:
        count = sock.recv_into(scratch, min(size, MIB))
        if not count:
            raise Failed("the answer ends early")
        size -= count


def send_zeros(sock, size):
    for start in range(0, size, MIB):
        sock.sendall(ZEROS[: min(MIB, size - start)])


def run(worker, source, size=None, **params):
    """Push a cell over a connection of its own; the size of the answer."""
    head, tail = push(source, size, **params)
    with connect(worker.port) as sock:
        sock.sendall(head)
        send_zeros(sock, size or 0)
        sock.sendall(tail)
        return read_answer(sock, True)


# ---------------------------------------------------------------------------------------
# Floors: what this machine takes without a worker
# ---------------------------------------------------------------------------------------

FORKS = """
import gc, os, sys, time
for name in sys.argv[1:]:
    __import__(name)
gc.collect(); gc.freeze()
for _ in sys.stdin:
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    print(time.perf_counter() - began, flush=True)
"""


class ForkFloor:
    """A process that has imported these modules; each call has it fork one that ends at once."""

    def __init__(self, *modules):
        command = [sys.executable, "-W", "ignore", "-c", FORKS, *modules]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )

    def __call__(self):
        self.process.stdin.write("\n")
        line = self.process.stdout.readline()
        if not line:
            raise Failed("not installed here")
        return float(line)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait()


def in_child(call):
    """Run this in a forked process; its pid."""
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(60)
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


@contextlib.contextmanager
def loopback(serve):
    """A connected loopback pair, with ``serve`` at its far end in another process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = in_child(lambda: serve(listener.accept()[0]))
        sock = connect(listener.getsockname()[1])
    try:
        with sock:
            yield sock
    finally:
        os.waitpid(pid, 0)


def copy_in(size):
    """Seconds to take so many bytes from a loopback socket into a file."""

    def serve(sock):
        buffer, left = memoryview(bytearray(MIB)), size
        with tempfile.TemporaryFile(buffering=0) as file:
            while left:
                left -= file.write(buffer[: sock.recv_into(buffer)])
            sock.sendall(b"x")  # the file's removal is nobody's wait

    with loopback(serve) as sock:
        return timed(lambda: (send_zeros(sock, size), sock.recv(1)))


def copy_out(file, size):
    """Seconds to get so many bytes of a file through a loopback socket, by sendfile."""
    with loopback(lambda sock: (sock.recv(1), sock.sendfile(file, 0, size))) as sock:
        return timed(lambda: (sock.sendall(b"x"), drain(sock, size)))


def file_of_zeros(size):
    file = tempfile.TemporaryFile(buffering=0)
    for _ in range(size // MIB):
        file.write(ZEROS)
    return file


# ---------------------------------------------------------------------------------------
# Measurements of one worker
# ---------------------------------------------------------------------------------------


def cell_timer(worker, stack, source, **params):
    """A call that gives the seconds of a cell over a kept-alive connection."""
    if worker is None:
        return None
    data, sock = b"".join(push(source, **params)), stack.enter_context(connect(worker.port))

    def ask():
        sock.sendall(data)
        read_answer(sock, True)

    ask()  # whatever a worker does for its first cell alone
    return lambda: timed(ask)


def cells_per_second(worker, seconds, clients=8):
    """Answers a second to clients that each ask again at once; one thread, prebuilt bytes."""
    data = b"".join(push("x = 1"))
    ended, answers = [], {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for _ in range(clients):
            sock = stack.enter_context(connect(worker.port))
            selector.register(sock, selectors.EVENT_READ)
            sock.sendall(data)
            answers[sock] = Answer()
        while answers:
            for key, _ in selector.select(60) or stop("no answer for 60 s"):
                if answers[key.fileobj].feed(key.fileobj.recv(65536)):
                    answers.pop(key.fileobj).check()
                    ended.append(time.perf_counter())
                    if enough(ended, clients, seconds):
                        selector.unregister(key.fileobj)  # a worker may close it while others are answered
                    else:
                        key.fileobj.sendall(data)
                        answers[key.fileobj] = Answer()
    if len(ended) >= 3 * clients:
        ended = ended[clients - 1 : len(ended) - clients + 1]  # all clients were at work between these
    return (len(ended) - 1) / (ended[-1] - ended[0])


def enough(ended, clients, seconds):
    """A slow worker gets up to four times as long to answer each client three times."""
    went_on = ended[-1] - ended[0]
    return went_on > seconds and (len(ended) >= 3 * clients or went_on > 4 * seconds)


def stop(reason):
    raise Failed(reason)


def push_seconds(worker, size):
    """A file comes in, and a cell that looks at its size runs."""
    return timed(lambda: run(worker, "import os\nassert os.path.getsize(data) == %d" % size, size))


numbers = itertools.count()


def output_seconds(worker, size):
    """(seconds beyond the cell, seconds in all) of a cell with an output of so many bytes."""
    build_id = "bench-%d-%d" % (os.getpid(), next(numbers))
    began = time.perf_counter()
    if run(worker, "blob = bytes(%d)" % size, build_id=build_id) < size:
        raise Failed("the output is not all there")
    whole = time.perf_counter() - began
    return whole - (worker.running_seconds(build_id) or 0.0), whole


def growth(worker, call):
    """How far the server's memory rises above where it was."""
    Path("/proc/%d/clear_refs" % worker.process.pid).write_text("5")
    before = memory(worker.process.pid, "VmRSS")
    call(worker)
    return memory(worker.process.pid, "VmHWM") - before


def memory(pid, field):
    return int(re.search(field + r":\s*(\d+)", Path("/proc/%d/status" % pid).read_text()).group(1)) * 1024


def pull(worker, size):
    """A cell by manifest, with an input and an output of so many bytes."""
    with Store(size) as store:
        params = {
            "source": "import os\nassert os.path.getsize(data) == %d\nblob = bytes(%d)" % (size, size),
            "timeout_seconds": 120,
            "input_specs": {
                "data": {"uri": "strata://artifact/a@v=1", "content_type": "file/path", "file": "data.bin"}
            },
        }
        manifest = {
            "build_id": "bench-pull-%d" % next(numbers),
            "inputs": [{"artifact_id": "a", "version": 1, "url": store.url + "/in"}],
            "metadata": {"executor_ref": "notebook_cell@v1", "params": params},
            "output": {"url": store.url + "/out", "max_bytes": 4 * size},
            "finalize_url": store.url + "/finalize",
        }
        body = json.dumps(manifest).encode()
        with connect(worker.port) as sock:
            sock.sendall(post("/v1/execute-manifest", len(body)) + body)
            read_answer(sock)
        if store.received < size:
            raise Failed("%d bytes were uploaded" % store.received)


class Store:
    """Serves one input of zeros, and counts what is uploaded."""

    def __init__(self, size):
        store, self.received = self, 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(size)
                send_zeros(self.connection, size)

            def do_POST(self):
                left, scratch = int(self.headers["Content-Length"]), memoryview(bytearray(MIB))
                while left:
                    count = self.rfile.readinto(scratch[: min(left, MIB)])
                    left, store.received = left - count, store.received + count
                self.answer(2)
                self.wfile.write(b"{}")

            do_PUT = do_POST

            def answer(self, length):
                self.send_response(200)
                self.send_header("Content-Length", str(length))
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:%d" % self.server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self.server.shutdown()
        self.server.server_close()


def health_under_load(worker, seconds):
    """Times of /health, a connection each, while a cell burns each core and 256 MiB come in again and again."""
    pid = in_child(lambda: load(worker, seconds + 2))  # not a thread: the client's own waits are not the worker's
    time.sleep(2)
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        times.append(timed(lambda: health(worker.port)))
        time.sleep(0.005)
    if os.waitpid(pid, 0)[1]:
        raise Failed("its load did not run")
    return times


def load(worker, seconds):
    end = time.monotonic() + seconds
    burn = b"".join(push("import time\nend = time.time() + %g\nwhile time.time() < end: pass" % seconds))
    burning = [connect(worker.port) for _ in range(os.cpu_count())]
    for sock in burning:
        sock.sendall(burn)
    while time.monotonic() < end:
        run(worker, "x = 1", 256 * MIB)
    for sock in burning:
        read_answer(sock, True)


def refusal(worker, status, token=None):
    """(seconds, bytes) until a 256 MiB upload is refused, and of it that the other end took."""
    size = 256 * MIB
    head, tail = push("x = 1", size, token=token)
    began, answered, answer = time.perf_counter(), None, Answer()
    with connect(worker.port) as sock, contextlib.suppress(ConnectionError, Failed):
        sock.setblocking(False)
        rest = itertools.chain([head], itertools.repeat(ZEROS, size // MIB), [tail])
        pending = memoryview(next(rest))
        while time.perf_counter() < (began + 60 if answered is None else answered + 2.5):
            readable, writable, _ = select.select([sock], [sock] if pending else [], [], 0.1)
            if readable and answer.feed(sock.recv(65536)) and answered is None:
                answered = time.perf_counter()
            if answered and not pending:
                break
            if writable:
                pending = pending[sock.send(pending) :] or memoryview(next(rest, b""))
            counted = acknowledged(sock)
    if answered is None or answer.status != status:
        raise Failed("no %d: %r" % (status, answer.head))
    return answered - began, counted


def acknowledged(sock):
    """tcpi_bytes_acked of linux/tcp.h."""
    return struct.unpack_from("<Q", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 120)[0]


@contextlib.contextmanager
def waiting_cells(worker, count, token=None):
    """So many cells that have started and wait for the end of the block."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        gate = Path(folder, "gate")
        gate.touch()
        source = "import os, time\nopen('%s/%%d' %% os.getpid(), 'w').close()\n" % folder
        source += "while os.path.exists('%s'): time.sleep(0.05)" % gate
        socks = [stack.enter_context(connect(worker.port)) for _ in range(count)]
        for sock in socks:
            sock.sendall(b"".join(push(source, token=token)))
        deadline = time.monotonic() + 30
        while len(os.listdir(folder)) <= count:
            if time.monotonic() > deadline:
                raise Failed("the cells do not start")
            time.sleep(0.02)
        yield
        gate.unlink()
        for sock in socks:
            read_answer(sock, True)


def waiting_memory(worker, count=8):
    """(PSS of the cells' processes, what the whole tree grew by), for each of so many waiting cells."""
    before = tree(worker.process.pid)
    with waiting_cells(worker, count):
        time.sleep(0.3)
        after = tree(worker.process.pid)
    cells = sum(size for pid, size in after.items() if pid not in before)
    return cells / count, (sum(after.values()) - sum(before.values())) / count


def tree(pid):
    """PSS of a process and of each below it, by pid."""
    found = {}
    with contextlib.suppress(OSError, AttributeError):  # it has ended meanwhile
        found[pid] = int(re.search(r"Pss:\s*(\d+)", Path("/proc/%d/smaps_rollup" % pid).read_text()).group(1)) * 1024
        for task in Path("/proc/%d/task" % pid).glob("*/children"):
            for child in task.read_text().split():
                found.update(tree(int(child)))
    return found


def locked_environment(folder):
    """The ``environment`` block of a lock without packages, and the variables a worker needs to build it."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if uv is None:
        raise Failed("no uv")
    try:
        sys.path.insert(0, str(HERE))
        from strata_worker import uv_lock_key
    except ImportError:
        raise Failed("no uv_lock_key") from None
    pyproject = '[project]\nname = "bench"\nversion = "0"\nrequires-python = ">=3.10"\ndependencies = []\n'
    Path(folder, "pyproject.toml").write_text(pyproject)
    lock = [uv, "lock", "--offline", "--quiet", "--python", sys.executable]
    done = subprocess.run(lock, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr)
    text = Path(folder, "uv.lock").read_text()
    python = "%d.%d" % sys.version_info[:2]
    folders = [str(Path(uv).parent), str(Path(os.path.realpath(sys.executable)).parent), os.environ["PATH"]]
    env = {"PATH": os.pathsep.join(folders), "UV_OFFLINE": "1", "STRATA_WORKER_ENV_ROOT": folder + "/envs"}
    return {"key": uv_lock_key(text), "python": python, "lockfile": text, "pyproject": pyproject}, env


# ---------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------


def ms(seconds):
    return "%.1f ms" % (seconds * 1e3) if seconds < 1 else "%.2f s" % seconds


def mib(size):
    return "%.1f MiB" % (size / MIB)


def rate_of(size):
    return lambda seconds: "%.0f MB/s" % (size / seconds / 1e6)


class Bench:
    """One run: both workers, what time is left, and the rows as they come."""

    def __init__(self, vs, quick):
        self.vs, self.quick = vs, quick
        self.limit = 115 if quick else 900
        self.began = time.monotonic()
        self.workers = (None, None)

    @property
    def late(self):
        """Most of the time is gone: the other worker is left out then, for ours has to be measured."""
        return time.monotonic() - self.began > 0.6 * self.limit

    @property
    def both(self):
        return self.workers[0], None if self.late else self.workers[1]

    def turns(self, measure, count, seconds, floors=(), slow=False):
        """Samples of the floors, ours and the other; what is ``slow`` with the other is not for a quick run."""
        ours, other = self.both
        workers = (ours, None if slow and self.quick else other)
        return in_turns([*floors, *(worker and partial(measure, worker) for worker in workers)], count, seconds)

    def head(self):
        uname, load = os.uname(), "%.1f" % os.getloadavg()[0]
        facts = (time.strftime("%Y-%m-%d"), os.cpu_count(), sys.version.split()[0], uname.release, load)
        print("%s, %d cores, Python %s, Linux %s, load average at the start %s\n" % facts)
        other = " other | ratio |" if self.vs else ""
        print("| what | floor | this worker |%s target | met |" % other)
        print("|---|---|---|%s---|---|" % ("---|---|" if self.vs else ""), flush=True)

    def row(self, what, shown, times, target, met, floor=""):
        """``shown`` is ours and the other; ``times`` how much better ours is; ``met`` None if that is open."""
        ours, other = shown
        compared = [other, "%.3g ×" % times if times else ""] if self.vs else []
        verdict = "" if met is None else "yes" if met else "NO"
        print("| " + " | ".join([what, floor, ours, *compared, target, verdict]) + " |", flush=True)

    def simple(self, what, samples, form, target, limit):
        """The row of one number of each worker that has to stay under a limit."""
        ours, other = samples
        met = bool(ours and ours.p50 < limit)
        self.row(what, (ours.show(form), other.show(form)), ratio(other, ours), target, met)

    def run(self):
        """Starts, then all that one pair of workers can be asked, then what needs workers of its own."""
        self.attempt(self.starts)
        with contextlib.ExitStack() as stack:
            local = {"STRATA_WORKER_ALLOW_LOCAL_HOSTS": "1"}
            self.workers = [command and stack.enter_context(Worker(command, **local)) for command in (OURS, self.vs)]
            for rows in (
                self.cells,
                self.rate,
                self.pushed,
                self.output,
                self.rest,
                self.waiting,
                self.health,
                self.memory,
            ):
                self.attempt(rows)
        self.workers = (None, None)
        self.attempt(self.refusals)
        self.attempt(self.locked)

    def attempt(self, rows):
        try:
            rows()
        except (Failed, OSError) as problem:
            self.row(rows.__name__, (complaint(problem), ""), None, "", False)

    def starts(self):
        def start(command):
            with Worker(command) as worker:
                return worker.start_seconds

        with installed() as command:
            calls = [each and partial(start, each) for each in (command, OURS, self.vs)]
            samples = in_turns(calls, 5 if self.quick else 11, 5 if self.quick else 40)
        for what, ours in zip(("installed", "run as a script"), samples):
            self.simple("start to first `/health`, " + what, (ours, samples[2]), ms, "under 250 ms", 0.25)

    def cells(self):
        with contextlib.ExitStack() as stack:
            floors = [stack.enter_context(ForkFloor(*names)) for names in (("pandas", "pyarrow"), ("pyarrow",))]
            for source in ("x = 1", "import pandas\nx = 1"):
                timers = [failing(cell_timer, worker, stack, source) for worker in self.both]
                self.cell(source, floors + timers)

    def cell(self, source, calls):
        count, seconds = (40, 4) if self.quick else (200, 30)
        fork, small, ours, other = in_turns(calls, count, seconds)
        met = bool(ours and (not fork or ours.p50 <= 3 * fork.p50) and (not other or other.p50 >= 50 * ours.p50))
        what, target = "`%s`" % source.replace("\n", "; "), "50 × the other, at most 3 × the floor"
        floor = "%s; pyarrow only %s" % (fork.show(ms), small.show(ms))
        self.row(what, (ours.show(ms), other.show(ms)), ratio(other, ours), target, met, floor)

    def rate(self):
        seconds, count = (2, 1) if self.quick else (10, 3)
        ours, other = self.turns(lambda worker: cells_per_second(worker, seconds), count, 60)
        times = ratio(ours, other)
        met = (times >= 40 if times else None) if ours else False
        shown = (ours.show("{:.3g}".format), other.show("{:.3g}".format))
        self.row("cells per second, 8 clients", shown, times, "40 × the other", met)

    def pushed(self):
        self.pushed_of(256 * MIB, 5)
        self.pushed_of(1024 * MIB, 3, slow=True)

    def pushed_of(self, size, count, slow=False):
        seconds, floor = 4 if self.quick else 60, [partial(copy_in, size)]
        samples = self.turns(lambda worker: push_seconds(worker, size), count, seconds, floor, slow)
        floor, *shown = [sample.show(rate_of(size)) for sample in samples]
        met = reaches(0.6, *samples[:2])
        self.row("%d MiB pushed" % (size // MIB), shown, ratio(*samples[:0:-1]), "60% of the floor", met, floor)

    def output(self):
        size, form = 512 * MIB, rate_of(512 * MIB)
        with file_of_zeros(size) as file:
            floor, seconds = [partial(copy_out, file, size)], 6 if self.quick else 60
            floor, ours, other = self.turns(lambda worker: output_seconds(worker, size), 5, seconds, floor, slow=True)
        beyond, whole, others = ours.column(0), ours.column(1), other.column(1)
        shown, met = (beyond.show(form), ""), reaches(0.6, floor, beyond)
        self.row("512 MiB output, beyond the cell", shown, None, "60% of the floor", met, floor.show(form))
        self.row("512 MiB output, with the cell", (whole.show(form), others.show(form)), ratio(others, whole), "", None)

    def rest(self):
        with installed() as command, Worker(command) as worker:
            for _ in range(20):
                run(worker, "x = 1")
            time.sleep(1)
            resident = [memory(each.process.pid, "VmRSS") for each in (worker, *filter(None, self.workers))]
        samples = [Sample().of([size]) for size in resident] + [Sample()]
        self.simple("server process at rest, installed", (samples[0], samples[2]), mib, "under 40 MiB", 40 * MIB)
        self.simple("server process at rest, run as a script", samples[1:3], mib, "under 40 MiB", 40 * MIB)

    def waiting(self):
        samples = self.turns(waiting_memory, 1, 60, slow=True)
        shown = [sample.show_pair(mib, "%s (tree %s)") for sample in samples]
        met = bool(samples[0] and max(samples[0].values[0]) < 25 * MIB)
        times = ratio(samples[1].column(0), samples[0].column(0))
        self.row("each of eight waiting cells, PSS", shown, times, "under 25 MiB", met)

    def health(self):
        seconds = 4 if self.quick else 20
        samples = self.turns(lambda worker: health_under_load(worker, seconds), 1, 60, slow=True)
        ours, other = [sample.flat() for sample in samples]
        shown = [sample.show(ms, 0.99) for sample in (ours, other)]
        times = other.at(0.99) / ours.at(0.99) if ours and other else None
        met = bool(ours and ours.at(0.99) < 0.025)
        self.row("`/health` under load, p50 (p99)", shown, times, "p99 under 25 ms", met)

    def memory(self):
        size = (256 if self.quick else 1024) * MIB  # what grows with the size shows at either
        ways = {
            "push": lambda worker: (push_seconds(worker, size), output_seconds(worker, size)),
            "pull": lambda worker: pull(worker, size),
        }
        for name, call in ways.items():
            samples = self.turns(partial(growth, call=call), 1, 120, slow=True)
            what = "%d MiB in, %d MiB out, %s: server grows by" % (size // MIB, size // MIB, name)
            self.simple(what, samples, mib, "under 32 MiB", 32 * MIB)

    def refusals(self):
        env = {"STRATA_WORKER_TOKEN": TOKEN, "STRATA_WORKER_HOST": "127.0.0.1", "STRATA_WORKER_MAX_CONCURRENT": "1"}
        with contextlib.ExitStack() as stack:
            other = None if self.late else self.vs
            self.workers = [command and stack.enter_context(Worker(command, **env)) for command in (OURS, other)]
            self.refused(401)
            for worker in filter(None, self.workers):
                stack.enter_context(waiting_cells(worker, 1, TOKEN))
            self.refused(503, TOKEN)

    def refused(self, status, token=None):
        samples = self.turns(lambda worker: refusal(worker, status, token), 5, 4 if self.quick else 30)
        shown = [sample.column(0).show(ms) + sample.column(1).most(", at most %s", mib) for sample in samples]
        seconds, size = samples[0].column(0), samples[0].column(1)
        met = bool(seconds and seconds.p50 < 0.02 and size.at(1) < MIB)
        times = ratio(samples[1].column(0), seconds)
        self.row("a 256 MiB upload refused, %d" % status, shown, times, "under 20 ms and 1 MiB", met)

    def locked(self):
        what, target = "cell in a locked environment; a plain one", "within 20 ms of a plain cell"
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
            try:
                block, env = locked_environment(folder)
                worker = stack.enter_context(Worker(OURS, **env))
                timers = [cell_timer(worker, stack, "x = 1", **params) for params in ({"environment": block}, {})]
            except Failed as problem:
                return self.row(what, (complaint(problem, "skipped"), ""), None, target, None)
            time.sleep(1)  # the fork server of the environment starts behind its first cell
            locked, plain = in_turns(timers, 40 if self.quick else 200, 10)
        met = bool(locked and plain and locked.p50 - plain.p50 < 0.02)
        self.row(what, ("%s; %s" % (locked.show(ms), plain.show(ms)), ""), None, target, met)


def ratio(larger, smaller):
    return larger.p50 / smaller.p50 if larger and smaller else None


def reaches(part, floor, ours):
    """Whether a rate is this part of the floor's, by their times."""
    return bool(floor and ours and floor.p50 >= part * ours.p50)


def failing(make, *arguments):
    """What ``make`` gives, or a call that raises what it raised: that belongs in the table."""
    try:
        return make(*arguments)
    except (Failed, OSError) as problem:
        return lambda text=str(problem): stop(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--vs", metavar="COMMAND", help="another worker's command, with {port} in it")
    options = parser.parse_args()
    bench = Bench(options.vs, options.quick)

    def on_alarm(*_):
        raise OutOfTime

    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every with: no worker is left behind
    signal.alarm(bench.limit)
    bench.head()
    try:
        bench.run()
    except OutOfTime:
        sys.exit("\nstopped after %d s: rows that are not here were not measured" % bench.limit)
    except Failed as problem:
        sys.exit("\nstopped: %s" % problem)
    print("\n%.0f s; load average at the end %.1f" % (time.monotonic() - bench.began, os.getloadavg()[0]))


if __name__ == "__main__":
    main()
