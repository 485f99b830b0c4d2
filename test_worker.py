"""Tests against real workers on real ports. Each reads as one sentence of what the worker promises.

Helpers          a worker process, a client, a peer that serves signed URLs
Command line     flags, variables, starting and stopping
HTTP             requests as they come, early refusals, limits
Multipart        the form parser, one byte at a time
Health           what the worker says of itself
Secrets          the token, and what a cell can find
Execute          the push model
Stopping         timeouts, cancels, crashes
Pull             signed URLs, retries, the live console
URLs             fetches that cannot be turned inward
"""

import base64
import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import http.server
import importlib.util
import io
import ipaddress
import json
import os
import pathlib
import pickle
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
import types
import urllib.parse
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

import strata_worker
from strata_worker import (
    Mount,
    MountCache,
    OptionError,
    Settings,
    Store,
    WorkerError,
    output_dir_names,
    store_arguments,
    unpack_folder,
)

HERE = Path(strata_worker.__file__).resolve().parent

# For a fuzz run of minutes: STRATA_TEST_EXAMPLES=20000 python -m pytest -k "parser or form or head"
EXAMPLES = int(os.environ.get("STRATA_TEST_EXAMPLES", "100"))
hypothesis_settings.register_profile("worker", deadline=None, max_examples=EXAMPLES)
hypothesis_settings.load_profile("worker")


# ---------------------------------------------------------------------------------------
# Helpers: a worker process, a client, a peer that serves signed URLs
# ---------------------------------------------------------------------------------------


def need(condition, reason):
    """Skip on a laptop and fail in CI when something that the test needs is missing."""
    if not condition:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def eventually(condition, what, seconds=10):
    """Wait until ``condition()`` is true; its value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "never: " + what
        time.sleep(0.01)


# STRATA_TEST_PRELOAD=off runs the suite without a fork server.
PRELOAD = {"STRATA_WORKER_PRELOAD": os.environ["STRATA_TEST_PRELOAD"]} if "STRATA_TEST_PRELOAD" in os.environ else {}


needs_fork_server = pytest.mark.skipif(
    PRELOAD.get("STRATA_WORKER_PRELOAD") == "off", reason="the suite runs without a fork server"
)


class WorkerProcess:
    """``python strata_worker.py --port 0``, its URL and its log."""

    def __init__(self, *flags, folder=HERE, python=sys.executable, cwd=None, command=(), **env):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
        self.log_file = tempfile.NamedTemporaryFile("r", prefix="worker-log-")
        self.process = subprocess.Popen(
            [*(command or (python, str(Path(folder) / "strata_worker.py"))), "--port", "0", *flags],
            env={**clean, **PRELOAD, **env},
            cwd=cwd,
            stderr=open(self.log_file.name, "w"),
            stdout=subprocess.DEVNULL,
        )
        try:
            self.url = eventually(self.find_url, "the worker listens", 20)
        except BaseException:
            self.process.kill()
            raise
        self.port = int(self.url.rsplit(":", 1)[1])

    def find_url(self):
        assert self.process.poll() is None, self.log()
        found = re.search(r"listening on (http://[\w.:\[\]]+)", self.log())
        return found and found.group(1)

    def log(self):
        return Path(self.log_file.name).read_text(errors="replace")

    def stop(self, number=signal.SIGTERM, timeout=20):
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def __enter__(self):
        return Client(self)

    def __exit__(self, *exc_info):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            eventually(lambda: self.process.poll() is not None or "stopping: " in self.log(), "it stops")
            self.process.send_signal(signal.SIGTERM)  # at once
            try:
                self.process.wait(20)
            finally:
                self.process.kill()


class Bundle:
    """An output bundle, unpacked."""

    def __init__(self, data):
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            self.files = {member.name: tar.extractfile(member).read() for member in tar}
        self.names = list(self.files)
        self.manifest = json.loads(self.files["manifest.json"])
        self.stdout = self.files["stdout.txt"].decode()
        self.stderr = self.files["stderr.txt"].decode()

    def json(self, name):
        entry = self.manifest["variables"][name]
        assert entry["content_type"] == "json/object", entry
        return json.loads(self.files[entry["file"]])


class Answer:
    """What the worker answered: ``status``, ``headers``, ``body``, and what is in it."""

    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def bundle(self):
        assert self.status == 200, (self.status, self.body[:2000])
        return Bundle(self.body)


class Client:
    """Talks to a worker as a Strata server does."""

    def __init__(self, worker, token=None):
        self.worker = worker
        self.port = worker.port if hasattr(worker, "port") else int(worker.url.rsplit(":", 1)[1])
        self.token = token

    def request(self, method, path, body=None, headers=(), timeout=60):
        headers = dict(headers)
        if self.token:
            headers["Authorization"] = "Bearer " + self.token
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            return Answer(connection.getresponse())

    def health(self):
        return self.request("GET", "/health").json

    def form(self, path, metadata, parts=(), timeout=60):
        body, content_type = form_of([("metadata", json.dumps(metadata).encode()), *parts])
        return self.request(
            "POST", path, body, {"Content-Type": content_type, "X-Strata-Executor-Protocol": "v1"}, timeout
        )

    def execute(self, source, inputs=(), build_id=None, timeout=60, **params):
        """Push a cell; ``inputs`` are (name, format, bytes)."""
        parts = [(name, data) for name, _, data in inputs]
        return self.form(
            "/v1/execute", envelope(source, [(n, f) for n, f, _ in inputs], build_id, **params), parts, timeout
        )

    def run(self, source, inputs=(), **params):
        """Push a cell that has to succeed; its Bundle."""
        bundle = self.execute(source, inputs, **params).bundle
        assert bundle.manifest["success"], bundle.manifest["traceback"]
        return bundle

    def manifest(self, manifest, path="/v1/execute-manifest", timeout=60):
        return self.request("POST", path, json.dumps(manifest).encode(), {"Content-Type": "application/json"}, timeout)

    def cancel(self, build_id):
        return self.request("POST", "/v1/executions/%s/cancel" % urllib.parse.quote(build_id, safe="")).json

    def send(self, data):
        """A raw connection on which these bytes were sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        sock.sendall(data)
        return sock

    def exchange(self, data):
        """Everything the worker answers to these bytes, until it closes."""
        with self.send(data) as sock:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(65536), b""))


def envelope(source, inputs=(), build_id=None, **params):
    return {
        "protocol_version": "v1",
        "build_id": build_id,
        "transform": {"ref": "notebook_cell@v1", "params": {"source": source, **params}},
        "inputs": [{"name": name, "format": format} for name, format in inputs],
    }


def form_of(parts, boundary="boundary-of-a-test"):
    """A multipart body and its Content-Type."""
    body = b"".join(
        b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n%s\r\n'
        % (boundary.encode(), name.encode(), data)
        for name, data in parts
    )
    return body + b"--%s--\r\n" % boundary.encode(), "multipart/form-data; boundary=" + boundary


@pytest.fixture(scope="session")
def worker():
    with WorkerProcess() as client:
        yield client


@pytest.fixture(scope="session")
def pull_worker():
    """One that may fetch from this machine, where the tests' own peers are."""
    with WorkerProcess(STRATA_WORKER_ALLOW_LOCAL_HOSTS="1", STRATA_WORKER_STALL_SECONDS="3") as client:
        yield client


def processes_of(pid):
    """Every descendant of a process, as (pid, command line)."""
    psutil = pytest.importorskip("psutil")
    try:
        return [(child.pid, child.cmdline()) for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


# ---------------------------------------------------------------------------------------
# Command line: flags, variables, starting and stopping
# ---------------------------------------------------------------------------------------


def run_command(*arguments, env=(), python=sys.executable, folder=HERE):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    return subprocess.run(
        [python, str(Path(folder) / "strata_worker.py"), *arguments],
        env={**clean, **dict(env)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_help_documents_every_variable():
    text = run_command("--help").stdout
    for name in re.findall(r'"(STRATA_(?:WORKER|NOTEBOOK)_[A-Z_]+)"', (HERE / "strata_worker.py").read_text()):
        assert name in text


def test_the_readme_documents_every_setting_as_the_code_does():
    readme = (HERE / "README.md").read_text()
    for field in dataclasses.fields(strata_worker.Settings):
        flag = "`%s`" % field.metadata["flag"] if field.metadata["flag"] else ""
        assert "| `%s` | %s | %s |" % (field.metadata["env"], flag, field.metadata["doc"]) in readme


def test_the_readme_names_tests_that_are_there():
    promises = (HERE / "README.md").read_text().partition("## Promises")[2].partition("## Security")[0]
    named = re.findall(r"`(test_\w+)`", promises)
    assert named and set(named) <= set(globals())


def test_the_modules_docstring_is_a_map_of_its_sections():
    banners = re.findall(r"^# -{80,}\n# ([\w ]+): .*\n# -{80,}$", (HERE / "strata_worker.py").read_text(), re.MULTILINE)
    assert banners == re.findall(r"^    ([A-Z][\w ]*?)  +\S", strata_worker.__doc__, re.MULTILINE)


def test_version_is_printed():
    assert run_command("--version").stdout.strip() == "strata-worker " + strata_worker.__version__


@pytest.mark.parametrize(
    "flags, env, named",
    [
        (["--port", "http"], {}, "--port"),
        (["--port", "70000"], {}, "--port"),
        (["--max-concurrent", "0"], {}, "--max-concurrent"),
        (["--gpu-slots", "two"], {}, "--gpu-slots"),
        (["--log-level", "loud"], {}, "--log-level"),
        ([], {"STRATA_WORKER_DRAIN_SECONDS": "-1"}, "STRATA_WORKER_DRAIN_SECONDS"),
        ([], {"STRATA_WORKER_MAX_INPUT_BYTES": "2GB"}, "STRATA_WORKER_MAX_INPUT_BYTES"),
        ([], {"STRATA_NOTEBOOK_HARNESS_ENV_ALLOWLIST": "[1]"}, "STRATA_NOTEBOOK_HARNESS_ENV_ALLOWLIST"),
    ],
)
def test_a_bad_setting_is_refused_at_start_by_name(flags, env, named):
    done = run_command(*flags, env=env)
    assert done.returncode == 1
    assert named in done.stderr and "Traceback" not in done.stderr


def test_a_flag_wins_over_its_variable():
    with WorkerProcess("--max-concurrent", "3", STRATA_WORKER_MAX_CONCURRENT="7") as client:
        assert client.health()["max_concurrent"] == 3


def test_a_taken_port_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_command("--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "in use" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_sibling_is_one_clear_line(tmp_path):
    shutil.copy(HERE / "strata_worker.py", tmp_path)
    done = run_command("--port", "0", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "harness.py" in done.stderr


def test_a_missing_h11_is_one_clear_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['h11'] = None\n")
    done = run_command("--port", "0", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "pip install h11" in done.stderr


def old_python():
    found = sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python"))
    found += filter(None, map(shutil.which, ("python3.9", "python3.8", "python3.7")))
    return next((str(path) for path in found if "shims" not in str(path)), None)


def test_a_too_old_python_is_one_clear_line():
    python = old_python()
    if python is None:
        pytest.skip("no Python older than 3.10 here")
    done = run_command("--port", "0", python=python)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "3.10" in done.stderr


def test_the_default_host_is_loopback_and_every_address_with_a_token():
    assert strata_worker.Settings().bind_host == "127.0.0.1"
    assert strata_worker.Settings(token="secret").bind_host == "0.0.0.0"
    assert strata_worker.Settings(token="secret", host="127.0.0.1").bind_host == "127.0.0.1"


def test_a_non_loopback_bind_without_a_token_is_warned_of():
    worker = WorkerProcess("--host", "0.0.0.0")
    with worker:
        assert "STRATA_WORKER_TOKEN" in worker.log()


def test_the_server_process_does_not_import_pyarrow(worker):
    worker.run("x = 1")
    maps = Path("/proc/%d/maps" % worker.worker.process.pid)
    if not maps.exists():
        pytest.skip("needs /proc")
    assert "pyarrow" not in maps.read_text()


def test_three_files_copied_into_an_empty_folder_are_enough(tmp_path):
    for name in ("strata_worker.py", "harness.py", "harness.R"):
        shutil.copy(HERE / name, tmp_path)
    with WorkerProcess(folder=tmp_path) as client:
        assert client.run("x = 1").json("x") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_cells_finish_and_exits_0(number):
    worker = WorkerProcess()
    with worker as client:
        with in_background(lambda: client.execute("import time; time.sleep(1); x = 1", build_id="slow")) as answer:
            eventually(lambda: client.health()["active_executions"], "the cell runs")
            assert worker.stop(number) == 0
        assert answer().bundle.json("x") == 1


def test_cells_that_outlast_the_drain_are_stopped():
    worker = WorkerProcess(STRATA_WORKER_DRAIN_SECONDS="0.5")
    with worker as client:
        with in_background(lambda: client.execute("import time; time.sleep(60)")) as answer:
            eventually(lambda: client.health()["active_executions"], "the cell runs")
            assert worker.stop(timeout=10) == 0
        assert answer().status == 500


def test_a_second_signal_stops_at_once():
    worker = WorkerProcess(STRATA_WORKER_DRAIN_SECONDS="60")
    with worker as client:
        with in_background(lambda: client.execute("import time; time.sleep(60)")):
            eventually(lambda: client.health()["active_executions"], "the cell runs")
            worker.process.send_signal(signal.SIGTERM)
            eventually(lambda: "stopping" in worker.log(), "the drain begins")
            assert worker.stop(timeout=10) == 0


def test_each_run_is_one_line_of_log(worker):
    worker.run("x = 1", build_id="logged-once")
    lines = eventually(lambda: [line for line in worker.worker.log().splitlines() if "logged-once" in line], "a line")
    assert len(lines) == 1
    assert re.search(
        r"ok, staging [\d.]+ s, running [\d.]+ s, answering [\d.]+ s, \d+ bytes in, \d+ bytes out", lines[0]
    )


@contextlib.contextmanager
def in_background(call):
    """Run ``call`` in a thread; gives a function that waits for its result."""
    box = {}

    def work():
        try:
            box["value"] = call()
        except BaseException as problem:
            box["problem"] = problem

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def result(timeout=30):
        thread.join(timeout)
        assert not thread.is_alive(), "still running"
        if "problem" in box:
            raise box["problem"]
        return box["value"]

    yield result
    thread.join(30)


def test_a_worker_is_embedded_twice_in_one_process_and_several_at_once():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("strata-")}

    for _ in range(2):
        with strata_worker.Worker(port=0, preload="") as one, strata_worker.Worker(port=0, preload="") as two:
            assert one.url != two.url
            assert Client(one).run("x = 1").json("x") == 1
            assert Client(two).run("x = 2").json("x") == 2
        eventually(lambda: not threads(), "its threads end")


def test_an_unknown_setting_of_an_embedded_worker_is_a_type_error():
    with pytest.raises(TypeError, match="prot"):
        strata_worker.Worker(prot=9000)


def test_folders_left_by_a_killed_worker_are_swept_by_the_next(tmp_path):
    worker = WorkerProcess(STRATA_WORKER_RUN_ROOT=str(tmp_path))
    with worker as client:
        with in_background(lambda: pytest.raises(OSError, client.execute, "import time; time.sleep(60)")):
            eventually(lambda: list(tmp_path.glob("*/run-*")), "a run's folder")
            worker.process.kill()
    with WorkerProcess(STRATA_WORKER_RUN_ROOT=str(tmp_path)):
        assert len(list(tmp_path.iterdir())) == 1


# ---------------------------------------------------------------------------------------
# HTTP: requests as they come, early refusals, limits
# ---------------------------------------------------------------------------------------


def statuses(data):
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3})", data)]


def test_a_connection_is_kept_for_the_next_request(worker):
    connection = http.client.HTTPConnection("127.0.0.1", worker.port)
    with contextlib.closing(connection):
        for _ in range(3):
            connection.request("GET", "/health")
            sock = connection.sock
            assert connection.getresponse().read()
            assert connection.sock is sock


def test_pipelined_requests_are_answered_in_order(worker):
    answers = worker.exchange(
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
        b"POST /v1/executions/a/cancel HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        b"PUT /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    assert statuses(answers) == [200, 404, 200, 405]


def test_a_request_that_arrives_byte_by_byte_is_answered(worker):
    with worker.send(b"") as sock:
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
            sock.sendall(bytes([byte]))
        assert statuses(sock.recv(65536)) == [200]


def test_head_answers_as_get_without_a_body(worker):
    answer = worker.request("HEAD", "/health")
    assert answer.status == 200 and answer.body == b"" and int(answer.headers["Content-Length"]) > 100


def test_an_unknown_path_is_404_and_a_wrong_method_405_with_allow(worker):
    missing = worker.request("GET", "/v2/execute")
    assert missing.status == 404 and "/v2/execute" in missing.json["detail"]
    wrong = worker.request("PUT", "/v1/execute")
    assert wrong.status == 405 and wrong.headers["Allow"] == "POST"
    assert worker.request("POST", "/health").headers["Allow"] == "GET, HEAD"


def test_hints_are_404_on_a_plain_worker(worker):
    assert worker.request("POST", "/v1/hints", b"{}").status == 404


def test_http_1_0_is_answered_and_closed(worker):
    answer = worker.exchange(b"GET /health HTTP/1.0\r\n\r\n")
    assert statuses(answer) == [200] and b"Connection: close" in answer


@pytest.mark.parametrize(
    "attack, head",
    [
        ("two lengths", b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
        ("two lengths in one field", b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n"),
        (
            "both framings",
            b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        ),
        ("bare line feeds", b"GET /health HTTP/1.1\nHost: x\n\n"),
        ("one bare line feed", b"GET /health HTTP/1.1\r\nHost: x\nX: y\r\n\r\n"),
        ("a folded line", b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n"),
        ("a space before the colon", b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n"),
        ("no host", b"GET /health HTTP/1.1\r\n\r\n"),
        ("a NUL in a header", b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n"),
        ("a negative length", b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"),
        ("a signed length", b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\n"),
        ("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"),
    ],
)
def test_a_head_that_servers_read_differently_is_400_and_closed(worker, attack, head):
    answer = worker.exchange(head)
    assert statuses(answer) == [400], attack
    assert b'{"detail": ' in answer and b"Connection: close" in answer


def test_an_unknown_transfer_coding_is_refused(worker):
    answer = worker.exchange(b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n")
    assert statuses(answer)[0] in (400, 501)


def test_a_head_without_end_is_431(worker):
    with worker.send(b"GET /health HTTP/1.1\r\nHost: x\r\n") as sock:
        with contextlib.suppress(OSError):
            for number in range(20_000):
                sock.sendall(b"X-%d: y\r\n" % number)
        assert statuses(sock.recv(65536)) == [431]


def test_a_chunked_upload_is_the_same_as_one_of_known_length(worker):
    body, content_type = form_of(
        [("metadata", json.dumps(envelope("x = a", [("a", "json/object")])).encode()), ("a", b"17")]
    )
    chunks = iter([body[:10], body[10:200], body[200:]])
    connection = http.client.HTTPConnection("127.0.0.1", worker.port)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/execute", chunks, {"Content-Type": content_type}, encode_chunked=True)
        assert Answer(connection.getresponse()).bundle.json("x") == 17
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200


def test_a_malformed_chunk_is_400(worker):
    _, content_type = form_of([])
    answer = worker.exchange(
        b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Type: %s\r\n\r\nzz\r\n"
        % content_type.encode()
    )
    assert statuses(answer) == [400]


def test_continue_is_sent_when_the_body_is_wanted(worker):
    body, content_type = form_of([("metadata", json.dumps(envelope("x = 1")).encode())])
    head = b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    with worker.send(head % (content_type.encode(), len(body))) as sock:
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert statuses(sock.recv(65536)) == [200]


def test_a_refusal_before_the_body_needs_no_continue():
    with WorkerProcess(STRATA_WORKER_TOKEN="s3cret", STRATA_WORKER_HOST="127.0.0.1") as client:
        head = b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1000000\r\n\r\n"
        with client.send(head) as sock:
            assert statuses(sock.recv(65536)) == [401]


def test_an_early_refusal_reaches_a_client_that_is_still_sending(worker):
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/nothing")
        connection.putheader("Content-Length", str(2**30))
        connection.endheaders()
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 2**30:
                connection.send(b"x" * 65536)
                sent += 65536
        answer = connection.getresponse()
        assert answer.status == 404 and json.loads(answer.read())["detail"]
        assert sent < 64 * 2**20, "the refused body was read to its end"


def test_a_full_worker_refuses_before_the_body(tmp_path):
    with WorkerProcess("--max-concurrent", "1") as client:
        with in_background(lambda: client.execute("import time; time.sleep(60)", build_id="holder")) as answer:
            eventually(lambda: client.health()["active_executions"], "the slot is taken")
            _, content_type = form_of([])
            head = b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: 300000000\r\n\r\n"
            with client.send(head % content_type.encode()) as sock:
                refusal = sock.recv(65536)
            assert statuses(refusal) == [503] and re.search(rb"(?i)retry-after: \d+", refusal)
            eventually(lambda: client.cancel("holder")["cancelled"], "its run is known by its id")
            answer()
        eventually(lambda: client.health()["active_executions"] == 0, "the slot is free")
        assert client.run("x = 1")


def test_a_stalled_body_is_408_and_its_slot_comes_back(pull_worker):
    _, content_type = form_of([])
    head = b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: 1000\r\n\r\n--bound"
    with pull_worker.send(head % content_type.encode()) as sock:
        assert statuses(sock.recv(65536)) == [408]
    eventually(lambda: pull_worker.health()["active_executions"] == 0, "the slot is free")


def test_a_client_that_vanishes_in_its_body_leaves_nothing(worker):
    _, content_type = form_of([])
    head = b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: 1000\r\n\r\n--bound"
    worker.send(head % content_type.encode()).close()
    eventually(lambda: worker.health()["active_executions"] == 0, "the slot is free")


def test_five_hundred_idle_connections_cost_no_threads(worker):
    status = Path("/proc/%d/status" % worker.worker.process.pid)
    if not status.exists():
        pytest.skip("needs /proc")

    def threads():
        return int(re.search(r"Threads:\s*(\d+)", status.read_text()).group(1))

    before = threads()
    with contextlib.ExitStack() as stack:
        for number in range(500):
            stack.enter_context(worker.send(b"GET /health HT" if number % 2 else b""))
        assert worker.health()["status"] == "healthy"
        assert threads() <= before + 4
        assert worker.run("x = 1")


# ---------------------------------------------------------------------------------------
# Multipart: the form parser, one byte at a time
# ---------------------------------------------------------------------------------------


def parse_form(body, boundary=b"B", pieces=None):
    """Parts of a form as [(name, filename, content)], fed in pieces of the given sizes."""
    parser = strata_worker.MultipartParser(boundary)
    found = []
    for piece in cut(body, pieces or [len(body)]):
        for event in parser.feed(piece):
            if isinstance(event, strata_worker.Part):
                found.append([event.name, event.filename, b""])
            else:
                found[-1][2] += event
    parser.close()
    return [tuple(part) for part in found]


def cut(data, sizes):
    position = 0
    while position < len(data):
        for size in sizes:
            yield data[position : position + size]
            position += size


FORM = (
    b"a preamble\r\nof two lines\r\n"
    b'--B\r\nContent-Disposition: form-data; name="one"; filename="o.bin"\r\nContent-Type: text/plain\r\n\r\nfirst\r\n'
    b"--B  \t\r\ncontent-disposition:form-data;name=two\r\n\r\n\r\n"
    b'--B\r\nContent-Disposition: form-data; name="three"\r\n\r\n--B in the line\r\n--Bx\r\n-\r\n--\r\n'
    b"--B--\r\nan epilogue --B\r\n"
)
FORM_PARTS = [("one", "o.bin", b"first"), ("two", None, b""), ("three", None, b"--B in the line\r\n--Bx\r\n-\r\n--")]


def test_a_form_is_parsed_however_it_is_cut():
    for size in range(1, len(FORM) + 1):
        assert parse_form(FORM, pieces=[size]) == FORM_PARTS


def test_a_form_is_parsed_when_split_at_every_byte():
    for at in range(1, len(FORM)):
        assert parse_form(FORM, pieces=[at, len(FORM)]) == FORM_PARTS


@given(
    parts=st.lists(
        st.tuples(st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n\0'), min_size=1), st.binary())
    ),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
)
def test_any_form_comes_back_part_by_part(parts, sizes):
    body, _ = form_of(parts, "a-boundary-that-random-bytes-do-not-hold")
    found = parse_form(body, b"a-boundary-that-random-bytes-do-not-hold", sizes)
    assert [(name, content) for name, _, content in found] == parts


@given(
    st.lists(st.sampled_from([b"\r\n", b"--B", b"--", b"\r", b"\n", b"-", b"B", b" ", b"x"]), max_size=40),
    st.integers(1, 7),
)
def test_content_made_of_pieces_of_delimiters_comes_back(pieces, size):
    content = b"".join(pieces)
    if re.search(rb"(^|\r\n)--B(--|[ \t]*\r\n|[ \t]*$)", content + b"\r\n"):
        return  # that is a delimiter
    body = b'--B\r\nContent-Disposition: form-data; name="n"\r\n\r\n' + content + b"\r\n--B--"
    assert parse_form(body, pieces=[size]) == [("n", None, content)]


@given(st.binary(max_size=300), st.integers(1, 9))
def test_no_bytes_make_the_form_parser_fail_but_by_400(data, size):
    try:
        parse_form(b"--B\r\n" + data, pieces=[size])
    except strata_worker.WorkerError as error:
        assert error.status == 400


def test_names_travel_as_raw_utf_8_and_as_rfc_8187():
    body = (
        '--B\r\nContent-Disposition: form-data; name="Žluť-26925fcf.json"; filename="a"\r\n\r\n1\r\n'
        "--B\r\nContent-Disposition: form-data; name=n; filename=\"x\"; filename*=UTF-8''%e2%82%ac.csv\r\n\r\n2\r\n--B--"
    ).encode()
    assert parse_form(body) == [("Žluť-26925fcf.json", "a", b"1"), ("n", "€.csv", b"2")]


@pytest.mark.parametrize("charset", ["\x16\0\0UT", "idna", "hex", "undefined", "utf-16", "x" * 500])
def test_a_charset_that_no_name_is_in_leaves_the_plain_name(charset):
    value = "form-data; name=n; filename=plain; filename*=%s''%%e2%%82" % charset
    assert strata_worker.header_parameters(value)[1]["filename"] == "plain"


def test_a_quoted_boundary_is_taken_without_its_quotes():
    assert strata_worker.form_boundary('multipart/form-data; boundary="a b:c"') == b"a b:c"
    for bad in (None, "text/plain", "multipart/form-data", 'multipart/form-data; boundary="' + "x" * 71 + '"'):
        with pytest.raises(strata_worker.WorkerError):
            strata_worker.form_boundary(bad)


def form_refused(body, boundary=b"B"):
    with pytest.raises(strata_worker.WorkerError) as caught:
        parse_form(body, boundary)
    assert caught.value.status == 400
    return caught.value.message


def test_a_form_without_its_final_boundary_is_400():
    assert "final boundary" in form_refused(FORM[: FORM.index(b"--B--")])


def test_part_headers_that_are_too_large_are_400():
    assert "headers" in form_refused(b"--B\r\nX: " + b"y" * 20_000)


def test_too_many_parts_are_400():
    part = b'--B\r\nContent-Disposition: form-data; name="n"\r\n\r\n\r\n'
    assert "parts" in form_refused(part * (strata_worker.MAX_PARTS + 1) + b"--B--")


def test_a_part_without_a_name_is_400():
    assert "name" in form_refused(b"--B\r\nContent-Type: text/plain\r\n\r\nx\r\n--B--")


def test_a_metadata_part_that_is_too_large_is_400(worker):
    body, content_type = form_of([("metadata", b" " * (strata_worker.MAX_METADATA + 1))])
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
    with contextlib.closing(connection):
        with contextlib.suppress(OSError):
            connection.request("POST", "/v1/execute", body, {"Content-Type": content_type})
        answer = Answer(connection.getresponse())
    assert answer.status == 400 and "metadata" in answer.json["detail"]


# ---------------------------------------------------------------------------------------
# Health: what the worker says of itself
# ---------------------------------------------------------------------------------------


def test_health_has_every_field_of_the_protocol(worker):
    health = worker.health()
    assert health["status"] == "healthy"
    assert health["capabilities"]["protocol_versions"] == ["v1"]
    assert health["capabilities"]["transform_refs"][0] == "notebook_cell@v1"
    features = health["capabilities"]["features"]
    assert features["notebook_protocol_version"] == "notebook-cell-v1"
    assert features["output_format"] == "notebook-output-bundle@v1"
    assert features["cancel"] is True
    assert features["languages"][0] == "python"
    assert health["version"] == strata_worker.__version__
    assert health["uptime_seconds"] > 0
    for absent in ("launch_id", "max_concurrent", "gpu_slots", "free_gpu_slots"):
        assert health[absent] is None
    assert health["active_executions"] == 0
    assert health["hardware"]["cpus"] >= 1 and health["hardware"]["memory_mb"] > 100


def test_health_counts_slots_and_names_its_launch():
    with WorkerProcess("--max-concurrent", "4", "--gpu-slots", "2", STRATA_WORKER_LAUNCH_ID="abc") as client:
        with in_background(lambda: client.execute("import time; time.sleep(60)", build_id="b")):
            eventually(lambda: client.health()["active_executions"], "the cell runs")
            health = client.health()
            assert health["launch_id"] == "abc"
            assert (health["max_concurrent"], health["gpu_slots"], health["free_gpu_slots"]) == (4, 2, 1)
            eventually(lambda: client.cancel("b")["cancelled"], "the run is known by its id")


NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *query-gpu*) echo 'NVIDIA A100-SXM4-80GB, 81920, 535.104.05' ;;
  *) echo '| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2     |' ;;
esac
"""


def test_health_reports_what_nvidia_smi_says(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    with WorkerProcess(PATH="%s:%s" % (tmp_path, os.environ["PATH"])) as client:
        hardware = eventually(
            lambda: "cuda" in client.health()["hardware"] and client.health()["hardware"], "the probe ends"
        )
    assert hardware["accelerators"] == [{"name": "NVIDIA A100-SXM4-80GB", "memory_mb": 81920, "driver": "535.104.05"}]
    assert hardware["cuda"] == "12.2"


def test_a_slow_probe_does_not_make_health_slow(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    with WorkerProcess(PATH="%s:%s" % (tmp_path, os.environ["PATH"])) as client:
        assert "accelerators" not in client.request("GET", "/health", timeout=5).json["hardware"]


# ---------------------------------------------------------------------------------------
# Secrets: the token, and what a cell can find
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded():
    worker = WorkerProcess(
        STRATA_WORKER_TOKEN="token-of-the-test",
        STRATA_WORKER_HOST="127.0.0.1",
        STRATA_WORKER_CONNECT_TOKEN="connect-of-the-test",
        STRATA_NOTEBOOK_CREDENTIALS='{"c": {"key": "storage-of-the-test"}}',
        STRATA_NOTEBOOK_MOUNT_CREDENTIALS='{"s3": "mounts-of-the-test"}',
        HARMLESS="yes",
    )
    with worker:
        yield Client(worker, "token-of-the-test")


@pytest.mark.parametrize(
    "header, detail",
    [
        (None, "Missing or malformed Authorization header (expected Bearer token)"),
        ("Basic dG9rZW4=", "Missing or malformed Authorization header (expected Bearer token)"),
        ("Bearer ", "Missing or malformed Authorization header (expected Bearer token)"),
        ("Bearer wrong", "Invalid worker token"),
        ("Bearer t\u00f6ken", "Invalid worker token"),
    ],
)
def test_a_request_without_the_token_is_401(guarded, header, detail):
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/execute", "/v1/execute-manifest", "/execute", "/v1/executions/x/cancel"):
        answer = Client(guarded.worker).request("POST", path, b"", headers)
        assert answer.status == 401 and answer.json == {"detail": detail}


def test_health_is_open_and_the_token_opens_the_rest(guarded):
    assert Client(guarded.worker).health()["status"] == "healthy"
    assert guarded.run("x = 1").json("x") == 1


SEARCH = """
import glob, os
found = []
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        content = open(path, "rb").read()
    except OSError:
        continue
    if os.getppid() == int(path.split("/")[2]) or b"strata_worker" in content or b"harness" in content:
        found += [path for secret in (b"%s") if secret in content]
own = [name for name, value in os.environ.items() if "of-the-test" in value]
"""


def test_a_cell_finds_no_secret_in_environments_or_command_lines(guarded):
    secrets = [b"token-of-the-test", b"connect-of-the-test", b"storage-of-the-test", b"mounts-of-the-test"]
    source = (
        SEARCH.replace('(b"%s")', repr(secrets))
        + "import os\nharmless = os.environ['HARMLESS']\nworker = %d\n" % guarded.worker.process.pid
    )
    source += (
        "environ = open('/proc/%d/environ', 'rb').read().replace(b'\\0', b'\\n').decode()\n"
        % guarded.worker.process.pid
        if os.getuid() == 0
        else ""
    )
    bundle = guarded.run(source)
    assert bundle.json("own") == [] and bundle.json("found") == []
    assert bundle.json("harmless") == "yes"
    if os.getuid() == 0:  # root reads the block itself: it is zeroed
        assert "of-the-test" not in bundle.json("environ") and "HARMLESS" in bundle.json("environ")


def test_the_worker_is_undumpable(guarded):
    """So that its /proc/<pid>/mem is closed to other processes of its user."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux")
    if os.getuid() != 0:
        with pytest.raises(PermissionError):
            open("/proc/%d/mem" % guarded.worker.process.pid, "rb")
        return
    # Root may look anyway; it shows by the owner, which is no longer the process's user.
    command = "import os, sys; os.setuid(65534); open('/proc/%d/environ', 'rb')" % guarded.worker.process.pid
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert "PermissionError" in done.stderr


def test_a_parent_that_holds_the_token_is_warned_of(tmp_path):
    log = tmp_path / "log"
    script = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, sys.executable, str(HERE / "strata_worker.py"), "--port", "0"],
        env={**os.environ, "STRATA_WORKER_TOKEN": "t", "STRATA_WORKER_HOST": "127.0.0.1"},
        stderr=open(log, "w"),
    )
    try:
        eventually(lambda: "listening" in log.read_text(), "the worker listens")
        assert (
            "STRATA_WORKER_TOKEN is also in the environment of the parent process (pid %d)" % parent.pid
            in log.read_text()
        )
    finally:
        for pid, command in processes_of(parent.pid):
            if "strata_worker.py" in " ".join(command):
                os.kill(pid, signal.SIGTERM)
        parent.wait(20)


def test_the_allowlist_narrows_what_a_cell_sees():
    with WorkerProcess(
        STRATA_NOTEBOOK_HARNESS_ENV_ALLOWLIST="MODEL_*,EXACT,STRATA_WORKER_LAUNCH_ID,STRATA_*,S*",
        MODEL_PATH="/m",
        EXACT="1",
        EXACTLY="2",
        SOME="3",
        STRATA_OTHER="4",
        STRATA_WORKER_LAUNCH_ID="5",
    ) as client:
        seen = client.run("import os\nseen = dict(os.environ)", env={"MINE": "6"}).json("seen")
    assert seen["MODEL_PATH"] == "/m" and seen["EXACT"] == "1" and seen["MINE"] == "6" and seen["SOME"] == "3"
    assert "EXACTLY" not in seen and "STRATA_OTHER" not in seen
    assert seen["STRATA_WORKER_LAUNCH_ID"] == "5"
    assert "PATH" in seen and "HOME" in seen


@pytest.mark.parametrize("text", ["A,B*", '["A", "B*"]', " A , B* ,"])
def test_an_allowlist_is_a_comma_list_or_json(text):
    assert strata_worker.name_list(text) == ("A", "B*")


# ---------------------------------------------------------------------------------------
# Execute: the push model
# ---------------------------------------------------------------------------------------


def test_a_cell_comes_back_as_a_bundle(worker):
    answer = worker.execute("x = 1\nprint('out')\n_written = __import__('os').write(2, b'err\\n')")
    assert answer.headers["Content-Type"] == "application/x-tar"
    assert answer.headers["X-Strata-Executor-Protocol"] == "v1"
    assert answer.headers["X-Strata-Notebook-Executor-Protocol"] == "notebook-cell-v1"
    bundle = answer.bundle
    assert sorted(bundle.names) == ["files/x.json", "manifest.json", "stderr.txt", "stdout.txt"]
    assert (bundle.stdout, bundle.stderr) == ("out\n", "err\n")
    manifest = bundle.manifest
    assert manifest["schema_version"] == "notebook-output-bundle@v1"
    assert manifest["success"] is True
    assert manifest["variables"]["x"]["file"] == "files/x.json"
    assert (manifest["stdout_file"], manifest["stderr_file"]) == ("stdout.txt", "stderr.txt")
    assert manifest["displays"] == [] and manifest["mutation_warnings"] == []
    assert manifest["error"] is None and manifest["traceback"] is None
    assert manifest["hardware"]["cpus"] >= 1
    assert re.match(r"cpython-3\.\d+-", manifest["build_env"])


def test_inputs_are_found_by_variable_name_and_by_recorded_file_name(worker):
    metadata = envelope("z = [x, y]")
    metadata["inputs"] = [
        {"name": "x", "format": "json/object", "file": "recorded.json"},
        {"name": "y", "format": "json/object"},
    ]
    for parts in ([("recorded.json", b"1"), ("y", b"2")], [("y.json", b"2"), ("x", b"1"), ("recorded.json", b"3")]):
        assert worker.form("/v1/execute", metadata, parts).bundle.json("z") == [1, 2]


def test_parts_come_in_any_order_and_the_last_of_a_name_counts(worker):
    body, content_type = form_of(
        [
            ("a", b"1"),
            ("a", b"2"),
            ("metadata", json.dumps(envelope("x = a", [("a", "json/object")])).encode()),
            ("unused", b""),
        ]
    )
    assert worker.request("POST", "/v1/execute", body, {"Content-Type": content_type}).bundle.json("x") == 2


def test_the_flatter_envelope_of_notebook_execute_runs_a_cell(worker):
    metadata = {
        "protocol_version": "notebook-cell-v1",
        "source": "y = x + 1",
        "timeout_seconds": 30,
        "inputs": {"x": {"content_type": "json/object", "file": "x.json"}},
        "mounts": [],
        "env": {},
    }
    assert worker.form("/v1/notebook-execute", metadata, [("x", b"41")]).bundle.json("y") == 42


def test_env_reaches_the_cell_and_unknown_fields_are_ignored(worker):
    metadata = envelope("import os\nx = os.environ['MODEL_PATH']", env={"MODEL_PATH": "/m/ü"}, unknown=[1])
    metadata.update(tenant=None, origin="run", provenance_hash="x")
    assert worker.form("/v1/execute", metadata).bundle.json("x") == "/m/ü"


def test_tables_are_bound_with_their_snapshot(worker):
    bundle = worker.run("pair = [t, t_snapshot]", tables={"t": {"uri": "cat://a.b", "snapshot_id": 7}})
    assert bundle.json("pair") == ["cat://a.b", 7]


def test_an_input_changed_in_place_comes_back_when_it_is_named(worker):
    inputs = [("a", "json/object", b"[1]")]
    assert worker.run("a.append(2)", inputs, mutation_defines=["a"]).json("a") == [1, 2]
    assert "a" not in worker.run("a.append(2)", inputs).manifest["variables"]


def test_a_fetched_file_is_a_path_with_its_name(worker):
    metadata = envelope("text = data.read_text(); name = data.name")
    metadata["inputs"] = [{"name": "data", "format": "file/path", "file": "table.csv"}]
    bundle = worker.form("/v1/execute", metadata, [("table.csv", b"a,b\n")]).bundle
    assert bundle.json("text") == "a,b\n" and bundle.json("name") == "table.csv"


def test_only_the_last_component_of_a_file_name_is_used(worker):
    metadata = envelope("name = data.name; inside = 'inputs' in data.parts")
    metadata["inputs"] = [{"name": "data", "format": "file/path", "file": "../../../etc/evil.csv"}]
    bundle = worker.form("/v1/execute", metadata, [("data", b"1")]).bundle
    assert bundle.json("name") == "evil.csv" and bundle.json("inside") is True


def test_a_cell_that_raises_answers_200_with_its_error(worker):
    bundle = worker.execute("x = 1\nprint('before')\nraise ValueError('bad value')").bundle
    assert bundle.manifest["success"] is False
    assert bundle.manifest["error"] == "ValueError: bad value"
    assert "raise ValueError('bad value')" in bundle.manifest["traceback"]
    assert "harness" not in bundle.manifest["traceback"]
    assert bundle.stdout == "before\n"


def test_the_cell_runs_in_an_empty_folder_of_its_own(worker):
    assert worker.run("import os\nfiles = os.listdir(); open('left', 'w').close()").json("files") == []
    assert worker.run("import os\nfiles = os.listdir()").json("files") == []


CONSOLE = """
import ctypes, os, subprocess, sys
print("python")
os.write(1, b"descriptor\\n")
subprocess.run(["echo", "child"])
libc = ctypes.CDLL(None)
libc.puts(b"c library")
libc.fflush(None)
os.write(1, b"invalid \\xff\\n")
sys.stdout.buffer.write(b"buffer\\n")
print("end")
"""


def test_the_console_holds_all_that_was_written_in_order(worker):
    assert worker.run(CONSOLE).stdout == "python\ndescriptor\nchild\nc library\ninvalid \ufffd\nbuffer\nend\n"


def test_a_background_child_that_keeps_the_console_open_does_not_hang_the_run(worker):
    source = "import subprocess\nchild = subprocess.Popen(['sleep', '60']).pid"
    began = time.monotonic()
    child = worker.run(source).json("child")
    assert time.monotonic() - began < 20
    eventually(lambda: not running(child), "the child is gone", 2)


def running(pid):
    try:
        return Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "change, detail",
    [
        ({"protocol_version": "v2"}, "protocol_version"),
        ({"protocol_version": None}, "protocol_version"),
        ({"transform": {"ref": "scan@v1", "params": {"source": ""}}}, "scan@v1"),
        ({"transform": "x"}, "transform"),
        ({"inputs": {"a": 1}}, "inputs"),
        ({"inputs": [1]}, "inputs"),
        ({"inputs": [{"format": "json/object"}]}, "name"),
        ({"inputs": [{"name": "a"}]}, "'a'"),
        ({"inputs": [{"name": "a", "format": "json/object", "file": ".."}]}, "'a'"),
        ({"inputs": [{"name": "a", "format": "json/object"}] * 2}, "'a'"),
        ({"inputs": [{"name": "missing", "format": "json/object"}]}, "'missing'"),
        ({"build_id": 7}, "build_id"),
    ],
)
def test_a_bad_envelope_is_400_by_name(worker, change, detail):
    answer = worker.form("/v1/execute", {**envelope("x = 1"), **change}, [("a", b"1")])
    assert answer.status == 400 and detail in answer.json["detail"]


@pytest.mark.parametrize(
    "params",
    [
        {"timeout_seconds": 0},
        {"timeout_seconds": -1},
        {"timeout_seconds": "5"},
        {"timeout_seconds": True},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": float("inf")},
        {"source": None},
        {"env": {"A": 1}},
        {"env": {"A=B": "1"}},
        {"env": {"A": "x\0"}},
        {"env": []},
        {"mutation_defines": "a"},
        {"tables": []},
        {"mounts": {}},
        {"mounts": [{"name": "m", "uri": "file:///etc"}]},
        {"environment": "x"},
    ],
)
def test_a_bad_parameter_is_400_by_name(worker, params):
    answer = worker.form("/v1/execute", envelope(**{"source": "x = 1", **params}))
    assert answer.status == 400 and next(iter(params)).rstrip("s")[:5] in answer.json["detail"].lower()


def test_an_unknown_language_is_400_in_the_failure_shape(worker):
    answer = worker.execute("x", language="julia")
    assert answer.status == 400
    assert answer.json["success"] is False and "julia" in answer.json["error"]


def test_r_without_rscript_is_500_by_name(tmp_path):
    for program in ("python3", "env", "sh"):
        os.symlink(shutil.which(program), tmp_path / program)
    with WorkerProcess(PATH=str(tmp_path)) as client:
        assert client.health()["capabilities"]["features"]["languages"] == ["python"]
        answer = client.execute("x <- 1", language="r")
    assert answer.status == 500 and answer.json == {
        "success": False,
        "error": "Rscript is not installed on this worker",
    }


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_metadata_that_is_no_object_is_400(worker, body):
    form, content_type = form_of([("metadata", body)])
    assert worker.request("POST", "/v1/execute", form, {"Content-Type": content_type}).status == 400


def test_a_form_without_metadata_and_no_form_at_all_are_400(worker):
    form, content_type = form_of([("a", b"1")])
    assert "metadata" in worker.request("POST", "/v1/execute", form, {"Content-Type": content_type}).json["detail"]
    assert (
        "multipart" in worker.request("POST", "/v1/execute", b"{}", {"Content-Type": "application/json"}).json["detail"]
    )


def test_a_protocol_header_of_another_version_is_400(worker):
    body, content_type = form_of([("metadata", json.dumps(envelope("x = 1")).encode())])
    answer = worker.request(
        "POST", "/v1/execute", body, {"Content-Type": content_type, "X-Strata-Executor-Protocol": "v2"}
    )
    assert answer.status == 400 and "v2" in answer.json["detail"]


def test_a_gpu_slot_sets_cuda_visible_devices_over_the_callers(tmp_path):
    source = "import os\ngpu = os.environ['CUDA_VISIBLE_DEVICES']"
    with WorkerProcess("--gpu-slots", "1") as client:
        assert client.run(source, env={"CUDA_VISIBLE_DEVICES": "0,1,2,3"}).json("gpu") == "0"
    with WorkerProcess("--gpu-slots", "1", CUDA_VISIBLE_DEVICES="3,5") as client:
        with in_background(lambda: client.execute("import time; time.sleep(60)", build_id="b")):
            eventually(lambda: client.health()["free_gpu_slots"] == 0, "the GPU is taken")
            refused = client.execute("x = 1")
            assert refused.status == 503 and "GPU" in refused.json["detail"] and refused.headers["Retry-After"]
            eventually(lambda: client.cancel("b")["cancelled"], "the run is known by its id")
        eventually(lambda: client.health()["free_gpu_slots"] == 1, "the GPU is free")
        assert client.run(source).json("gpu") == "3"


def test_whoever_has_read_an_answer_may_ask_again_at_once():
    with WorkerProcess("--max-concurrent", "1") as client:
        for number in range(30):
            assert client.run("x = %d" % number).json("x") == number


def test_a_large_input_and_output_pass_in_flat_memory(worker):
    size = 256 * 2**20
    before = resident(worker.worker.process.pid)
    bundle = worker.execute(
        "size = data.stat().st_size\nwith open(data, 'rb') as f: first = list(f.read(3))\nblob = bytes(%d)"
        % (size // 2),
        [("data", "file/path", b"abc" + bytes(size))],
        timeout=120,
    ).bundle
    assert bundle.json("size") == size + 3 and bundle.json("first") == [97, 98, 99]
    assert bundle.manifest["variables"]["blob"]["bytes"] >= size // 2
    assert peak(worker.worker.process.pid) - before < 32 * 2**20


def status_field(pid, name):
    path = Path("/proc/%d/status" % pid)
    if not path.exists():
        pytest.skip("needs /proc")
    return int(re.search(name + r":\s*(\d+) kB", path.read_text()).group(1)) * 1024


def resident(pid):
    """What a process holds now; its peak starts over from there."""
    size = status_field(pid, "VmRSS")
    Path("/proc/%d/clear_refs" % pid).write_text("5")
    return size


def peak(pid):
    return status_field(pid, "VmHWM")


# ---------------------------------------------------------------------------------------
# Stopping: timeouts, cancels, crashes
# ---------------------------------------------------------------------------------------


def test_a_timeout_is_408_with_the_end_of_the_console_and_leaves_no_process(worker):
    source = "import os, subprocess, sys, time\nprint('started', os.getpid(), subprocess.Popen(['sleep', '60']).pid)\ntime.sleep(60)"
    answer = worker.execute(source, timeout_seconds=1)
    assert answer.status == 408 and answer.json["success"] is False
    assert "timeout of 1 second" in answer.json["error"]
    cell, child = map(int, re.search(r"started (\d+) (\d+)", answer.json["error"]).groups())
    assert not running(cell) and not running(child)


@pytest.mark.parametrize(
    "source, ending",
    [
        ("import os; os.abort()", "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import os; os._exit(3)", "code 3"),
        ("import os; os._exit(0)", "code 0"),
    ],
)
def test_a_crash_is_500_that_says_how_with_the_end_of_stderr(worker, source, ending):
    answer = worker.execute("import sys\nprint('last words', file=sys.stderr)\n" + source)
    assert answer.status == 500 and answer.json["success"] is False
    assert ending in answer.json["error"] and "last words" in answer.json["error"]
    assert worker.run("x = 1").json("x") == 1


def test_sys_exit_ends_the_cell_as_an_error_that_says_so(worker):
    bundle = worker.execute("import sys\nprint('kept')\nsys.exit(3)").bundle
    assert bundle.manifest["success"] is False and "SystemExit" in bundle.manifest["error"]
    assert bundle.stdout == "kept\n"


def test_a_cancelled_running_cell_is_500_that_says_so(worker):
    with in_background(
        lambda: worker.execute("import time\nprint('on', flush=True)\ntime.sleep(60)", build_id="to/cancel")
    ) as answer:
        eventually(lambda: worker.cancel("to/cancel")["cancelled"], "the cell runs")
        refused = answer(10)
    assert refused.status in (409, 500) and "cancelled" in refused.json["error"]
    assert worker.cancel("to/cancel") == {"build_id": "to/cancel", "cancelled": False}


def test_a_cancel_while_inputs_come_in_is_409(worker):
    body, content_type = form_of(
        [("metadata", json.dumps(envelope("x = 1", build_id="staging")).encode()), ("a", b"x" * 100)]
    )
    # The id is known once metadata is read, and that comes with the rest: cancel by hanging the last bytes back.
    head = b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    with worker.send(head % (content_type.encode(), len(body)) + body[:-40]) as sock:
        eventually(lambda: worker.cancel("staging")["cancelled"], "the id is known")
        sock.sendall(body[-40:])
        assert statuses(sock.recv(65536)) == [409]


def test_a_result_full_of_garbage_is_500(worker):
    source = "import os\nopen('../result.json', 'w').write('{garbage'); os._exit(0)"
    answer = worker.execute(source)
    assert answer.status == 500 and "result" in answer.json["error"]


def test_a_link_under_a_variables_file_name_is_not_followed(worker):
    source = (
        "import json, os\nos.symlink('/etc/passwd', '../outputs/x.json')\n"
        "entry = {'content_type': 'json/object', 'file': 'x.json'}\n"
        "json.dump({'success': True, 'variables': {'x': entry, 'y': dict(entry, file='../manifest.json')},"
        " 'displays': [], 'mutation_warnings': []}, open('../result.json', 'w'))\nos._exit(0)"
    )
    bundle = worker.execute(source).bundle
    assert bundle.names == ["manifest.json", "stdout.txt", "stderr.txt"]
    assert all("error" in entry for entry in bundle.manifest["variables"].values())


def test_folders_without_permissions_are_deleted(worker, tmp_path):
    with WorkerProcess(STRATA_WORKER_RUN_ROOT=str(tmp_path)) as client:
        client.run("import os\nos.makedirs('a/b/c'); open('a/b/f', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)")
        eventually(lambda: not list(tmp_path.glob("*/run-*")), "the folder is gone")


def test_a_cell_that_deletes_its_folder_keeps_its_console(worker):
    answer = worker.execute(
        "import os, shutil\nprint('before the end', flush=True)\nshutil.rmtree(os.path.dirname(os.getcwd()))"
    )
    if answer.status == 200:
        assert answer.bundle.stdout == "before the end\n"
    else:
        assert answer.status == 500 and "before the end" in answer.json["error"]


# ---------------------------------------------------------------------------------------
# Pull: signed URLs, retries, the live console
# ---------------------------------------------------------------------------------------


class Peer:
    """A server of signed URLs on a real port. ``faults`` are played before each honest answer.

    A fault is ``{"status", "headers", "body", "cut", "stall", "reset"}`` for one request to a
    path; everything received is kept in ``requests`` as (method, path, headers, body).
    """

    def __init__(self):
        peer = self
        self.blobs, self.faults, self.requests = {}, {}, []
        self.ranges = False
        self.gate = threading.Event()  # set to let stalled answers go
        self.lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                peer.handle(self)

            do_POST = do_PUT = do_GET

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = "http://127.0.0.1:%d" % self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()

    def handle(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path = handler.path.partition("?")[0]
        with self.lock:
            self.requests.append((handler.command, handler.path, handler.headers, body))
            faults = self.faults.get(path)
            fault = faults.pop(0) if faults else {}
        handler.close_connection = True
        if fault.get("reset"):
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            handler.connection.close()
            return
        if fault.get("stall"):
            self.gate.wait(60)
        with contextlib.suppress(OSError):
            self.respond(handler, path, fault)

    def respond(self, handler, path, fault):
        status, body = (200, self.blobs[path]) if handler.command == "GET" else (200, b'{"done": true}')
        headers = {}
        if self.ranges and handler.command == "GET":
            headers = {"Accept-Ranges": "bytes", "ETag": '"v1"'}
            start = re.match(r"bytes=(\d+)-", handler.headers.get("Range", ""))
            if start:
                status, body = 206, body[int(start.group(1)) :]
                headers["Content-Range"] = "bytes %s-%d/*" % (start.group(1), len(self.blobs[path]) - 1)
        status, body = fault.get("status", status), fault.get("body", body)
        handler.send_response(status)
        for name, value in {**headers, **fault.get("headers", {})}.items():
            handler.send_header(name, value)
        if not fault.get("undeclared"):
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: fault.get("cut", len(body))])

    def paths(self, prefix=""):
        return [path for _, path, _, _ in self.requests if path.startswith(prefix)]

    def bundle(self):
        return Bundle(next(body for _, path, _, body in self.requests if path.startswith("/upload")))

    def manifest(self, source, inputs=(), build_id="pulled", **changes):
        """A pull manifest whose inputs, (name, content type, bytes), are served here."""
        specs, urls = {}, []
        for number, (name, content_type, data) in enumerate(inputs):
            self.blobs["/in/%d" % number] = data
            specs[name] = {"uri": "strata://artifact/a/%d@v=3" % number, "content_type": content_type}
            urls.append(
                {"artifact_id": "a/%d" % number, "version": 3, "url": "%s/in/%d?signature=s3cret" % (self.url, number)}
            )
        params = {
            "source": source,
            "timeout_seconds": 30,
            "input_specs": specs,
            "mounts": [],
            "env": {},
            "_dispatch_mode": "signed",
        }
        return {
            "build_id": build_id,
            "metadata": {
                "build_id": build_id,
                "executor_ref": "notebook_cell@v1",
                "params": {**params, **changes.pop("params", {})},
                **changes.pop("metadata", {}),
            },
            "inputs": urls,
            "output": {
                "url": self.url + "/upload?signature=s3cret",
                "max_bytes": 2**30,
                "method": "POST",
                **changes.pop("output", {}),
            },
            "finalize_url": self.url + "/finalize?signature=s3cret",
            "log_url": "",
            **changes,
        }


@pytest.fixture
def peer():
    with contextlib.closing(Peer()) as peer:
        yield peer


def test_a_manifest_runs_a_cell_from_its_urls_to_its_urls(pull_worker, peer):
    manifest = peer.manifest("y = x + z", [("x", "json/object", b"40"), ("z", "json/object", b"2")])
    answer = pull_worker.manifest(manifest)
    bundle = peer.bundle()
    assert answer.status == 200
    assert answer.json == {
        "success": True,
        "build_id": "pulled",
        "protocol_version": "notebook-build-manifest@v1",
        "byte_size": len(peer.requests[-2][3]),
        "finalize": {"done": True},
    }
    assert bundle.json("y") == 42
    method, path, headers, body = peer.requests[-1]
    assert (method, path) == ("POST", "/finalize?signature=s3cret")
    assert json.loads(body) == {"output_format": "notebook-output-bundle@v1"}
    assert peer.requests[-2][2]["Content-Type"] == "application/x-tar"


def test_execute_is_the_same_without_a_content_type(pull_worker, peer):
    answer = pull_worker.request("POST", "/execute", json.dumps(peer.manifest("x = 1")).encode(), {"Content-Type": ""})
    assert answer.status == 200 and peer.bundle().json("x") == 1


def test_a_cell_that_raises_is_delivered_like_any_other(pull_worker, peer):
    assert pull_worker.manifest(peer.manifest("1 / 0")).status == 200
    assert peer.bundle().manifest["error"].startswith("ZeroDivisionError")


def test_injected_values_of_an_input_are_fetched_too(pull_worker, peer):
    module = {"module_name": "cell-a", "symbol_name": "scale", "source": "def scale(x):\n    return x * rate\n"}
    manifest = peer.manifest(
        "y = scale(4)", [("scale", "module/cell", json.dumps(module).encode()), ("rate", "json/object", b"3")]
    )
    specs = manifest["metadata"]["params"]["input_specs"]
    specs["scale"]["injected"] = {"rate": specs.pop("rate")}
    assert pull_worker.manifest(manifest).status == 200
    assert peer.bundle().json("y") == 12


def test_a_presigned_form_has_its_fields_in_order_and_the_file_last(pull_worker, peer):
    fields = {"key": "builds/ü/bundle", "policy": "cG9saWN5", "x-amz-signature": "s", 'odd"name': "v"}
    assert pull_worker.manifest(peer.manifest("x = 1", output={"fields": fields})).status == 200
    headers, body = next((h, b) for _, path, h, b in peer.requests if path.startswith("/upload"))
    boundary = strata_worker.form_boundary(headers["Content-Type"])
    parts = parse_form(body, boundary)
    assert [name for name, _, _ in parts] == ["key", "policy", "x-amz-signature", "odd%22name", "file"]
    assert parts[0][2].decode() == "builds/ü/bundle"
    assert Bundle(parts[-1][2]).json("x") == 1


def test_a_put_carries_the_manifests_headers(pull_worker, peer):
    output = {"method": "PUT", "headers": {"x-ms-blob-type": "BlockBlob", "Content-Type": "application/octet-stream"}}
    assert pull_worker.manifest(peer.manifest("x = 1", output=output)).status == 200
    method, _, headers, body = peer.requests[0]
    assert (
        method == "PUT"
        and headers["x-ms-blob-type"] == "BlockBlob"
        and headers["Content-Type"] == "application/octet-stream"
    )
    assert int(headers["Content-Length"]) == len(body) and Bundle(body).json("x") == 1


def test_a_bundle_over_max_bytes_is_refused_before_a_byte_is_sent(pull_worker, peer):
    answer = pull_worker.manifest(peer.manifest("x = 'y' * 5000", output={"max_bytes": 4000}))
    assert answer.status == 502 and "max_bytes" in answer.json["detail"]
    assert not peer.requests


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda m: m["metadata"].update(executor_ref="scan@v1"), "executor_ref"),
        (lambda m: m["metadata"]["params"]["input_specs"].update(q={"uri": "strata://artifact/q@v=1"}), "'q'"),
        (lambda m: m["inputs"].append({"artifact_id": "b", "version": "1", "url": "http://x"}), "'b'"),
        (lambda m: m["inputs"].append({"artifact_id": "b", "version": 1}), "'b'"),
        (lambda m: m["output"].pop("url"), "output.url"),
        (lambda m: m.pop("finalize_url"), "finalize_url"),
        (lambda m: m["output"].update(fields=[]), "output.fields"),
        (lambda m: m["output"].update(headers={"A\r\nB": "c"}), "output.headers"),
        (lambda m: m["output"].update(max_bytes="1"), "max_bytes"),
        (lambda m: m.update(metadata=1), "metadata"),
        (lambda m: m["metadata"]["params"].update(timeout_seconds=-1), "timeout_seconds"),
    ],
)
def test_a_bad_manifest_is_400_by_name(pull_worker, peer, change, named):
    manifest = peer.manifest("y = x", [("x", "json/object", b"1")])
    change(manifest)
    answer = pull_worker.manifest(manifest)
    assert answer.status == 400 and named in answer.json["detail"]
    assert not peer.requests


def test_a_manifest_that_is_no_json_is_400(pull_worker):
    assert pull_worker.request("POST", "/v1/execute-manifest", b"{").status == 400


@pytest.mark.parametrize(
    "fault, said",
    [
        ({"status": 403, "body": b"<Signature>s3cret</Signature>"}, "403"),
        ({"status": 404}, "404"),
        ({"cut": 3}, "broke off"),
        ({"status": 302, "headers": {"Location": "/in/1"}}, "302"),
    ],
)
def test_an_input_that_cannot_be_had_is_502_by_name_and_status_without_its_signature(pull_worker, peer, fault, said):
    peer.faults["/in/0"] = [fault]
    answer = pull_worker.manifest(peer.manifest("y = x", [("x", "json/object", b"12345")]))
    assert answer.status == 502
    assert "'x'" in answer.json["detail"] and said in answer.json["detail"] and "s3cret" not in answer.json["detail"]


@pytest.mark.parametrize(
    "path, fault",
    [
        (path, fault)
        for path in ("/in/0", "/upload", "/finalize")
        for fault in ({"status": 429, "headers": {"Retry-After": "1"}}, {"status": 503}, {"reset": True})
    ],
)
def test_a_passing_fault_is_tried_again(pull_worker, peer, path, fault):
    peer.faults[path] = [fault, {"status": 502}]
    assert pull_worker.manifest(peer.manifest("y = x", [("x", "json/object", b"1")])).status == 200
    assert len(peer.paths(path)) == 3
    assert peer.bundle().json("y") == 1


def test_a_fault_that_stays_is_502_after_a_bounded_number_of_tries(pull_worker, peer):
    peer.faults["/upload"] = [{"status": 503}] * 50
    answer = pull_worker.manifest(peer.manifest("x = 1"))
    assert answer.status == 502 and "503" in answer.json["detail"]
    assert len(peer.paths("/upload")) == 5


@pytest.mark.parametrize("path, status", [("/upload", 413), ("/finalize", 409)])
def test_an_answer_that_says_no_is_final(pull_worker, peer, path, status):
    peer.faults[path] = [{"status": status, "body": b'{"detail": "the lease lapsed"}'}]
    answer = pull_worker.manifest(peer.manifest("x = 1"))
    assert answer.status == 502 and str(status) in answer.json["detail"] and "the lease lapsed" in answer.json["detail"]
    assert len(peer.paths(path)) == 1


def test_a_download_that_breaks_off_is_resumed_where_it_broke(pull_worker, peer):
    peer.ranges = True
    data = json.dumps("x" * 100_000).encode()
    peer.faults["/in/0"] = [{"cut": 50_000}, {"cut": 20_000}]
    assert pull_worker.manifest(peer.manifest("y = len(x)", [("x", "json/object", data)])).status == 200
    assert peer.bundle().json("y") == 100_000
    asked = [headers.get("Range") for _, path, headers, _ in peer.requests if path.startswith("/in/0")]
    assert asked == [None, "bytes=50000-", "bytes=70000-"]


@pytest.mark.parametrize("undeclared", [False, True])
def test_an_input_over_the_limit_is_413(peer, undeclared):
    peer.faults["/in/0"] = [{"undeclared": undeclared}]
    with WorkerProcess(STRATA_WORKER_ALLOW_LOCAL_HOSTS="1", STRATA_WORKER_MAX_INPUT_BYTES="1000") as client:
        answer = client.manifest(peer.manifest("y = 1", [("x", "json/object", b" " * 1001)]))
    assert answer.status == 413 and "'x'" in answer.json["detail"] and "1000" in answer.json["detail"]


@pytest.mark.parametrize("path", ["/in/0", "/upload", "/finalize"])
def test_a_stalled_peer_ends_the_run_with_502(pull_worker, peer, path):
    peer.faults[path] = [{"stall": True}]
    answer = pull_worker.manifest(peer.manifest("y = x", [("x", "json/object", b"1")]))
    assert answer.status == 502 and "stopped moving" in answer.json["detail"]


@pytest.mark.parametrize("path", ["/in/0", "/upload"])
def test_a_cancel_stops_a_transfer_within_a_second(pull_worker, peer, path):
    peer.faults[path] = [{"stall": True}]
    manifest = peer.manifest("y = x", [("x", "json/object", b"1")], build_id="stuck" + path)
    with in_background(lambda: pull_worker.manifest(manifest)) as answer:
        eventually(lambda: peer.paths(path), "the transfer begins")
        began = time.monotonic()
        assert pull_worker.cancel("stuck" + path)["cancelled"]
        refused = answer(5)
    assert time.monotonic() - began < 1
    assert refused.status == (409 if path == "/in/0" else 500) and "cancelled" in refused.json["error"]


def test_a_gigabyte_passes_through_the_pull_model_in_flat_memory(pull_worker):
    size = 2**30
    before = resident(pull_worker.worker.process.pid)
    with contextlib.closing(BigPeer(size)) as peer:
        answer = pull_worker.manifest(
            peer.manifest("blob = bytes(%d)" % size, [("data", "file/path", b"")], output={"max_bytes": 2 * size}),
            timeout=120,
        )
    assert answer.status == 200 and peer.received > size
    assert peak(pull_worker.worker.process.pid) - before < 32 * 2**20


class BigPeer(Peer):
    """Serves one input of so many bytes and counts what is uploaded, holding neither."""

    def __init__(self, size):
        super().__init__()
        self.size, self.received = size, 0

    def handle(self, handler):
        handler.close_connection = True
        left = int(handler.headers.get("Content-Length") or 0)
        while left:
            left -= len(handler.rfile.read(min(left, 2**20)))
        self.received += int(handler.headers.get("Content-Length") or 0)
        handler.send_response(200)
        length = self.size if handler.command == "GET" else 2
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        for _ in range(length // 2**20):
            handler.wfile.write(bytes(2**20))
        handler.wfile.write(b"{}"[: length % 2**20])


def posted(peer, stream):
    """The chunks of one stream as (seq, text), as they were posted."""
    found = []
    for _, path, _, body in peer.requests:
        query = urllib.parse.parse_qs(path.partition("?")[2])
        if path.startswith("/log") and query["stream"] == [stream]:
            found.append((int(query["seq"][0]), body.decode()))
    return found


def test_the_console_is_posted_while_the_cell_runs(pull_worker, peer):
    source = (
        "import sys, time\nprint('one')\nprint('oops', file=sys.stderr)\ntime.sleep(1)\nprint('two')\ntime.sleep(1)"
    )
    manifest = peer.manifest(source, log_url=peer.url + "/log?signature=s3cret")
    with in_background(lambda: pull_worker.manifest(manifest)) as answer:
        eventually(lambda: posted(peer, "stdout"), "the first chunk")
        assert posted(peer, "stdout") == [(0, "one\n")]
        eventually(lambda: len(posted(peer, "stdout")) == 2, "the second chunk")
        assert not peer.paths("/upload")
        assert answer().status == 200
    assert posted(peer, "stdout") == [(0, "one\n"), (1, "two\n")]
    assert posted(peer, "stderr") == [(0, "oops\n")]
    assert all(path.startswith("/log?signature=s3cret&stream=") for path in peer.paths("/log"))


def test_no_chunk_ends_inside_a_character(pull_worker, peer):
    source = "import os, time\nfor byte in 'ž€𝄞\\n'.encode():\n    os.write(1, bytes([byte])); time.sleep(0.12)\nos.write(1, b'\\xff!')\ntime.sleep(.3)"
    assert pull_worker.manifest(peer.manifest(source, log_url=peer.url + "/log")).status == 200
    chunks = posted(peer, "stdout")
    assert [seq for seq, _ in chunks] == list(range(len(chunks)))
    assert peer.bundle().stdout == "ž€𝄞\n\ufffd!"
    assert peer.bundle().stdout.startswith("".join(text for _, text in chunks))


@pytest.mark.parametrize("fault", [{"status": 500}, {"reset": True}, {"status": 429, "headers": {"Retry-After": "1"}}])
def test_a_chunk_that_was_not_taken_is_posted_again_and_leaves_no_gap(pull_worker, peer, fault):
    peer.faults["/log"] = [fault, fault]
    source = "import time\nfor n in range(40):\n    print(n); time.sleep(0.1)"
    assert pull_worker.manifest(peer.manifest(source, log_url=peer.url + "/log")).status == 200
    accepted = dict(posted(peer, "stdout"))  # a repeated seq counts once
    assert sorted(accepted) == list(range(len(accepted))) and len(accepted) > 1
    assert peer.bundle().stdout.startswith("".join(accepted[seq] for seq in sorted(accepted)))


@pytest.mark.parametrize("fault", [{"stall": True}, {"status": 404}, {"status": 500}])
def test_a_log_server_that_hangs_or_fails_never_slows_the_cell(pull_worker, peer, fault):
    peer.faults["/log"] = [fault] * 1000
    began = time.monotonic()
    assert (
        pull_worker.manifest(peer.manifest("for n in range(1000): print(n)", log_url=peer.url + "/log")).status == 200
    )
    assert time.monotonic() - began < 3
    assert peer.bundle().stdout.count("\n") == 1000


def test_the_trace_context_reaches_the_cell_from_the_headers_else_the_manifest(pull_worker, peer):
    source = "import os\ntrace = [os.environ.get('TRACEPARENT'), os.environ.get('TRACESTATE')]"
    of_manifest, of_header = "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-" + "c" * 32 + "-" + "d" * 16 + "-01"
    manifest = peer.manifest(source, metadata={"traceparent": of_manifest, "tracestate": "k=v"})
    assert pull_worker.manifest(manifest).status == 200
    assert peer.bundle().json("trace") == [of_manifest, "k=v"]
    body = json.dumps(manifest).encode()
    peer.requests.clear()
    assert pull_worker.request("POST", "/execute", body, {"traceparent": of_header}).status == 200
    assert peer.bundle().json("trace") == [of_header, None]


def test_a_span_is_opened_under_the_callers_trace_when_opentelemetry_is_there(peer):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    from opentelemetry import trace

    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    parent = "00-" + "e" * 32 + "-" + "f" * 16 + "-01"
    with strata_worker.Worker(port=0, preload="off", allow_local_hosts=True) as worker:
        assert Client(worker).manifest(peer.manifest("x = 1", metadata={"traceparent": parent})).status == 200
    (span,) = memory.get_finished_spans()
    assert (
        span.name == "worker.execute"
        and "%032x" % span.context.trace_id == "e" * 32
        and "%016x" % span.parent.span_id == "f" * 16
    )


# ---------------------------------------------------------------------------------------
# URLs: fetches that cannot be turned inward
# ---------------------------------------------------------------------------------------

INWARD = [
    "http://127.0.0.1/",
    "http://127.8.9.10/",
    "http://localhost/",
    "http://localhost./",
    "http://LOCALHOST/",
    "http://0.0.0.0/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://169.254.169.254/latest/",
    "http://100.64.0.1/",
    "http://198.18.0.1/",
    "http://192.0.0.8/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://[::1]/",
    "http://[::]/",
    "http://[fe80::1]/",
    "http://[fd00:ec2::254]/",
    "http://[fc00::1]/",
    "http://[ff02::1]/",
    "http://[fec0::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:a00:1]/",
    "http://[::127.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::a9fe:a9fe]/",
    "http://[64:ff9b:1::1]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:7f00:1::]/",
    "http://[2001:db8::1]/",
]
MALFORMED = [
    "file:///etc/passwd",
    "ftp://example.com/",
    "data:text/plain,x",
    "javascript:alert(1)",
    "gopher://x/",
    "//example.com/",
    "example.com",
    "",
    "http://",
    "http:///path",
    "http://:80/",
    "http://user@example.com/",
    "http://user:pass@example.com/",
    "http://a@127.0.0.1@example.com/",
    "http://example.com:port/",
    "http://example.com:99999/",
    "http://example.com:0/",
    "http://example.com:/",
    "http://example.com:-1/",
    "http://example.com:8 0/",
    "http://exa mple.com/",
    "http://example.com\\@127.0.0.1/",
    "http:\\\\127.0.0.1\\",
    "http://example.com/\r\nX: y",
    "http://example.com/\t",
    "http://example.com/\0",
    "http://exämple.com/",
    "http://0177.0.0.1/",
    "http://0x7f.0.0.1/",
    "http://0x7f000001/",
    "http://2130706433/",
    "http://017700000001/",
    "http://127.1/",
    "http://127.0.1/",
    "http://1.2.3.4.5/",
    "http://[fe80::1%25eth0]/",
    "http://[::1%lo]/",
    "http://[::1",
    "http://[not-an-address]/",
    "http://[127.0.0.1]/",
    "http://a..b/",
    "http://.example.com/",
    "http://-a.example/",
    "http://a%2eb/",
]


def test_no_url_leads_inward():
    fetcher = strata_worker.Fetcher(strata_worker.Settings())
    for url in INWARD + MALFORMED:
        with pytest.raises(strata_worker.WorkerError) as caught:
            fetcher.judge(url, "output.url")
            pytest.fail("%r was let through" % url)
        assert caught.value.status == 400 and caught.value.message.startswith("output.url is refused"), url


def test_a_name_that_resolves_to_nothing_is_400():
    with pytest.raises(strata_worker.WorkerError) as caught:
        strata_worker.Fetcher(strata_worker.Settings()).judge("http://no-such-host.invalid/", "log_url")
    assert "does not resolve" in caught.value.message


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "223.255.255.254"]
)
def test_public_addresses_are_public(address):
    assert strata_worker.is_public(ipaddress.ip_address(address))


@given(st.integers(0, 2**32 - 1))
def test_an_ipv4_address_inside_an_ipv6_one_is_never_more_public_than_alone(number):
    inner = ipaddress.IPv4Address(number)
    if strata_worker.is_public(inner):
        return
    for prefix, shift in ((0xFFFF << 32, 0), (0, 0), (0x64FF9B << 96, 0), (0x2002 << 112, 80)):
        assert not strata_worker.is_public(ipaddress.IPv6Address(prefix | number << shift)), inner


@given(st.text(max_size=60))
def test_any_text_is_a_url_that_is_judged_or_a_400(text):
    try:
        target = strata_worker.parse_url("http://" + text, "u")
        assert target.host and 0 < target.port < 65536
    except strata_worker.WorkerError as error:
        assert error.status == 400


@pytest.mark.parametrize("field", ["input", "output", "finalize", "log"])
def test_every_url_of_a_manifest_is_judged_when_it_arrives(worker, peer, field):
    manifest = peer.manifest("y = 1", [("x", "json/object", b"1")])
    for url_field in ("input", "output", "finalize", "log"):
        url = peer.url + "/" if url_field == field else "http://8.8.8.8/"
        {
            "input": lambda u: manifest["inputs"][0].update(url=u),
            "output": lambda u: manifest["output"].update(url=u),
            "finalize": lambda u: manifest.update(finalize_url=u),
            "log": lambda u: manifest.update(log_url=u),
        }[url_field](url)
    answer = worker.manifest(manifest)
    assert answer.status == 400 and field in answer.json["detail"] and "127.0.0.1" in answer.json["detail"]
    assert not peer.requests


@pytest.mark.parametrize("allowed", ["localhost", ".localhost", "LOCALHOST."])
def test_allowed_hosts_may_be_private_and_no_others(peer, allowed):
    fetcher = strata_worker.Fetcher(
        strata_worker.Settings.load({"STRATA_WORKER_ALLOWED_HOSTS": "store.example, " + allowed})
    )
    if not allowed.startswith("."):
        fetcher.judge("http://localhost:1/", "u")
    for other in ("http://127.0.0.1/", "http://notlocalhost.localhost.invalid/", "http://10.0.0.1/"):
        with pytest.raises(strata_worker.WorkerError):
            fetcher.judge(other, "u")


class Rebinding(strata_worker.Fetcher):
    """A name server that answers with a public address first and a loopback one from then on."""

    def __init__(self, settings):
        super().__init__(settings)
        self.lookups = 0

    def addresses(self, host, port):
        self.lookups += 1
        return super().addresses("8.8.8.8" if self.lookups == 1 else "127.0.0.1", port)


def test_a_name_that_changes_its_answer_is_not_followed(peer):
    fetcher = Rebinding(strata_worker.Settings())
    url = peer.url.replace("127.0.0.1", "rebinding.example") + "/in/0"
    fetcher.judge(url, "the URL")
    with pytest.raises(strata_worker.FetchError, match="not a public address"):
        with fetcher.request(strata_worker.Halt(), "GET", url):
            pass
    assert not peer.requests


def test_no_redirect_is_followed(pull_worker, peer):
    peer.blobs["/elsewhere"] = b"1"
    peer.faults["/in/0"] = [{"status": 307, "headers": {"Location": peer.url + "/elsewhere"}}]
    assert pull_worker.manifest(peer.manifest("y = x", [("x", "json/object", b"1")])).status == 502
    assert not peer.paths("/elsewhere")


def test_proxies_are_ignored_unless_local_hosts_are_allowed(peer):
    peer.blobs["/in/0"] = b"5"
    with contextlib.closing(Peer()) as proxy:
        manifest = peer.manifest("y = x", [("x", "json/object", b"5")])
        env = {"http_proxy": proxy.url, "HTTP_PROXY": proxy.url, "no_proxy": "", "NO_PROXY": ""}
        with WorkerProcess(STRATA_WORKER_ALLOWED_HOSTS="127.0.0.1", **env) as client:
            assert client.manifest(manifest).status == 200
        assert not proxy.requests
        proxy.faults["/in/0"] = []
        proxy.blobs[peer.url + "/in/0"] = b"6"
        with WorkerProcess(STRATA_WORKER_ALLOW_LOCAL_HOSTS="1", **env) as client:
            assert client.manifest(manifest).status == 200
        assert proxy.paths("http://")


def test_tls_is_verified_against_the_hosts_name(tmp_path):
    certificate = make_certificate(tmp_path, "right.example")
    context = __import__("ssl").create_default_context(__import__("ssl").Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with contextlib.closing(Peer()) as peer:
        peer.server.socket = context.wrap_socket(peer.server.socket, server_side=True)
        peer.blobs["/in/0"] = b"5"
        url = peer.url.replace("http", "https").replace("127.0.0.1", "localhost") + "/in/0"
        fetcher = strata_worker.Fetcher(strata_worker.Settings(allowed_hosts=("localhost",)))
        with pytest.raises(strata_worker.FetchError, match="(?i)certificate"):
            with fetcher.request(strata_worker.Halt(), "GET", url):
                pass
        assert not peer.requests


def make_certificate(folder, name):
    """A self-signed certificate and its key in one file, by the openssl command."""
    need(shutil.which("openssl"), "needs the openssl command")
    path = folder / "certificate.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=" + name,
            "-addext",
            "subjectAltName=DNS:" + name,
            "-keyout",
            str(path) + ".key",
            "-out",
            str(path),
        ],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + Path(str(path) + ".key").read_text())
    return path


# ---------------------------------------------------------------------------------------
# Endurance: nothing a cell or the machine does takes the worker down
# ---------------------------------------------------------------------------------------

UNRULY = {
    "a child": "subprocess.Popen(['sleep', '60'])",
    "a child in a session of its own": "subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "a child that ignores SIGTERM": "subprocess.Popen(['sh', '-c', 'trap \"\" TERM HUP INT; while :; do sleep 1; done'])",
    "a stopped child": "os.kill(subprocess.Popen(['sleep', '60']).pid, signal.SIGSTOP)",
    "a daemon": "os.fork() or (os.setsid(), os.fork() or time.sleep(60), os._exit(0))",
    "grandchildren": "subprocess.Popen(['sh', '-c', 'sleep 60 & sleep 60 & (sleep 60 &) ; wait'])",
    "a shell's orphan": "subprocess.run(['sh', '-c', 'setsid sleep 60 & exit 0'])",
    "forks that fork": "[os.fork() for _ in range(5)]; os.getpid() == me or time.sleep(60)",
}
ENDINGS = {
    "success": "",
    "an error": "raise ValueError",
    "a timeout": "time.sleep(60)",
    "a crash": "os.abort()",
    "an exit": "os._exit(1)",
}


def marked(mark):
    """The living processes whose environment holds the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in path.read_bytes() and state not in "ZX":
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("child", UNRULY)
def test_no_process_outlives_its_cell(worker, child, ending):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc")
    mark = "MARK=%s" % os.urandom(8).hex()
    # OMP_* makes it a process of its own, whose environment block shows the mark to this test.
    env = {"MARK": mark[5:], "OMP_NUM_THREADS": "1"}
    source = "import os, signal, subprocess, sys, time\nme = os.getpid()\n_c = %s\n%s" % (
        UNRULY[child],
        ENDINGS[ending],
    )
    answer = worker.execute(source, env=env, timeout_seconds=2 if ending == "a timeout" else 30)
    assert answer.status == {"a timeout": 408, "a crash": 500, "an exit": 500}.get(ending, 200)
    eventually(lambda: not marked(mark), "its processes are gone", 2)


def test_no_process_outlives_a_cancel(worker):
    mark = "MARK=%s" % os.urandom(8).hex()
    source = "import os, subprocess, time\nsubprocess.Popen(['setsid', 'sleep', '60'])\ntime.sleep(60)"
    call = lambda: worker.execute(source, build_id="cancelled-tree", env={"MARK": mark[5:], "OMP_NUM_THREADS": "1"})  # noqa: E731
    with in_background(call) as answer:
        eventually(lambda: len(marked(mark)) >= 2, "its processes run")
        assert worker.cancel("cancelled-tree")["cancelled"]
        assert answer(5).status == 500
        assert not marked(mark)


def test_a_fork_bomb_is_ended_whole(worker):
    mark = "MARK=%s" % os.urandom(8).hex()
    source = (
        "import os, time\nend = time.time() + 20\n"
        "def bomb(depth):\n    while time.time() < end:\n        if depth < 3 and os.fork() == 0:\n            bomb(depth + 1); os._exit(0)\n        time.sleep(0.05)\nbomb(0)"
    )
    answer = worker.execute(source, env={"MARK": mark[5:], "OMP_NUM_THREADS": "1"}, timeout_seconds=1)
    assert answer.status == 408
    eventually(lambda: not marked(mark), "its processes are gone", 2)
    assert worker.run("x = 1").json("x") == 1


def test_cells_die_with_a_worker_that_is_killed(tmp_path):
    mark = "MARK=%s" % os.urandom(8).hex()
    worker = WorkerProcess(STRATA_WORKER_RUN_ROOT=str(tmp_path))
    with worker as client:
        source = "import os, subprocess, time\nsubprocess.Popen(['setsid', 'sleep', '60'])\ntime.sleep(60)"
        call = lambda: client.execute(source, env={"MARK": mark[5:], "OMP_NUM_THREADS": "1"})  # noqa: E731
        with in_background(lambda: pytest.raises(OSError, call)):
            eventually(lambda: len(marked(mark)) >= 2, "its processes run")
            worker.process.kill()
            eventually(lambda: not marked(mark), "its processes are gone", 2)


@needs_fork_server
def test_a_run_survives_the_death_of_its_fork_server():
    worker = WorkerProcess()
    with worker as client:
        eventually(lambda: fork_servers(worker, "pandas"), "the fork server runs")
        client.run("x = 1")
        with in_background(lambda: client.execute("import time; time.sleep(2); x = 7", build_id="survivor")) as answer:
            eventually(lambda: client.health()["active_executions"], "the cell runs")
            time.sleep(0.5)  # into the sleep of the cell: there is nothing outside to wait for
            for pid in fork_servers(worker):
                os.kill(pid, signal.SIGKILL)
            assert client.run("x = 2").json("x") == 2
            assert answer().bundle.json("x") == 7


@needs_fork_server
def test_a_fork_server_that_hangs_loses_no_run():
    worker = WorkerProcess()
    with worker as client:
        client.run("x = 1")
        eventually(lambda: fork_servers(worker, "pandas"), "the fork server runs")
        for pid in fork_servers(worker, "pandas"):
            os.kill(pid, signal.SIGSTOP)
        assert client.run("x = 2").json("x") == 2
        assert client.run("x = 3").json("x") == 3


def fork_servers(worker, preload=""):
    return [
        pid
        for pid, command in processes_of(worker.process.pid)
        if "--fork-server" in command and preload in command[-1] and parent_of(pid) == worker.process.pid
    ]


def parent_of(pid):
    return int(Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[1])


def test_the_kernel_takes_a_cell_before_the_worker(worker):
    score = worker.run("score = int(open('/proc/self/oom_score_adj').read())").json("score")
    assert score > int(Path("/proc/%d/oom_score_adj" % worker.worker.process.pid).read_text())


@pytest.mark.parametrize(
    "source", ["x = bytes(2**30)", "x = [bytes(10**6) for _ in range(2000)]", "import numpy\nx = numpy.ones(2**28)"]
)
def test_a_cell_over_its_memory_is_an_error_that_says_so(source):
    with WorkerProcess(STRATA_WORKER_CELL_MEMORY_MB="600") as client:
        bundle = client.execute(source).bundle
        assert not bundle.manifest["success"]
        assert "MemoryError" in bundle.manifest["error"] and "STRATA_WORKER_CELL_MEMORY_MB" in bundle.manifest["error"]
        assert client.run("x = 1")


def test_a_console_without_end_keeps_its_start_and_its_end_and_gives_the_disk_back(tmp_path):
    source = (
        "import os, time\nprint('the start')\nline = b'x' * 1023 + b'\\n'\n"
        "for n in range(200):\n    os.write(1, line * 1024); time.sleep(0.01)\n"
        "time.sleep(0.5)\ndisk = os.stat('../stdout').st_blocks * 512\nprint('the end')"
    )
    with WorkerProcess(STRATA_WORKER_CONSOLE_MAX_BYTES=str(2**20), STRATA_WORKER_RUN_ROOT=str(tmp_path)) as client:
        bundle = client.run(source)
    assert bundle.stdout.startswith("the start\n") and bundle.stdout.endswith("the end\n")
    assert re.search(r"\n\.\.\. 20\d+ bytes are missing here", bundle.stdout)
    assert 2**20 <= len(bundle.stdout) < 2**20 + 200
    assert bundle.json("disk") < 20 * 2**20


@pytest.mark.parametrize("written", ["b'a\\0b'", "b'\\xff\\xfe' * 1000", "b'x' * 3_000_000"])
def test_any_bytes_make_a_console(worker, written):
    stdout = worker.run("import os\n_n = os.write(1, %s)" % written).stdout
    assert stdout == eval(written).decode("utf-8", "replace")


HOSTILE = {
    "closed descriptors": "import os\nx = 1\nfor fd in range(200):\n    try: os.close(fd)\n    except OSError: pass",
    "changed handlers": "import signal\nx = 1\nfor n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGALRM): signal.signal(n, signal.SIG_IGN)",
    "another folder": "import os\nx = 1\nos.chdir('/')",
    "no stdout": "import sys\nx = 1\nsys.stdout = sys.stderr = None",
    "no builtins": "x = 1\ndel __builtins__",
    "a running thread": "import threading, time\nx = 1\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    "an exit handler that hangs": "import atexit, time\nx = 1\natexit.register(time.sleep, 60)",
    "a value that cannot be pickled": "import threading\nx = 1\ny = threading.Lock()",
    "a value that raises": "x = 1\nclass Y:\n    def __reduce__(self): raise ValueError('no')\n    __repr__ = __eq__ = __hash__ = __reduce__\ny = Y()",
    "a value that exits": "x = 1\nclass Y:\n    def __reduce__(self): raise SystemExit(3)\ny = Y()",
    "a deep value": "x = 1\ny = []\nfor _ in range(10**5): y = [y]",
    "many descriptors": "import os\nx = 1\ny = 0\ntry:\n    while True: os.open('/dev/null', 0)\nexcept OSError: pass",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_cell_gets_its_result_and_harms_nobody(worker, kind):
    bundle = worker.execute(HOSTILE[kind]).bundle
    assert bundle.manifest["success"], bundle.manifest["traceback"]
    assert bundle.json("x") == 1
    assert worker.run("x = 2").json("x") == 2


def test_numpy_floats_inside_a_dict_are_json(worker):
    bundle = worker.run(
        "import numpy as np\nscores = {'a': [np.float64(0.5)], 'b': np.str_('é')}\nother = {'n': np.int64(1)}"
    )
    assert bundle.json("scores") == {"a": [0.5], "b": "é"}
    assert bundle.manifest["variables"]["other"]["content_type"] == "pickle/object"


def test_a_value_that_hangs_is_a_timeout(worker):
    answer = worker.execute(
        "import time\nclass Y:\n    def __reduce__(self): time.sleep(60)\ny = Y()", timeout_seconds=1
    )
    assert answer.status == 408


def test_endless_recursion_is_an_error(worker):
    bundle = worker.execute("def f(): return f()\nf()").bundle
    assert bundle.manifest["error"].startswith("RecursionError")


def test_a_hundred_thousand_variables_come_back(worker):
    bundle = worker.execute(
        "for n in range(100_000): globals()['v%d' % n] = n", timeout_seconds=120, timeout=180
    ).bundle
    assert len(bundle.manifest["variables"]) == 100_001 and bundle.json("v99999") == 99999


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 8 MiB."""
    need(sys.platform.startswith("linux"), "needs Linux")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small disk here: " + mounted.stderr)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    "what, source, inputs",
    [
        ("staging", "x = 1", [("data", "file/path", bytes(10 * 2**20))]),
        ("running", "open('big', 'wb').write(bytes(10 * 2**20))", []),
        ("answering", "x = bytes(10 * 2**20)", []),
        ("printing", "import os\nfor _ in range(10 * 2**10): os.write(1, b'x' * 1024)", []),
    ],
)
def test_a_full_disk_is_an_error_with_the_reason_and_the_next_run_is_fine(small_disk, what, source, inputs):
    with WorkerProcess(STRATA_WORKER_RUN_ROOT=str(small_disk)) as client:
        answer = client.execute(source, inputs)
        if answer.status == 200:
            failed = [entry["error"] for entry in answer.bundle.manifest["variables"].values() if "error" in entry]
            error = answer.bundle.manifest["error"] or failed[0]
        else:
            assert answer.status == 500
            error = answer.json["error"]
        assert "No space left" in error, what
        eventually(lambda: not list(small_disk.glob("*/run-*")), "the folder is gone")
        assert client.run("x = 1").json("x") == 1


def test_a_worker_out_of_descriptors_recovers():
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    worker = WorkerProcess()
    with worker:
        pass
    process = subprocess.Popen(
        [sys.executable, "-c", limited, str(HERE / "strata_worker.py"), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = next(re.search(r"listening on (\S+)", line).group(1) for line in process.stderr if "listening" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        client = Client(type("W", (), {"port": int(url.rsplit(":", 1)[1])}))
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", client.port), timeout=5))
            assert client.health()["status"] == "healthy"
        assert eventually(lambda: client.execute("x = 1").status == 200, "a cell runs again")
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_two_cells_share_no_randomness_and_nothing_else(worker):
    source = (
        "import numpy, os, random, sys, tempfile, uuid\nmade = [random.random(), float(numpy.random.rand()), str(uuid.uuid4()), tempfile.mktemp(), os.getpid()]\n"
        "leaked = hasattr(sys, 'left')\nsys.left = True\nargv = sys.argv\nids = [os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)]\n"
        "umask = os.umask(0o22)\nfds = sorted(map(int, os.listdir('/proc/self/fd')))[:3]\ncount = len(os.listdir('/proc/self/fd'))"
    )
    one, two = worker.run(source), worker.run(source)
    assert not set(map(str, one.json("made"))) & set(map(str, two.json("made")))
    assert two.json("leaked") is False and two.json("ids") == [True, True] and two.json("umask") == 0o22
    assert two.json("fds") == [0, 1, 2] and two.json("count") <= 8


@pytest.mark.parametrize(
    "env, source",
    [({"OMP_NUM_THREADS": "3"}, ""), ({}, "os.environ['OPENBLAS_NUM_THREADS'] = '1'"), ({"PYTHONHASHSEED": "5"}, "")],
)
def test_what_is_read_at_import_gets_a_process_that_has_not_imported(worker, env, source):
    assert worker.run("import os, sys\n%s\ncold = 'pandas' not in sys.modules" % source, env=env).json("cold") is True


@pytest.mark.parametrize("preload", ["", "off", "pyarrow"])
def test_cells_run_whatever_is_preloaded(preload):
    with WorkerProcess(STRATA_WORKER_PRELOAD=preload) as client:
        for _ in range(2):
            assert client.run("import os\nx = 1\nprint('x')\nenv = os.environ['A']", env={"A": "b"}).json("x") == 1


def test_clients_that_vanish_at_every_point_leave_no_slot_taken(pull_worker):
    body, content_type = form_of(
        [("metadata", json.dumps(envelope("x = a", [("a", "json/object")])).encode()), ("a", b"1")]
    )
    request = (
        b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
        % (content_type.encode(), len(body))
        + body
    )
    for at in range(1, len(request), 9):
        with pull_worker.send(request[:at]) as sock:
            if at % 2:  # by a reset
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with pull_worker.send(request):
        pass  # while its cell runs
    eventually(lambda: pull_worker.health()["active_executions"] == 0, "all slots are free")


def test_an_answer_that_is_never_read_gives_its_slot_back(pull_worker):
    body, content_type = form_of([("metadata", json.dumps(envelope("blob = bytes(50 * 2**20)")).encode())])
    head = b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (
        content_type.encode(),
        len(body),
    )
    with pull_worker.send(head + body):
        eventually(lambda: pull_worker.health()["active_executions"] == 1, "the cell runs")
        eventually(lambda: pull_worker.health()["active_executions"] == 0, "the slot is free", 20)


def test_a_head_that_dawdles_is_408_and_others_are_served_meanwhile(worker, monkeypatch):
    with strata_worker.Worker(port=0, preload="off") as embedded:
        monkeypatch.setattr(strata_worker, "HEAD_SECONDS", 0.3)
        client = Client(embedded)
        with client.send(b"GET /health HTTP/1.1\r\nHo") as sock:
            assert client.health()["status"] == "healthy"
            assert statuses(sock.recv(65536)) == [408]


@given(st.binary(max_size=400), st.integers(1, 50))
def test_no_bytes_make_the_head_parser_fail_but_by_an_http_error(data, size):
    buffer = bytearray()
    try:
        for piece in cut(data + b"\r\n\r\n", [size]):
            buffer += piece
            strata_worker.take_head(buffer)
    except strata_worker.WorkerError as error:
        assert error.status in (400, 431, 501, 505)


@given(
    st.sampled_from([b"GET", b"POST", b"G\0T"]),
    st.lists(st.tuples(st.binary(max_size=12), st.binary(max_size=20)), max_size=6),
    st.integers(1, 30),
)
def test_no_headers_make_the_head_parser_fail_but_by_an_http_error(method, headers, size):
    data = (
        method
        + b" / HTTP/1.1\r\nHost: x\r\n"
        + b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        + b"\r\n"
    )
    buffer, head = bytearray(), None
    try:
        for piece in cut(data, [size]):
            buffer += piece
            head = head or strata_worker.take_head(buffer)
        assert head is None or head.length is None or head.length >= 0
    except strata_worker.WorkerError as error:
        assert error.status in (400, 431, 501, 505)


@given(st.text(max_size=60))
def test_only_a_last_component_ever_comes_out_of_a_file_name(name):
    try:
        last = strata_worker.last_component(name)
    except ValueError:
        return
    assert (
        last not in ("", ".", "..") and "/" not in last and "\0" not in last and name.replace("\\", "/").endswith(last)
    )


# ---------------------------------------------------------------------------------------
# Jobs: executions whose callers come back, and answers that start before their end
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs_worker():
    with WorkerProcess("--jobs", "--max-concurrent", "1", STRATA_WORKER_ALLOW_LOCAL_HOSTS="1") as client:
        yield client


def submit(client, source, build_id=None, **params):
    """Push a cell as a job; its URL."""
    answer = client.execute(source, build_id=build_id, **params)
    assert answer.status == 202, answer.body
    return answer.json["job_url"]


def poll(client, url):
    return client.request("GET", url)


def result_of(client, url):
    """What the job answers once it neither waits nor runs."""

    def ended():
        answer = poll(client, url)
        is_json = answer.headers["Content-Type"] == "application/json"
        assert answer.status == 200, answer.body
        return (not is_json or answer.json["state"] in ("finished", "failed")) and answer

    return eventually(ended, "the job ends", 30)


def wait_for(path):
    return "import os, time\nwhile not os.path.exists(%r): time.sleep(0.01)\n" % str(path)


def test_a_job_is_accepted_and_its_url_answers_the_bundle(jobs_worker):
    url = submit(jobs_worker, "print('hello')\ny = x + 1", inputs=[("x", "json/object", b"41")])
    answer = result_of(jobs_worker, url)
    assert answer.headers["Content-Type"] == "application/x-tar"
    assert answer.headers["X-Strata-Executor-Protocol"] == "v1"
    assert answer.headers["X-Strata-Notebook-Executor-Protocol"] == "notebook-cell-v1"
    assert answer.bundle.json("y") == 42 and answer.bundle.stdout == "hello\n"
    assert poll(jobs_worker, url).body == answer.body  # whose first answer may have been lost on the way


def test_a_full_worker_queues_jobs_and_says_where_each_stands(jobs_worker, tmp_path):
    first = submit(jobs_worker, wait_for(tmp_path / "go") + "x = 1")
    eventually(lambda: poll(jobs_worker, first).json["state"] == "running", "the first runs")
    others = [submit(jobs_worker, "x = %d" % number) for number in (2, 3)]
    assert [poll(jobs_worker, url).json for url in others] == [
        {"state": "queued", "position": 1, "detail": "Next for a slot on this worker."},
        {"state": "queued", "position": 2, "detail": "Behind 1 cell for a slot on this worker."},
    ]
    assert jobs_worker.health()["active_executions"] == 1
    (tmp_path / "go").touch()
    assert [result_of(jobs_worker, url).bundle.json("x") for url in (first, *others)] == [1, 2, 3]


def test_a_queued_job_is_not_overtaken_by_a_caller_who_would_not_wait(jobs_worker, tmp_path):
    first = submit(jobs_worker, wait_for(tmp_path / "go"))
    second = submit(jobs_worker, "x = 2")
    metadata = {"protocol_version": "notebook-cell-v1", "source": "x = 3", "inputs": {}}
    assert jobs_worker.form("/v1/notebook-execute", metadata).status == 503
    (tmp_path / "go").touch()
    assert result_of(jobs_worker, second).bundle.json("x") == 2
    result_of(jobs_worker, first)
    assert jobs_worker.form("/v1/notebook-execute", metadata).bundle.json("x") == 3


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_cancelled_job_has_failed_and_leaves_nothing(jobs_worker, tmp_path, is_queued):
    urls = [submit(jobs_worker, wait_for(tmp_path / "go"), build_id=name) for name in ("ahead", "behind")]
    eventually(lambda: poll(jobs_worker, urls[0]).json["state"] == "running", "the first runs")
    assert jobs_worker.cancel("behind" if is_queued else "ahead")["cancelled"]
    told = result_of(jobs_worker, urls[is_queued]).json
    assert told == {
        "state": "failed",
        "status_code": 409 if is_queued else 500,
        "error": "the execution was cancelled",
    }
    assert not jobs_worker.cancel("behind" if is_queued else "ahead")["cancelled"]
    (tmp_path / "go").touch()
    assert result_of(jobs_worker, urls[not is_queued]).bundle.manifest["success"]
    eventually(lambda: jobs_worker.health()["active_executions"] == 0, "its slot is free")


def test_a_job_that_times_out_has_failed_with_408(jobs_worker):
    told = result_of(jobs_worker, submit(jobs_worker, "import time; time.sleep(60)", timeout_seconds=0.3)).json
    assert (told["state"], told["status_code"]) == ("failed", 408) and "0.3" in told["error"]


def test_a_job_whose_cell_raises_answers_its_bundle(jobs_worker):
    bundle = result_of(jobs_worker, submit(jobs_worker, "1 / 0")).bundle
    assert not bundle.manifest["success"] and "ZeroDivisionError" in bundle.manifest["error"]


def test_a_pulled_job_finishes_with_what_a_synchronous_worker_had_answered(jobs_worker, peer):
    answer = jobs_worker.manifest(peer.manifest("y = x + z", [("x", "json/object", b"40"), ("z", "json/object", b"2")]))
    assert answer.status == 202
    told = result_of(jobs_worker, answer.json["job_url"]).json
    assert (told["state"], told["status_code"]) == ("finished", 200)
    assert told["result"]["success"] and told["result"]["build_id"] == "pulled"
    assert told["result"]["finalize"] == {"done": True} and peer.bundle().json("y") == 42


def test_a_pulled_job_that_fails_says_with_which_status(jobs_worker, peer):
    manifest = peer.manifest("y = x", [("x", "json/object", b"40")])
    peer.blobs.clear()
    told = result_of(jobs_worker, jobs_worker.manifest(manifest).json["job_url"]).json
    assert (told["state"], told["status_code"]) == ("failed", 502) and "'x'" in told["error"]


def test_bad_input_is_refused_at_once_and_is_no_job(jobs_worker):
    submit(jobs_worker, "x = 1")
    before = samples_of(jobs_worker)["jobs",]
    assert jobs_worker.execute("x = 1", inputs=[], timeout_seconds=-1).status == 400
    assert jobs_worker.form("/v1/execute", {"protocol_version": "v2"}).status == 400
    assert samples_of(jobs_worker)["jobs",] <= before  # fetched ones go meanwhile


def test_an_unknown_job_is_404(jobs_worker, worker):
    assert poll(jobs_worker, "/v1/jobs/nothing").status == 404
    assert poll(worker, "/v1/jobs/nothing").status == 404


def test_jobs_are_bounded_in_number():
    with WorkerProcess("--jobs", STRATA_WORKER_MAX_JOBS="1") as client:
        submit(client, "x = 1")
        answer = client.execute("x = 2")
        assert answer.status == 503 and answer.headers["Retry-After"] and "MAX_JOBS" in answer.json["detail"]


def test_jobs_are_bounded_in_time(tmp_path):
    flags = ("--jobs", "--max-concurrent", "1")
    with WorkerProcess(*flags, STRATA_WORKER_JOB_SECONDS="3", STRATA_WORKER_RUN_ROOT=str(tmp_path)) as client:
        first, second = submit(client, wait_for(tmp_path / "go")), submit(client, "x = 2")
        told = result_of(client, second).json
        assert (told["state"], told["status_code"]) == ("failed", 503)
        (tmp_path / "go").touch()
        eventually(lambda: poll(client, first).status == 404, "the result is too old")
        eventually(lambda: not list(tmp_path.glob("strata-worker-*/run-*")), "and so are their folders")


def test_jobs_are_behind_the_token():
    with WorkerProcess("--jobs", "--host", "127.0.0.1", STRATA_WORKER_TOKEN="t0ken") as client:
        client.token = "t0ken"
        url = submit(client, "x = 1")
        result_of(client, url)
        client.token = None
        assert poll(client, url).status == 401


def test_a_stopping_worker_takes_no_job_but_tells_of_those_it_has(tmp_path):
    worker = WorkerProcess("--jobs", STRATA_WORKER_DRAIN_SECONDS="30")
    with worker as client:
        url = submit(client, wait_for(tmp_path / "go") + "x = 1")
        worker.process.send_signal(signal.SIGTERM)
        eventually(lambda: "stopping" in worker.log(), "the drain begins")
        refused = client.execute("x = 2")
        assert refused.status == 503 and "stopping" in refused.json["detail"]
        (tmp_path / "go").touch()
        assert result_of(client, url).bundle.json("x") == 1
        assert worker.process.wait(10) == 0


def test_a_worker_is_not_idle_while_a_job_waits_to_be_fetched(tmp_path):
    worker = WorkerProcess("--jobs", "--exit-when-idle", "0.5")
    with worker as client:
        url = submit(client, "import time; time.sleep(0.7); x = 1")
        eventually(lambda: ": ok, staging" in worker.log(), "the cell is done")
        with pytest.raises(subprocess.TimeoutExpired):
            worker.process.wait(1)
        assert result_of(client, url).bundle.json("x") == 1
        assert worker.process.wait(10) == 0


def test_hints_are_for_dispatchers(jobs_worker, worker):
    hint = json.dumps({"worker": "gpu", "notebook_id": "n", "reason": "focus"}).encode()
    assert jobs_worker.request("POST", "/v1/hints", hint).status == 202
    assert jobs_worker.request("POST", "/v1/hints", b"[]").status == 400
    assert worker.request("POST", "/v1/hints", hint).status == 404


@pytest.fixture(scope="module")
def beating_worker():
    env = {"STRATA_WORKER_ALLOW_LOCAL_HOSTS": "1", "STRATA_WORKER_HEARTBEAT_SECONDS": "0.2"}
    with WorkerProcess("--max-concurrent", "1", **env) as client:
        yield client


def test_a_slow_execute_answers_at_once_and_tells_its_status_in_the_body(beating_worker, peer):
    answer = beating_worker.manifest(peer.manifest("import time; time.sleep(1); x = 1"), "/execute")
    assert answer.status == 200 and answer.headers["X-Strata-Status-In-Body"] == "1"
    assert re.fullmatch(rb" {2,}\{.*", answer.body)
    told = json.loads(answer.body)
    assert told["status_code"] == 200 and json.loads(told["content"])["build_id"] == "pulled"
    assert peer.bundle().json("x") == 1


def test_a_slow_execute_that_fails_tells_that_in_the_body(beating_worker, peer):
    answer = beating_worker.manifest(
        peer.manifest("import time; time.sleep(60)", params={"timeout_seconds": 0.5}), "/execute"
    )
    told = json.loads(answer.body)
    assert answer.status == 200 and told["status_code"] == 408 and "timeout" in json.loads(told["content"])["error"]


def test_an_http_1_0_proxy_gets_heartbeats_to_the_end_of_the_connection(beating_worker, peer):
    body = json.dumps(peer.manifest("import time; time.sleep(0.5)")).encode()
    answer = beating_worker.exchange(b"POST /execute HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and json.loads(content)["status_code"] == 200


def test_a_quick_execute_and_a_refusal_keep_their_own_status(beating_worker, peer, tmp_path):
    quick = beating_worker.manifest(peer.manifest("x = 1"), "/execute")
    bad = beating_worker.request("POST", "/execute", b"{}")
    with in_background(lambda: beating_worker.execute(wait_for(tmp_path / "go"))) as slow:
        eventually(lambda: beating_worker.health()["active_executions"], "the cell runs")
        full = beating_worker.manifest(peer.manifest("x = 1"), "/execute")
        (tmp_path / "go").touch()
        assert slow().status == 200
    assert (bad.status, full.status) == (400, 503)
    # A busy machine may make a "quick" cell slow; then it has to say so.
    assert quick.status == 200 and ("X-Strata-Status-In-Body" in quick.headers) == (b"status_code" in quick.body)


# ---------------------------------------------------------------------------------------
# Operators: metrics and logs
# ---------------------------------------------------------------------------------------


def samples_of(client):
    """/metrics as Prometheus' own parser reads it: {(name, label's value or None): value}."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = client.request("GET", "/metrics")
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.body.decode()))
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {
        (sample.name.removeprefix("strata_worker_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_runs_by_outcome_and_seconds_by_phase(tmp_path):
    with WorkerProcess("--max-concurrent", "2") as client:
        before = samples_of(client)
        client.run("x = 1")
        client.execute("1 / 0")
        client.execute("import time; time.sleep(60)", timeout_seconds=0.2)
        client.execute("import os; os.abort()")
        client.execute("x", inputs=[], timeout_seconds="no")
        after = samples_of(client)
        client.request("GET", "/nowhere")
        assert samples_of(client)["responses_total", "404"] == 1
    runs = {name: after["runs_total", name] for name in strata_worker.Tally.OUTCOMES}
    assert runs == {"ok": 1, "raised": 1, "timeout": 1, "failed": 2, "cancelled": 0}
    assert before["runs_total", "ok"] == 0
    assert after["run_phase_seconds_count", "running"] == 5
    assert after["run_phase_seconds_bucket", "running", "+Inf"] == 5
    assert 0.2 <= after["run_phase_seconds_sum", "running"] < 60
    assert after["run_bytes_total", "out"] > 0
    assert (after["slots",], after["slots_in_use",]) == (2, 0)
    assert after["fork_servers",] >= 1 and after["cells",] == 0
    assert after["environments",] >= 0


def test_metrics_are_behind_the_token():
    with WorkerProcess("--host", "127.0.0.1", STRATA_WORKER_TOKEN="t0ken") as client:
        assert client.request("GET", "/metrics").status == 401
        client.token = "t0ken"
        assert samples_of(client)["responses_total", "401"] == 1


def test_a_json_log_is_one_object_a_line_and_a_run_has_fields():
    worker = WorkerProcess("--log-format", "json")
    with worker as client:
        client.execute('raise ValueError("two\\nlines")', build_id="b-1")
        eventually(lambda: "b-1" in worker.log(), "the run is logged")
    lines = [json.loads(line) for line in worker.log().splitlines()]
    run = next(line for line in lines if "outcome" in line)
    assert (run["level"], run["build_id"], run["outcome"]) == ("info", "b-1", "raised")
    assert run["running_seconds"] >= 0 and run["bytes_out"] > 0 and "two" in run["reason"]
    assert all({"time", "level", "message"} <= set(line) for line in lines)


# ---------------------------------------------------------------------------------------
# Core transforms: tables in, a table out
# ---------------------------------------------------------------------------------------

TRANSFORMS = """
import sys
import pyarrow as pa


def double(inputs, params):
    print("doubling", params["column"])
    print("carefully", file=sys.stderr)
    table = inputs["input0"]
    assert table is inputs[0]
    column = table.column(params["column"]).to_pylist()
    return pa.table({params["column"]: [value * 2 for value in column]})


def stream(inputs, params):
    schema = pa.schema([("n", pa.int64())])
    batches = (pa.record_batch({"n": pa.array([n])}, schema) for n in range(params["batches"]))
    return pa.RecordBatchReader.from_batches(schema, batches)


def number(inputs, params):
    return 7


class inner:
    deep = staticmethod(lambda inputs, params: {"names": list(inputs)})
"""


@pytest.fixture(scope="module")
def core_worker(tmp_path_factory):
    """A worker started in the folder of a module of transforms."""
    folder = tmp_path_factory.mktemp("transforms")
    (folder / "my_transforms.py").write_text(TRANSFORMS)
    flags = []
    for name in ("double", "stream", "number", "inner.deep"):
        flags += ["--transform", "%s@v1=my_transforms:%s" % (name.rpartition(".")[2], name)]
    flags += ["--transform", "missing@v1=my_transforms:nothing"]
    env = {"STRATA_WORKER_ALLOW_LOCAL_HOSTS": "1", "STRATA_WORKER_TRANSFORM_SECONDS": "20"}
    with WorkerProcess(*flags, cwd=folder, **env) as client:
        yield client


def stream_of(table):
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def transform(client, ref, params, *tables):
    """Push a Core transform as the build runner does."""
    names = ["input%d" % number for number in range(len(tables))]
    metadata = {
        "protocol_version": "v1",
        "build_id": "b",
        "tenant": None,
        "principal": None,
        "provenance_hash": "0f",
        "transform": {"ref": ref, "code_hash": "0123456789abcdef", "params": params},
        "inputs": [{"name": name, "format": "arrow_ipc_stream"} for name in names],
    }
    return client.form("/v1/execute", metadata, [(name, stream_of(table)) for name, table in zip(names, tables)])


def table_in(answer):
    assert answer.status == 200, answer.body
    assert answer.headers["Content-Type"] == "application/vnd.apache.arrow.stream"
    assert answer.headers["X-Strata-Executor-Protocol"] == "v1"
    return pyarrow.ipc.open_stream(answer.body).read_all()


def logs_of(answer):
    return base64.b64decode(answer.headers["X-Strata-Logs"]).decode()


def test_health_lists_the_transforms(core_worker, worker):
    refs = core_worker.health()["capabilities"]["transform_refs"]
    assert refs[0] == "notebook_cell@v1" and {"python_script@v1", "double@v1", "deep@v1"} <= set(refs)
    assert worker.health()["capabilities"]["transform_refs"] == ["notebook_cell@v1", "python_script@v1"]


def test_a_function_of_a_module_transforms_tables(core_worker):
    answer = transform(core_worker, "double@v1", {"column": "x"}, pyarrow.table({"x": [1, 2, 3]}))
    assert table_in(answer).to_pydict() == {"x": [2, 4, 6]}
    assert logs_of(answer) == "doubling x\ncarefully"


def test_a_script_transforms_tables_of_any_kind(worker):
    source = """
import pandas
left = input0.to_pandas()
output = left.merge(input1.to_pandas(), on="key").assign(total=lambda f: f.a * f.b * params["rate"])[["key", "total"]]
"""
    tables = pyarrow.table({"key": ["p", "q"], "a": [2, 3]}), pyarrow.table({"key": ["q", "p"], "b": [5, 7]})
    answer = transform(worker, "python_script@v1", {"source": source, "rate": 10}, *tables)
    assert table_in(answer).to_pydict() == {"key": ["p", "q"], "total": [140, 150]}
    assert "X-Strata-Logs" not in answer.headers


@pytest.mark.parametrize(
    "value",
    [
        "pyarrow.table({'x': [1]})",
        "pyarrow.record_batch({'x': [1]})",
        "pyarrow.table({'x': [1]}).to_reader()",
        "{'x': [1]}",
        "__import__('polars').DataFrame({'x': [1]})",
        "input0",
    ],
)
def test_an_output_is_anything_that_is_a_table_and_carries_no_mark_of_the_worker(worker, value):
    given = pyarrow.table({"x": [1]}).replace_schema_metadata({"mine": "kept"})
    answer = transform(worker, "python_script@v1", {"source": "import pyarrow\noutput = " + value}, given)
    table = table_in(answer)
    assert table.to_pydict() == {"x": [1]}
    assert (table.schema.metadata or {}) == ({b"mine": b"kept"} if value == "input0" else {})


def test_batches_are_written_as_they_come(core_worker):
    table = table_in(transform(core_worker, "stream@v1", {"batches": 5}))
    assert table.column("n").to_pylist() == [0, 1, 2, 3, 4] and table.column("n").num_chunks == 5


def test_inputs_come_by_name_in_their_order(core_worker):
    tables = [pyarrow.table({"x": [n]}) for n in range(11)]
    assert table_in(transform(core_worker, "deep@v1", {}, *tables)).to_pydict() == {
        "names": ["input%d" % n for n in range(11)]
    }


@pytest.mark.parametrize(
    "ref, params, code, said",
    [
        ("double@v1", {}, "KeyError", "column"),
        ("number@v1", {}, "TypeError", "a table, not a value of type int"),
        ("missing@v1", {}, "AttributeError", "nothing"),
        ("python_script@v1", {"source": "1 / 0"}, "ZeroDivisionError", "division by zero"),
        ("python_script@v1", {"source": "x = 1"}, "NameError", "output"),
        ("python_script@v1", {"source": "output = ("}, "SyntaxError", "line 1"),
        ("python_script@v1", {"source": "import os; os.abort()"}, "EXECUTION_FAILED", "SIGABRT"),
    ],
)
def test_a_transform_that_fails_says_how_in_cores_words(core_worker, ref, params, code, said):
    answer = transform(core_worker, ref, params, pyarrow.table({"x": [1]}))
    assert answer.status == 500 and set(answer.json) == {"success", "error_code", "error_message"}
    assert answer.json["success"] is False and answer.json["error_code"] == code
    assert said in answer.json["error_message"]


def test_what_no_transform_can_be_made_of_is_400_in_cores_words(core_worker):
    for answer in (
        transform(core_worker, "python_script@v1", {}),
        transform(core_worker, "python_script@v1", {"source": 7}),
        transform(core_worker, "double@v1", []),
    ):
        assert answer.status == 400 and answer.json["error_code"] == "INVALID_REQUEST"
    bad = {"transform": {"ref": "double@v1", "params": {}}, "protocol_version": "v1"}
    for entry in (
        {"name": "input0", "format": "csv"},
        {"name": "../x", "format": "arrow_ipc_stream"},
        {"name": "input0"},
    ):
        answer = core_worker.form("/v1/execute", {**bad, "inputs": [entry]}, [("input0", b"")])
        assert answer.status == 400 and answer.json["error_code"] == "INVALID_REQUEST", entry
    answer = core_worker.form("/v1/execute", {**bad, "inputs": [{"name": "input0", "format": "arrow_ipc_stream"}]})
    assert answer.status == 400 and "no part" in answer.json["error_message"]


def test_an_input_that_is_no_arrow_stream_is_said_by_name(core_worker):
    metadata = {
        "protocol_version": "v1",
        "transform": {"ref": "double@v1", "params": {"column": "x"}},
        "inputs": [{"name": "input0", "format": "arrow_ipc_stream"}],
    }
    answer = core_worker.form("/v1/execute", metadata, [("input0", b"not arrow")])
    assert answer.status == 500 and "input0" in answer.json["error_message"]


def test_an_unknown_transform_is_refused_with_those_that_are_known(core_worker):
    answer = transform(core_worker, "duckdb_sql@v1", {"sql": "select 1"})
    assert answer.status == 400
    assert "duckdb_sql@v1" in answer.json["detail"] and "double@v1" in answer.json["detail"]


def test_a_transform_that_takes_too_long_is_408_in_cores_words():
    with WorkerProcess(STRATA_WORKER_TRANSFORM_SECONDS="0.5") as client:
        answer = transform(client, "python_script@v1", {"source": "import time; time.sleep(60)"})
    assert answer.status == 408 and answer.json["error_code"] == "TIMEOUT" and "0.5" in answer.json["error_message"]


def test_a_long_console_is_cut_to_what_a_header_can_carry(worker):
    source = "print('x' * 100_000 + 'end')\noutput = {'n': [1]}"
    answer = transform(worker, "python_script@v1", {"source": source})
    assert len(answer.headers["X-Strata-Logs"]) < 30_000 and logs_of(answer).endswith("end")


def test_a_transform_is_answered_at_once_by_a_worker_with_jobs(jobs_worker, tmp_path):
    first = submit(jobs_worker, wait_for(tmp_path / "go"))
    with in_background(lambda: transform(jobs_worker, "python_script@v1", {"source": "output = {'n': [1]}"})) as answer:
        eventually(lambda: b"strata_worker_queued 1\n" in jobs_worker.request("GET", "/metrics").body, "it waits")
        (tmp_path / "go").touch()
        assert table_in(answer()).to_pydict() == {"n": [1]}
    result_of(jobs_worker, first)


def test_a_core_build_is_pulled_from_its_urls_to_its_urls(core_worker, peer):
    manifest = peer.manifest("", [("x", "arrow/ipc", stream_of(pyarrow.table({"x": [4]})))])
    manifest["metadata"].update(executor_ref="double@v1", params={"column": "x"})
    answer = core_worker.manifest(manifest)
    assert answer.status == 200 and answer.json["success"], answer.body
    upload, finalize = peer.requests[-2:]
    assert pyarrow.ipc.open_stream(upload[3]).read_all().to_pydict() == {"x": [8]}
    assert upload[2]["Content-Type"] == "application/vnd.apache.arrow.stream"
    assert json.loads(finalize[3]) == {}


def test_a_core_build_that_fails_is_not_uploaded(core_worker, peer):
    manifest = peer.manifest("")
    manifest["metadata"].update(executor_ref="python_script@v1", params={"source": "raise ValueError('no')"})
    answer = core_worker.manifest(manifest)
    assert answer.status == 500 and answer.json["error_code"] == "ValueError"
    assert not [request for request in peer.requests if request[0] != "GET"]


@pytest.mark.parametrize("given", ["x@v1", "x@v1=module", "x@v1=a b:c", "=m:f", "notebook_cell@v1=m:f"])
def test_a_bad_transform_is_refused_at_start(given):
    done = run_command("--transform", given)
    assert done.returncode == 1 and "--transform" in done.stderr and "Traceback" not in done.stderr


def test_a_transform_of_no_module_is_refused_at_start():
    done = run_command("--port", "0", "--transform", "x@v1=no_such_module:run")
    assert done.returncode == 1 and "no_such_module" in done.stderr and done.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------
# Tools: check, run, and one file to copy
# ---------------------------------------------------------------------------------------


def rows_of(text):
    """A table of the tools, as {first column: the rest of its line}."""
    return {line.split("  ")[0]: line.split("  ", 1)[-1].split() for line in text.splitlines() if "  " in line}


def test_check_tells_what_works_and_what_to_do_about_the_rest(tmp_path):
    done = run_command("check", env={"STRATA_WORKER_TOKEN": "t0ken", "STRATA_WORKER_CONNECT": "ws://nowhere.invalid"})
    rows = rows_of(done.stdout)
    assert done.returncode == 0 and done.stdout.endswith("This machine can run cells.\n"), done
    formats = ("modules", "Markdown", "functions of a cell", "Arrow tables", "pandas frames", "plots")
    for what in ("Python cells", "pickled values", *formats, "folder of runs"):
        assert rows[what][0] == "yes", done.stdout
    for what in ("R cells", "R objects"):
        assert rows[what][0] == ("yes" if shutil.which("Rscript") else "no")
    if (Path(sys.executable).parent / "uv").exists():
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        assert rows_of(run_command("check", env={"PATH": path}).stdout)["locked environments"] == ["yes"]
    absent = [words for words in rows.values() if words[0] == "no"]
    assert all(len(words) > 2 for words in absent) and done.stderr == ""


def test_check_fails_where_no_cell_can_run(tmp_path):
    for name in ("strata_worker.py", "harness.R"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "harness.py").write_text("import sys; sys.exit(3)")
    done = run_command("check", folder=tmp_path)
    assert done.returncode == 1
    assert rows_of(done.stdout)["Python cells"][0] == "no" and "does not work" in done.stdout


def run_tool(cell, *arguments, **options):
    return run_command("run", str(cell), *map(str, arguments), **options)


def test_run_runs_a_file_as_a_cell_and_shows_what_it_left(tmp_path):
    (tmp_path / "data.json").write_text("[1, 2, 3]")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.txt").write_text("1")
    pyarrow.feather.write_feather(pyarrow.table({"a": [1, 2]}), tmp_path / "file.arrow")
    (tmp_path / "stream.arrow").write_bytes(stream_of(pyarrow.table({"a": [3]})))
    (tmp_path / "some.txt").write_text("text")
    source = """
import os, sys
print("to stdout")
print("to stderr", file=sys.stderr)
total = sum(data) + len(file) + len(stream)
names = [path.name for path in folder.iterdir()]
text = some.read_text() + os.environ["GIVEN"]
frame = file
"""
    (tmp_path / "cell.py").write_text(source)
    (tmp_path / "out").mkdir()
    inputs = ["data=data.json", "folder=folder", "file=file.arrow", "stream=stream.arrow", "some=some.txt"]
    flags = [part for entry in inputs for part in ("--input", entry.replace("=", "=%s/" % tmp_path))]
    done = run_tool(tmp_path / "cell.py", *flags, "--env", "GIVEN=-given", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("to stdout\n") and done.stderr == "to stderr\n"
    rows = rows_of(done.stdout)
    assert rows["total"] == ["json/object", "1", "9"]
    assert rows["text"][2:] == ["text-given"] and rows["names"][2:] == ['["one.txt"]']
    assert rows["frame"][0] == "arrow/ipc" and rows["frame"][2:] == ["2", "rows:", "a"]
    assert json.loads((tmp_path / "out" / "files" / "total.json").read_text()) == 9
    assert (tmp_path / "out" / "stdout.txt").read_text() == "to stdout\n"


def test_run_of_a_cell_that_raises_is_1_with_its_traceback(tmp_path):
    (tmp_path / "cell.py").write_text("print('before')\n1 / 0")
    done = run_tool(tmp_path / "cell.py")
    assert done.returncode == 1 and done.stdout == "before\n"
    assert 'File "<cell>", line 2' in done.stderr and "ZeroDivisionError" in done.stderr


def test_run_of_a_cell_that_cannot_run_is_1_with_the_reason(tmp_path):
    (tmp_path / "cell.py").write_text("import time; time.sleep(60)")
    done = run_tool(tmp_path / "cell.py", "--timeout", "0.3")
    assert done.returncode == 1 and "timeout" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_run_and_its_cell_and_leaves_nothing(tmp_path, number, code):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cell.py").write_text("import time; open(%r, 'w').close(); time.sleep(60)" % str(tmp_path / "runs"))
    command = [sys.executable, str(HERE / "strata_worker.py"), "run", str(tmp_path / "cell.py")]
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    eventually((tmp_path / "runs").exists, "the cell runs", 20)
    process.send_signal(number)
    assert process.wait(20) == code and "Traceback" not in process.stderr.read()
    eventually(lambda: list((tmp_path / "tmp").iterdir()) == [], "nothing is left")


def test_run_takes_an_r_file(tmp_path):
    need(shutil.which("Rscript"), "needs Rscript")
    (tmp_path / "cell.R").write_text("x <- 1:3\nprint(x)")
    done = run_tool(tmp_path / "cell.R")
    assert done.returncode == 0 and "[1] 1 2 3" in done.stdout and rows_of(done.stdout)["x"][0] == "json/object"


@pytest.mark.parametrize(
    "arguments",
    [["none.py"], ["cell.py", "--input", "x"], ["cell.py", "--input", "x=none"], ["cell.py", "--out", "full"], []],
)
def test_bad_usage_of_run_is_2_and_says_what_was_wrong(tmp_path, arguments, monkeypatch):
    (tmp_path / "cell.py").write_text("x = 1")
    (tmp_path / "full" / "files").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    done = run_command("run", *arguments)
    assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr


def test_a_tools_cell_finds_no_secret_and_leaves_no_folder(tmp_path):
    (tmp_path / "cell.py").write_text(
        "import os\nfound = [n for n in os.environ if 'TOKEN' in n or 'CREDENTIALS' in n]"
    )
    env = {"STRATA_WORKER_TOKEN": "t0ken", "STRATA_NOTEBOOK_CREDENTIALS": "{}", "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    done = run_tool(tmp_path / "cell.py", env=env)
    assert rows_of(done.stdout)["found"][2:] == ["[]"], done
    # A probe of R may outlive the tool for a moment, and then removes its own.
    eventually(lambda: list((tmp_path / "tmp").iterdir()) == [], "nothing is left")


@pytest.fixture(scope="module")
def zipapp(tmp_path_factory):
    path = tmp_path_factory.mktemp("zipapp") / "strata-worker.pyz"
    done = run_command("--bundle", str(path))
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python without site-packages, for the worker and for its cells."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def test_a_zipapp_is_the_same_bytes_each_time_and_holds_what_it_needs(zipapp, tmp_path):
    assert run_command("--bundle", str(tmp_path / "again.pyz")).returncode == 0
    assert (tmp_path / "again.pyz").read_bytes() == zipapp.read_bytes()
    names = zipfile.ZipFile(zipapp).namelist()
    assert {"__main__.py", "harness.py", "harness.R", "h11/__init__.py", "certifi/cacert.pem"} <= set(names)
    assert [name for name in names if name.startswith("licences/h11")]
    assert [name for name in names if name.startswith("licences/certifi")]


def test_a_zipapp_runs_where_there_is_nothing_but_python(zipapp, bare_python, tmp_path):
    (tmp_path / "tmp").mkdir()
    worker = WorkerProcess(command=[bare_python, str(zipapp)], TMPDIR=str(tmp_path / "tmp"))
    with worker as client:
        assert client.health()["version"] == strata_worker.__version__
        bundle = client.run("import sys\ny = x + [len(sys.path)]", [("x", "json/object", b"[1]")])
        assert bundle.json("y")[0] == 1
        answer = client.execute("import pyarrow")
        assert "No module named 'pyarrow'" in answer.bundle.manifest["error"]
        assert worker.stop() == 0
    # A probe of R may outlive the worker for a moment, and then removes its own.
    eventually(lambda: list((tmp_path / "tmp").iterdir()) == [], "nothing is left")


def test_a_zipapp_has_the_tools_and_makes_another(zipapp, bare_python, tmp_path):
    def ask(*arguments):
        command = [bare_python, str(zipapp), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    assert ask("--version").stdout.strip() == "strata-worker " + strata_worker.__version__
    check = ask("check")
    assert check.returncode == 0 and rows_of(check.stdout)["Arrow tables"][:4] == ["no", "pip", "install", "pyarrow"]
    assert ask("--bundle", "copy.pyz").returncode == 0
    assert (tmp_path / "copy.pyz").read_bytes() == zipapp.read_bytes()


def test_a_zipapp_takes_mounts_where_pyarrow_is(zipapp):
    mount = {"name": "data", "uri": "s3://bucket/x", "options": {"endpoint_url": "http://127.0.0.1:9", "anon": True}}
    with WorkerProcess(command=[sys.executable, str(zipapp)], STRATA_WORKER_STALL_SECONDS="2") as client:
        answer = client.execute("x = 1", mounts=[mount], timeout_seconds=10)
    assert answer.status == 500 and "Could not connect" in answer.json["error"], answer.body  # the helper ran


# ---------------------------------------------------------------------------------------
# Soak: mixed load at twice the slots
# ---------------------------------------------------------------------------------------


def test_a_soak_of_mixed_load_leaves_nothing_behind(tmp_path, peer):
    """STRATA_TEST_SOAK_SECONDS sets how long; five minutes is a full one."""
    seconds = float(os.environ.get("STRATA_TEST_SOAK_SECONDS", "30"))
    slots = 4
    worker = WorkerProcess(
        "--max-concurrent",
        str(slots),
        STRATA_WORKER_RUN_ROOT=str(tmp_path),
        STRATA_WORKER_ALLOW_LOCAL_HOSTS="1",
        STRATA_WORKER_STALL_SECONDS="2",
    )
    with worker as client:
        if not PRELOAD:
            eventually(lambda: fork_servers(worker, "pandas"), "the fork server runs")
        for _ in range(20):
            client.run("x = 1")
        before = footprint(worker)
        counts = Soak(client, peer, time.monotonic() + seconds).run(2 * slots)
        eventually(lambda: client.health()["active_executions"] == 0, "all slots are free")
        eventually(lambda: not list(tmp_path.glob("*/run-*")), "no folder is left")
        after = eventually(
            lambda: calm(before, footprint(worker)), "threads, descriptors and processes are as before", 15
        )
    assert sum(counts.values()) > seconds, counts
    assert {"success", "error", "crash", "timeout", "cancel", "hang-up", "refusal", "pull"} <= set(counts), counts
    assert after["memory"] - before["memory"] < 32 * 2**20


def footprint(worker):
    psutil = pytest.importorskip("psutil")
    process = psutil.Process(worker.process.pid)
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "processes": len(process.children(recursive=True)),
        "memory": process.memory_info().rss,
    }


def calm(before, after):
    """``after`` when it is no more than ``before``; a spare process may be on its way."""
    same = (
        all(after[key] <= before[key] for key in ("threads", "descriptors"))
        and after["processes"] <= before["processes"] + 1
    )
    return after if same else None


class Soak:
    """Clients that each do one thing after another until time is up, checking every answer."""

    def __init__(self, client, peer, deadline):
        self.client, self.peer, self.deadline = client, peer, deadline
        self.counts, self.problems, self.lock = {}, [], threading.Lock()

    def run(self, clients):
        threads = [threading.Thread(target=self.work, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.problems, self.problems[:3]
        return self.counts

    def work(self, number):
        actions = [self.success, self.error, self.crash, self.timeout, self.cancel, self.hang_up, self.pull]
        turn = number
        while time.monotonic() < self.deadline:
            turn += 1
            try:
                kind = actions[turn % len(actions)]("%d-%d" % (number, turn))
            except Exception as problem:
                self.problems.append(repr(problem))
                return
            with self.lock:
                self.counts[kind] = self.counts.get(kind, 0) + 1

    def expect(self, answer, kind, *statuses):
        if answer.status == 503:
            assert answer.headers["Retry-After"]
            return "refusal"
        assert answer.status in statuses, (kind, answer.status, answer.body[:500])
        return kind

    def success(self, name):
        answer = self.client.execute("y = x + 1\nprint(y)", [("x", "json/object", b"1")], build_id=name)
        return self.expect(answer, "success", 200)

    def error(self, name):
        return self.expect(self.client.execute("1 / 0", build_id=name), "error", 200)

    def crash(self, name):
        return self.expect(self.client.execute("import os; os.abort()", build_id=name), "crash", 500)

    def timeout(self, name):
        source = "import subprocess, time; subprocess.Popen(['sleep', '30']); time.sleep(30)"
        return self.expect(self.client.execute(source, timeout_seconds=0.3, build_id=name), "timeout", 408)

    def cancel(self, name):
        with in_background(lambda: self.client.execute("import time; time.sleep(30)", build_id=name)) as answer:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not self.client.cancel(name)["cancelled"]:
                with contextlib.suppress(AssertionError):
                    return self.expect(answer(0.02), "cancel", 409, 500)
            return self.expect(answer(), "cancel", 409, 500)

    def hang_up(self, name):
        body, content_type = form_of([("metadata", json.dumps(envelope("x = 1", build_id=name)).encode())])
        head = b"POST /v1/execute HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (
            content_type.encode(),
            len(body),
        )
        self.client.send((head + body)[: len(head) + hash(name) % len(body)]).close()
        return "hang-up"

    def pull(self, name):
        return self.expect(
            self.client.manifest(self.peer.manifest("y = x", [("x", "json/object", b"1")], build_id=name)), "pull", 200
        )


# ---------------------------------------------------------------------------------------
# Environments: locked ones, built once and kept
# ---------------------------------------------------------------------------------------

PROJECT = """[project]
name = "%s"
version = "0.1.0"
requires-python = ">=3.9"
dependencies = [%s]
"""


def uv_command():
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    need(found, "needs uv")
    return found


def path_with_uv():
    """PATH as a worker needs it: uv first, and this Python where `uv python find` sees it."""
    return os.pathsep.join(
        [str(Path(uv_command()).parent), str(Path(os.path.realpath(sys.executable)).parent), os.environ["PATH"]]
    )


def lock_block(folder, dependencies=("six==1.17.0",), name="notebook"):
    """The ``environment`` block of a notebook with these dependencies, locked by uv."""
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT % (name, ", ".join(map(json.dumps, dependencies))))
    done = subprocess.run(
        [uv_command(), "lock", "--quiet", "--python", sys.executable], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lockfile = (folder / "uv.lock").read_text()
    return {
        "key": strata_worker.uv_lock_key(lockfile),
        "python": "%d.%d" % sys.version_info[:2],
        "lockfile": lockfile,
        "pyproject": (folder / "pyproject.toml").read_text(),
    }


@pytest.fixture(scope="session")
def block(tmp_path_factory):
    if sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    return lock_block(tmp_path_factory.mktemp("lock") / "notebook")


@pytest.fixture
def env_worker(tmp_path):
    with WorkerProcess(
        STRATA_WORKER_ENV_ROOT=str(tmp_path / "envs"), PATH=path_with_uv(), STRATA_WORKER_ALLOW_LOCAL_HOSTS="1"
    ) as client:
        client.envs = tmp_path / "envs"
        yield client


WHERE = "import six, sys\nwhere = [sys.prefix, six.__file__]\nversion = six.__version__"


def test_a_cell_runs_in_the_locked_environment_it_brings(env_worker, block):
    assert env_worker.health()["capabilities"]["features"]["locked_environments"] is True
    bundle = env_worker.run(WHERE, environment=block, timeout_seconds=60)
    assert (
        all(path.startswith(str(env_worker.envs)) for path in bundle.json("where"))
        and bundle.json("version") == "1.17.0"
    )
    assert bundle.manifest["environment"] == {"key": block["key"], "installed": True}
    again = env_worker.run(WHERE, environment=block)
    assert again.manifest["environment"] == {"key": block["key"], "installed": False}
    assert "building environment" in env_worker.worker.log() and env_worker.worker.log().count("built environment") == 1


def test_nothing_of_the_workers_environment_leaks_into_a_locked_cell(tmp_path, block):
    leak = {
        name: str(tmp_path / name)
        for name in ("VIRTUAL_ENV", "PYTHONPATH", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON", "UV_PROJECT")
    }
    secret = {"UV_INDEX_MINE_PASSWORD": "index-secret", "PIP_EXTRA_INDEX_URL": "https://u:index-secret@x"}
    with WorkerProcess(STRATA_WORKER_ENV_ROOT=str(tmp_path / "envs"), PATH=path_with_uv(), **leak, **secret) as client:
        seen = client.run(
            "import os, sys\nseen = dict(os.environ)\npath = sys.path", environment=block, timeout_seconds=60
        )
        plain = client.run("import os\nseen = dict(os.environ)")
    assert not any(str(tmp_path / name) in seen.json("seen").values() for name in leak)
    assert str(tmp_path / "PYTHONPATH") not in seen.json("path")
    assert seen.json("seen")["VIRTUAL_ENV"].startswith(str(tmp_path / "envs"))
    for bundle in (seen, plain):
        assert "index-secret" not in str(bundle.json("seen"))


def test_one_environment_serves_notebooks_that_differ_in_their_name(tmp_path, block):
    assert lock_block(tmp_path / "other", name="another-notebook")["key"] == block["key"]
    assert lock_block(tmp_path / "more", dependencies=["six==1.16.0"])["key"] != block["key"]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"key": "0" * 64}, "not the key"),
        ({"lockfile": "not [ toml"}, "not a uv.lock"),
        ({"lockfile": "package = 7"}, "not a uv.lock"),
        ({"lockfile": None}, "lockfile is missing"),
        ({"pyproject": ""}, "pyproject is missing"),
        ({"key": None}, "key is missing"),
        ({"python": "9.99"}, "9.99"),
        ({"python": "--help"}, "environment.python"),
        ({"python": 3.13}, "environment.python"),
        ({"python": "", "pyproject": "not [ toml"}, "environment.pyproject"),
    ],
)
def test_a_lock_that_cannot_be_installed_is_500_with_the_reason(env_worker, block, change, reason):
    answer = env_worker.execute("x = 1", environment={**block, **change})
    assert answer.status == 500 and answer.json["success"] is False
    assert reason in answer.json["error"] and answer.json["error"].startswith("locked environment: ")
    assert not list(env_worker.envs.glob("*/.strata-complete")) if env_worker.envs.exists() else True


def test_a_lock_that_names_no_python_gets_one_that_the_project_allows(env_worker, block):
    """As a server sends it whose notebook never ran here."""
    pyproject = block["pyproject"].replace(">=3.9", "==%d.%d.*" % sys.version_info[:2])
    bundle = env_worker.run(
        "import sys\nversion = list(sys.version_info[:2])",
        environment={**block, "python": "", "pyproject": pyproject},
        timeout_seconds=60,
    )
    assert bundle.json("version") == list(sys.version_info[:2])


def test_a_lock_without_uv_is_500(block):
    with WorkerProcess(PATH="/nowhere") as client:
        assert client.health()["capabilities"]["features"]["locked_environments"] is False
        answer = client.execute("x = 1", environment=block)
    assert answer.status == 500 and "uv is not installed" in answer.json["error"]


def fake_uv(folder, body):
    """A uv whose ``sync`` is this shell script; everything else is the real one's."""
    folder.mkdir(exist_ok=True)
    program = folder / "uv"
    program.write_text('#!/bin/sh\nif [ "$1" = sync ]; then\n%s\nfi\nexec %s "$@"\n' % (body, uv_command()))
    program.chmod(0o755)
    return os.pathsep.join([str(folder), path_with_uv()])


def test_cells_and_workers_with_the_same_lock_build_it_once(tmp_path, block):
    path = fake_uv(tmp_path / "bin", "echo x >> %s; sleep 1" % (tmp_path / "builds"))
    env = {"STRATA_WORKER_ENV_ROOT": str(tmp_path / "envs"), "PATH": path}
    with WorkerProcess(**env) as one, WorkerProcess(**env) as two, contextlib.ExitStack() as stack:
        calls = [
            stack.enter_context(
                in_background(lambda c=client: c.execute(WHERE, environment=block, timeout_seconds=0.9))
            )
            for client in (one, one, two, two)
        ]
        bundles = [call(60).bundle for call in calls]
    assert [bundle.manifest["success"] for bundle in bundles] == [True] * 4
    assert sorted(bundle.manifest["environment"]["installed"] for bundle in bundles) == [False, False, False, True]
    assert (tmp_path / "builds").read_text() == "x\n"


def test_a_build_that_was_killed_is_never_taken_for_a_whole_one(tmp_path, block):
    path = fake_uv(
        tmp_path / "bin",
        '[ -e %s ] || { touch %s; mkdir -p "$UV_PROJECT_ENVIRONMENT/bin"; kill -9 $$; }'
        % (tmp_path / "once", tmp_path / "once"),
    )
    with WorkerProcess(STRATA_WORKER_ENV_ROOT=str(tmp_path / "envs"), PATH=path) as client:
        failed = client.execute(WHERE, environment=block)
        assert failed.status == 500 and "uv sync failed" in failed.json["error"]
        assert client.run(WHERE, environment=block, timeout_seconds=60).json("version") == "1.17.0"


def test_a_worker_that_dies_in_a_build_leaves_it_to_the_next(tmp_path, block):
    path = fake_uv(
        tmp_path / "bin",
        '[ -e %s ] || { touch %s; mkdir -p "$UV_PROJECT_ENVIRONMENT/bin"; sleep 30; }'
        % (tmp_path / "once", tmp_path / "once"),
    )
    env = {"STRATA_WORKER_ENV_ROOT": str(tmp_path / "envs"), "PATH": path}
    worker = WorkerProcess(**env)
    with worker as client, in_background(lambda: pytest.raises(OSError, client.execute, WHERE, environment=block)):
        eventually((tmp_path / "once").exists, "the build runs")
        worker.process.kill()
    with WorkerProcess(**env) as client:
        assert client.run(WHERE, environment=block, timeout_seconds=60).json("version") == "1.17.0"


def test_a_cancel_stops_a_build_and_answers_409(tmp_path, block):
    path = fake_uv(tmp_path / "bin", "touch %s; sleep 30 & wait" % (tmp_path / "runs"))
    with WorkerProcess(STRATA_WORKER_ENV_ROOT=str(tmp_path / "envs"), PATH=path) as client:
        with in_background(lambda: client.execute("x = 1", environment=block, build_id="building")) as answer:
            eventually((tmp_path / "runs").exists, "the build runs")
            assert client.cancel("building")["cancelled"]
            assert answer(5).status == 409


def test_a_build_has_its_own_limit_on_time(tmp_path, block):
    path = fake_uv(tmp_path / "bin", "sleep 30 & wait")
    with WorkerProcess(
        STRATA_WORKER_ENV_ROOT=str(tmp_path / "envs"), PATH=path, STRATA_WORKER_ENV_BUILD_SECONDS="0.5"
    ) as client:
        answer = client.execute("x = 1", environment=block)
    assert answer.status == 500 and "STRATA_WORKER_ENV_BUILD_SECONDS" in answer.json["error"]


def registry_path(key):
    found = strata_worker.describe_python(sys.executable)
    return "/%s/%s/%s" % (key, found.name, found.platform)


@pytest.fixture(scope="session")
def packed(tmp_path_factory, block):
    """The archive of a real environment made elsewhere, with a console script of its own."""
    folder = tmp_path_factory.mktemp("registry") / "made here"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "six.py").write_text("__version__ = 'from the registry'\n")
    script = folder / "bin" / "say"
    script.write_text("#!%s/bin/python\nimport six, sys; print(six.__version__, sys.prefix)\n" % folder)
    script.chmod(0o755)
    long_script = folder / "bin" / "say-long"
    long_script.write_text(
        "#!/bin/sh\n'''exec' \"%s/bin/python\" \"$0\" \"$@\"\n' '''\nimport six, sys; print(six.__version__, sys.prefix)\n"
        % folder
    )
    long_script.chmod(0o755)
    box = io.BytesIO()
    with tarfile.open(fileobj=box, mode="w:gz") as tar:
        tar.add(folder, ".")
    return box.getvalue()


def test_an_environment_is_fetched_from_the_registry_and_works_at_its_new_place(tmp_path, peer, block, packed):
    peer.blobs["/r" + registry_path(block["key"])] = packed
    env = {
        "STRATA_WORKER_ENV_ROOT": str(tmp_path / "new place"),
        "STRATA_WORKER_ENV_REGISTRY_URL": peer.url + "/r/",
        "PATH": path_with_uv(),
    }
    with WorkerProcess(**env) as client:
        source = (
            WHERE
            + "\nimport subprocess\nsaid = [subprocess.run([name], capture_output=True, text=True).stdout.split(None, 3)[:3] for name in ('say', 'say-long')]\npython = sys.executable"
        )
        bundle = client.run(source, environment=block)
    assert bundle.json("version") == "from the registry"
    assert bundle.json("said") == [["from", "the", "registry"]] * 2
    assert bundle.json("where")[0].startswith(str(tmp_path / "new place"))
    environment = next((tmp_path / "new place").glob("*/bin")).parent
    assert os.readlink(environment / "bin" / "python").startswith("/") or (environment / "bin" / "python").exists()
    assert os.path.dirname(os.path.realpath(sys.executable)) in (environment / "pyvenv.cfg").read_text()


@pytest.mark.parametrize("status, outcome", [(404, 200), (500, 500), (403, 500)])
def test_a_registry_without_it_means_a_build_and_any_other_failure_fails_the_cell(
    tmp_path, peer, block, status, outcome
):
    path = registry_path(block["key"])
    peer.faults[path] = [{"status": status, "body": b"no"}]
    peer.blobs[path] = b""
    env = {
        "STRATA_WORKER_ENV_ROOT": str(tmp_path / "envs"),
        "STRATA_WORKER_ENV_REGISTRY_URL": peer.url,
        "PATH": path_with_uv(),
    }
    with WorkerProcess(**env) as client:
        answer = client.execute(WHERE, environment=block, timeout_seconds=60)
    assert answer.status == outcome
    assert outcome == 200 or "registry answered %d" % status in answer.json["error"]


def archive_of(*members):
    """A .tar.gz of (name, type, content or link target)."""
    box = io.BytesIO()
    with tarfile.open(fileobj=box, mode="w:gz") as tar:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o755
            if kind == tarfile.REGTYPE:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                tar.addfile(info)
    return box.getvalue()


FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
HOSTILE_ARCHIVES = {
    "a path outside": [("../evil", FILE, b"x")],
    "a path through dots": [("a/../../evil", FILE, b"x")],
    "an absolute path": [("/tmp/evil", FILE, b"x")],
    "an absolute link": [("lib/evil", LINK, "/etc/passwd")],
    "an absolute link beside the interpreter's": [("bin/sh", LINK, "/bin/sh")],
    "an escaping link": [("a/evil", LINK, "../../outside")],
    "a link that comes up later": [("a/evil", LINK, "b/../../..")],
    "a file through a link": [("a", LINK, "b"), ("b", FOLDER, ""), ("a/evil", FILE, b"x")],
    "a file over a link": [("a", LINK, "b"), ("a", FILE, b"x")],
    "a folder over a link": [("a", LINK, "."), ("a", FOLDER, ""), ("a/evil", FILE, b"x")],
    "a hard link outside": [("a", HARD, "../../etc/passwd")],
    "an absolute hard link": [("a", HARD, "/etc/passwd")],
    "a hard link to a link": [("a", LINK, "b"), ("c", HARD, "a")],
    "a device": [("a", tarfile.CHRTYPE, "")],
    "a pipe": [("a", tarfile.FIFOTYPE, "")],
    "no interpreter": [("lib/x", FILE, b"x")],
}


@pytest.mark.parametrize("attack", HOSTILE_ARCHIVES)
def test_a_hostile_archive_is_refused_whole(tmp_path, peer, block, attack):
    peer.blobs[registry_path(block["key"])] = archive_of(*HOSTILE_ARCHIVES[attack])
    env = {
        "STRATA_WORKER_ENV_ROOT": str(tmp_path / "envs"),
        "STRATA_WORKER_ENV_REGISTRY_URL": peer.url,
        "PATH": path_with_uv(),
    }
    with WorkerProcess(**env) as client:
        answer = client.execute("x = 1", environment=block)
    assert answer.status == 500 and answer.json["error"].startswith("locked environment: ")
    assert not list(tmp_path.glob("**/*evil*"))
    assert not list((tmp_path / "envs").glob("*/.strata-complete"))


@pytest.mark.parametrize(
    "archive",
    [b"no gzip", archive_of(("bin/python", FILE, b"#!/bin/sh\n"))[:-20], archive_of(("big", FILE, bytes(10**6)))],
    ids=["no gzip", "cut off", "too large"],
)
def test_an_archive_that_is_broken_or_too_large_is_refused(tmp_path, peer, block, archive):
    peer.blobs[registry_path(block["key"])] = archive
    env = {
        "STRATA_WORKER_ENV_ROOT": str(tmp_path / "envs"),
        "STRATA_WORKER_ENV_REGISTRY_URL": peer.url,
        "PATH": path_with_uv(),
    }
    with WorkerProcess(STRATA_WORKER_ENV_MAX_BYTES="100000", **env) as client:
        answer = client.execute("x = 1", environment=block)
    assert answer.status == 500 and answer.json["error"].startswith("locked environment: ")
    assert not list((tmp_path / "envs").glob("*/bin"))


def test_environments_that_nobody_uses_are_removed_and_one_in_use_is_not(tmp_path, block):
    root = tmp_path / "envs"
    for name, days in (("old", 40), ("used", 40), ("new", 1)):
        (root / name).mkdir(parents=True)
        (root / name / ".strata-complete").touch()
        (root / (name + ".lock")).touch()
        os.utime(root / name / ".strata-complete", (time.time() - days * 86400,) * 2)
    settings = strata_worker.Settings(env_root=str(root))
    environments = strata_worker.Environments(settings, None, None)
    with contextlib.closing(strata_worker.FileLock(root / "used.lock")) as lock:
        assert lock.try_acquire(shared=True)
        environments.sweep()
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["new", "used"]


def test_print_env_path_names_the_interpreter_and_the_platform():
    import platform
    import sysconfig

    done = run_command("--print-env-path", sys.executable)
    assert done.stdout.strip() == "cpython-%s%s/%s" % (
        platform.python_version(),
        sys.abiflags,
        sysconfig.get_platform(),
    )


@needs_fork_server
def test_a_locked_cell_is_forked_once_its_fork_server_is_there(env_worker, block):
    env_worker.run(WHERE, environment=block, timeout_seconds=60)
    servers = eventually(
        lambda: [c for _, c in processes_of(env_worker.worker.process.pid) if c and str(env_worker.envs) in c[0]],
        "a fork server",
    )
    assert "--fork-server" in servers[0]
    assert env_worker.run(WHERE, environment=block).json("version") == "1.17.0"


# ---------------------------------------------------------------------------------------
# Output folders: what comes back of a folder, whatever its cell put there
# ---------------------------------------------------------------------------------------


def folders_of(bundle):
    """``{"name/path": bytes}`` of a bundle, whose manifest has to agree with its members."""
    listed = {
        "%s/%s" % (name, path): size
        for name, files in bundle.manifest["output_dirs"].items()
        for path, size in files.items()
    }
    members = {name[len("dirs/") :]: data for name, data in bundle.files.items() if name.startswith("dirs/")}
    assert listed == {name: len(data) for name, data in members.items()}
    return members


@pytest.mark.parametrize(
    "source, names",
    [
        ("# @output_dir plots\nx = 1", ["plots"]),
        ("#@OUTPUT_DIR plots\n\n  # a comment\n# @output_dir  models  \nx = 1", ["plots", "models"]),
        ("# @output_dir a\n# @output_dir a", ["a"]),
        ("# @output_dir größe", ["größe"]),
        ("x = 1\n# @output_dir late", []),
        ("# @output_dir ../evil\n# @output_dir a b\n# @output_dir\n# @output_dirs x\n## @output_dir y", []),
        ('"""\n# @output_dir in_text\n"""', []),
        ("", []),
    ],
)
def test_output_folders_are_named_by_the_comments_before_the_first_statement(source, names):
    assert output_dir_names(source) == names


def test_an_output_folder_comes_back_with_its_files_and_without_one_the_manifest_says_so(worker):
    bundle = worker.run(
        "# @output_dir plots\n# @output_dir empty\n(plots / 'a b').mkdir()\n(plots / 'a b' / 'ž.txt').write_text('deep')\n"
        "(plots / 'top').write_bytes(b'')\nassert not list(empty.iterdir())"
    )
    assert folders_of(bundle) == {"plots/a b/ž.txt": b"deep", "plots/top": b""}
    assert bundle.manifest["output_dirs"]["empty"] == {}
    assert "output_dirs_streamed" not in bundle.manifest
    assert worker.run("x = 1").manifest["output_dirs"] == {}


def test_an_output_folder_comes_back_when_the_cell_raises(worker):
    bundle = worker.execute("# @output_dir logs\n(logs / 'l').write_text('so far')\nraise ValueError('x')").bundle
    assert not bundle.manifest["success"] and folders_of(bundle) == {"logs/l": b"so far"}


HOSTILE_FOLDERS = """# @output_dir out
import os, socket
(out / 'fine').write_text('yes')
os.symlink('/etc/passwd', out / 'link')
os.symlink('/etc', out / 'folder_link')
os.mkfifo(out / 'pipe')
os.chdir(out)
socket.socket(socket.AF_UNIX).bind('socket')
open(b'bad\\xff', 'w').close()
os.link('fine', 'twin')
for _ in range(150):
    os.mkdir('d')
    os.chdir('d')
open('deepest', 'w').close()
"""


def test_only_regular_files_come_back_and_what_is_left_out_is_said(worker):
    bundle = worker.run(HOSTILE_FOLDERS)
    assert folders_of(bundle) == {"out/fine": b"yes", "out/twin": b"yes"}
    for name in ("'link'", "'folder_link'", "'pipe'", "'socket'", r"'bad\\udcff'", "too deep"):
        assert name in bundle.stderr, name
    assert "root:" not in str(bundle.files)


@pytest.mark.parametrize(
    "swap",
    [
        "os.rmdir(out); os.symlink('/etc', out)",
        "os.rename(out.parent, out.parent.parent / 'x'); os.symlink('/', out.parent)",
    ],
)
def test_a_folder_that_became_a_link_is_not_followed(worker, swap):
    bundle = worker.run("# @output_dir out\nimport os\n" + swap)
    assert folders_of(bundle) == {} and "no folder any more" in bundle.stderr


def test_links_swapped_in_during_the_walk_are_never_followed(tmp_path):
    """One thread swaps a folder and a link to a folder with a secret, another walks."""
    (tmp_path / "dirs/out/inner").mkdir(parents=True)
    (tmp_path / "dirs/out/inner/file").write_text("mine")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/file").write_text("theirs, longer")
    stop = threading.Event()

    def swap():
        inner, aside = tmp_path / "dirs/out/inner", tmp_path / "aside"
        while not stop.is_set():
            os.rename(inner, aside)
            os.symlink(tmp_path / "secret", inner)
            os.unlink(inner)
            os.rename(aside, inner)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(2000):
            for _, status in strata_worker.regular_files(str(tmp_path), "dirs/out"):
                assert status.st_size == 4
            with contextlib.suppress(OSError):
                os.close(strata_worker.open_below(str(tmp_path), "dirs/out/inner/file", os.O_RDONLY))
    finally:
        stop.set()
        thread.join()


# ---------------------------------------------------------------------------------------
# Folder inputs: tars, honest and hostile
# ---------------------------------------------------------------------------------------


def tar_of(*members):
    """A tar of (name, bytes or TarInfo changes)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                vars_of = dict(content)
                for key, value in vars_of.items():
                    setattr(info, key, value)
                tar.addfile(info)
    return file.getvalue()


def test_a_folder_input_is_a_path_to_its_files(worker, peer_worker):
    data = tar_of(("a/b.txt", b"hello"), ("a/c.sh", b"x"), ("top", b""))
    source = "seen = [sorted(str(p.relative_to(plots)) for p in plots.rglob('*')), (plots / 'a/b.txt').read_text(), plots.is_absolute(), plots.name]"
    expected = [["a", "a/b.txt", "a/c.sh", "top"], "hello", True, "plots.dir"]
    assert worker.run(source, [("plots", "dir/tar", data)]).json("seen") == expected
    client, peer = peer_worker
    assert client.manifest(peer.manifest(source, [("plots", "dir/tar", data)])).status == 200
    assert peer.bundle().json("seen") == expected


def test_an_empty_folder_input_is_an_empty_folder(worker):
    assert worker.run("seen = list(plots.iterdir())", [("plots", "dir/tar", tar_of())]).json("seen") == []


EVIL_TARS = {
    "parent": tar_of(("../evil", b"x")),
    "inner parent": tar_of(("a/../../evil", b"x")),
    "absolute": tar_of(("/tmp/evil", b"x")),
    "symlink": tar_of(("l", {"type": tarfile.SYMTYPE, "linkname": "/etc"}), ("l/passwd", b"x")),
    "hard link": tar_of(("l", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})),
    "device": tar_of(("d", {"type": tarfile.CHRTYPE, "devmajor": 1})),
    "pipe": tar_of(("p", {"type": tarfile.FIFOTYPE})),
    "twice": tar_of(("a", b"x"), ("a", b"y")),
    "file and folder": tar_of(("a", b"x"), ("a/b", b"y")),
    "deep": tar_of(("a/" * 500 + "b", b"x")),
    "no tar": b"just text" * 100,
    "nothing": b"",
    "cut": tar_of(("a", bytes(5000)))[:2000],
    "compressed": __import__("gzip").compress(tar_of(("a", b"x"))),
}


@pytest.mark.parametrize("name", EVIL_TARS)
def test_a_tar_that_is_no_folder_is_refused_with_the_inputs_name(worker, name):
    answer = worker.execute("x = 1", [("plots", "dir/tar", EVIL_TARS[name])])
    assert answer.status == 400 and "'plots'" in answer.json["detail"], answer.body
    assert not Path("/tmp/evil").exists()


def test_a_sparse_member_cannot_make_more_of_itself(tmp_path):
    info = tarfile.TarInfo("bomb")
    info.size, info.type = 512, tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:410] = b"%011o\0%011o\0" % (0, 512)  # one piece, and then
    block[483:495] = b"%011o\0" % 2**33  # 8 GiB of nothing
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:512]))
    (tmp_path / "t.tar").write_bytes(bytes(block) + bytes(512) + bytes(1024))
    with pytest.raises(ValueError, match="bomb"):
        unpack_folder(tmp_path / "t.tar", tmp_path / "out", lambda: None)


def test_a_negative_size_does_not_turn_in_circles(tmp_path):
    info = tarfile.TarInfo("a")
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 4 + struct.pack(">q", -512)
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:512]))
    first = tarfile.TarInfo("first").tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "t.tar").write_bytes(first + bytes(block) + bytes(1024))
    with pytest.raises(ValueError):
        unpack_folder(tmp_path / "t.tar", tmp_path / "out", lambda: None)


# ---------------------------------------------------------------------------------------
# Streaming: files that are posted while their cell runs
# ---------------------------------------------------------------------------------------


class FolderPeer(Peer):
    """Takes output files: 201, but for what ``answers`` says of a path, one answer after another."""

    def __init__(self):
        super().__init__()
        self.answers = {}

    def respond(self, handler, path, fault):
        if path == "/output-file":
            fields = dict(urllib.parse.parse_qsl(handler.path.partition("?")[2]))
            answers = self.answers.get(fields["path"], [201])
            fault = {"status": answers.pop(0) if len(answers) > 1 else answers[0]}
        super().respond(handler, path, fault)

    def posts(self):
        """(folder, path, body) in the order of their arrival."""
        found = []
        for _, path, _, body in list(self.requests):
            if path.startswith("/output-file"):
                fields = dict(urllib.parse.parse_qsl(path.partition("?")[2]))
                assert fields["signature"] == "s3cret"
                found.append((fields["folder"], fields["path"], body))
        return found

    def streamed(self, source, **changes):
        return self.manifest(source, output_file_url=self.url + "/output-file?signature=s3cret", **changes)


@pytest.fixture(scope="session")
def streaming_worker():
    with WorkerProcess(STRATA_WORKER_ALLOW_LOCAL_HOSTS="1", STRATA_WORKER_OUTPUT_DIR_POLL_SECONDS="0.1") as client:
        yield client


@pytest.fixture
def peer_worker(streaming_worker):
    with contextlib.closing(FolderPeer()) as peer:
        yield streaming_worker, peer


WAIT_FOR = "import time\nuntil = time.monotonic() + 20\nwhile not %s and time.monotonic() < until: time.sleep(0.02)\n"


def run_streamed(peer_worker, source, tmp_path, meanwhile=lambda: None, **changes):
    """Run a cell that waits for the file ``go``, which appears when ``meanwhile`` is over."""
    client, peer = peer_worker
    answers = []
    go = WAIT_FOR % ("__import__('os').path.exists(%r)" % str(tmp_path / "go"))
    thread = threading.Thread(
        target=lambda: answers.append(client.manifest(peer.streamed(source.replace("WAIT\n", go), **changes)))
    )
    thread.start()
    try:
        meanwhile()
    finally:
        (tmp_path / "go").touch()
        thread.join()
    assert answers[0].status == 200, answers[0].body
    return peer.bundle()


def test_a_settled_file_is_posted_while_the_cell_runs_and_left_out_of_the_bundle(peer_worker, tmp_path):
    _, peer = peer_worker
    source = "# @output_dir out\n(out / 's').mkdir()\n(out / 's' / 'ü &.txt').write_text('early')\nWAIT\n(out / 'late').write_text('late')"
    bundle = run_streamed(peer_worker, source, tmp_path, lambda: eventually(peer.posts, "the file is posted", 20))
    assert peer.posts() == [("out", "s/ü &.txt", b"early"), ("out", "late", b"late")]
    assert bundle.manifest["output_dirs_streamed"] == {"out": ["late", "s/ü &.txt"]}
    assert bundle.manifest["output_dirs"] == {"out": {}} and folders_of(bundle) == {}


def test_a_file_that_changes_after_it_was_posted_is_posted_again_even_with_its_old_mtime(peer_worker, tmp_path):
    _, peer = peer_worker
    source = (
        "# @output_dir out\nimport os\n(out / 'f').write_text('one')\nold = os.stat(out / 'f')\nWAIT\n"
        "(out / 'f').write_text('two')\nos.utime(out / 'f', ns=(old.st_atime_ns, old.st_mtime_ns))"
    )
    bundle = run_streamed(peer_worker, source, tmp_path, lambda: eventually(peer.posts, "the file is posted", 20))
    assert [body for _, _, body in peer.posts()] == [b"one", b"two"]
    assert bundle.manifest["output_dirs_streamed"] == {"out": ["f"]}


def test_what_the_server_refuses_goes_in_the_bundle_and_what_fails_is_tried_again(peer_worker, tmp_path):
    _, peer = peer_worker
    peer.answers = {"refused": [413], "flaky": [500, 429, 201]}
    source = "# @output_dir out\n(out / 'refused').write_text('r')\n(out / 'flaky').write_text('f')\nWAIT\nraise ValueError('too')"
    bundle = run_streamed(
        peer_worker, source, tmp_path, lambda: eventually(lambda: len(peer.posts()) >= 4, "four posts", 20)
    )
    assert sorted(path for _, path, _ in peer.posts()) == ["flaky"] * 3 + ["refused"]
    assert bundle.manifest["output_dirs_streamed"] == {"out": ["flaky"]} and folders_of(bundle) == {"out/refused": b"r"}


def test_a_file_that_is_gone_at_the_end_is_in_neither_list(peer_worker, tmp_path):
    _, peer = peer_worker
    source = "# @output_dir out\n(out / 'f').write_text('x')\nWAIT\n(out / 'f').unlink()"
    bundle = run_streamed(peer_worker, source, tmp_path, lambda: eventually(peer.posts, "the file is posted", 20))
    assert bundle.manifest["output_dirs_streamed"] == {"out": []} and folders_of(bundle) == {}


def test_a_server_that_takes_no_file_costs_the_run_nothing(peer_worker, tmp_path):
    _, peer = peer_worker
    peer.answers = {str(number): [503] for number in range(50)}
    bundle = run_streamed(
        peer_worker, "# @output_dir out\nfor n in range(50): (out / str(n)).write_text('x')", tmp_path
    )
    assert len(folders_of(bundle)) == 50 and len(peer.posts()) < 50


def test_a_cell_without_output_folders_streams_nothing(peer_worker):
    client, peer = peer_worker
    assert client.manifest(peer.streamed("x = 1")).status == 200
    assert "output_dirs_streamed" not in peer.bundle().manifest and not peer.posts()


def test_the_output_file_url_is_judged_like_every_other(worker):
    with contextlib.closing(FolderPeer()) as peer:
        manifest = {**peer.manifest("x = 1"), "output_file_url": "http://169.254.169.254/"}
        for key in ("output", "finalize_url"):
            manifest[key] = json.loads(json.dumps(manifest[key]).replace(peer.url, "https://1.1.1.1"))
        answer = worker.manifest(manifest)
    assert answer.status == 400 and "output_file_url" in answer.json["detail"]


# ---------------------------------------------------------------------------------------
# Options: fsspec's names translated, credentials, secrets kept
# ---------------------------------------------------------------------------------------


def test_health_says_what_of_folders_and_mounts_is_served(worker):
    features = worker.health()["capabilities"]["features"]
    assert features["output_dirs"] is features["folder_inputs"] is features["mount_cache_probe"] is True


@pytest.mark.parametrize(
    "scheme, options, arguments",
    [
        ("s3", {}, {}),
        ("s3", {"anon": True}, {"anonymous": True}),
        ("s3", {"anon": True, "key": "k", "secret": "s"}, {"anonymous": True}),
        ("s3", {"key": "k", "secret": "s", "token": "t"}, {"access_key": "k", "secret_key": "s", "session_token": "t"}),
        (
            "s3",
            {"endpoint_url": "http://h:9000/", "profile": "p"},
            {"scheme": "http", "endpoint_override": "h:9000", "profile": "p"},
        ),
        (
            "s3",
            {
                "client_kwargs": {
                    "region_name": "eu-west-1",
                    "endpoint_url": "https://h",
                    "verify": "/ca.pem",
                    "aws_access_key_id": "k",
                }
            },
            {
                "region": "eu-west-1",
                "scheme": "https",
                "endpoint_override": "h",
                "tls_ca_file_path": "/ca.pem",
                "access_key": "k",
            },
        ),
        (
            "s3",
            {"use_ssl": False, "endpoint_url": "https://h", "client_kwargs": None},
            {"scheme": "https", "endpoint_override": "h"},
        ),
        ("s3", {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {"force_virtual_addressing": True}),
        ("gs", {"token": "anon", "project": "p"}, {"anonymous": True, "project_id": "p"}),
        ("gs", {"token": "google_default"}, {}),
        ("gs", {"token": "/key.json"}, {"token_file": "/key.json"}),
        ("gs", {"token": {"type": "service_account"}}, {"token_info": {"type": "service_account"}}),
        (
            "gs",
            {"token": "ya29.x", "endpoint_url": "http://h:1"},
            {"access_token": "ya29.x", "scheme": "http", "endpoint_override": "h:1"},
        ),
        (
            "az",
            {"account_name": "a", "account_key": "k"},
            {"account_name": "a", "account_key": "k", "anonymous": False},
        ),
        ("az", {"account_name": "a"}, {"account_name": "a", "anonymous": True}),
        ("az", {"account_name": "a", "anon": False}, {"account_name": "a", "anonymous": False}),
        (
            "az",
            {"account_name": "a", "anon": True, "sas_token": "?sv=1"},
            {"account_name": "a", "sas_token": "sv=1", "anonymous": False},
        ),
        (
            "az",
            {"account_name": "a", "tenant_id": "t", "client_id": "c", "client_secret": "s"},
            {"account_name": "a", "tenant_id": "t", "client_id": "c", "client_secret": "s", "anonymous": False},
        ),
        (
            "az",
            {
                "connection_string": "AccountName=a;AccountKey=k==;BlobEndpoint=http://127.0.0.1:1/a;QueueEndpoint=http://127.0.0.1:2/a"
            },
            {
                "account_name": "a",
                "account_key": "k==",
                "anonymous": False,
                "blob_storage_authority": "127.0.0.1:1",
                "dfs_storage_authority": "127.0.0.1:1",
                "blob_storage_scheme": "http",
                "dfs_storage_scheme": "http",
            },
        ),
        (
            "az",
            {
                "connection_string": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k;EndpointSuffix=core.chinacloudapi.cn"
            },
            {
                "account_name": "a",
                "account_key": "k",
                "anonymous": False,
                "blob_storage_authority": ".blob.core.chinacloudapi.cn",
                "dfs_storage_authority": ".dfs.core.chinacloudapi.cn",
                "blob_storage_scheme": "https",
                "dfs_storage_scheme": "https",
            },
        ),
    ],
)
def test_fsspec_options_are_said_as_pyarrow_says_them(scheme, options, arguments):
    assert store_arguments(scheme, options) == arguments


@pytest.mark.parametrize(
    "scheme, options, named",
    [
        ("s3", {"requester_pays": True}, "'requester_pays'"),
        ("s3", {"client_kwargs": {"verify": False}}, "'client_kwargs.verify'"),
        ("s3", {"client_kwargs": {"config": {}}}, "'client_kwargs.config'"),
        ("s3", {"client_kwargs": []}, "'client_kwargs'"),
        ("s3", {"config_kwargs": {"s3": {"addressing_style": "s3cret"}}}, "addressing_style"),
        ("s3", {"key": 5}, "'key'"),
        ("s3", {"anon": "s3cret"}, "'anon'"),
        ("s3", {"endpoint_url": "ftp://s3cret"}, "'endpoint_url'"),
        ("s3", {"endpoint_url": "http://u:s3cret@h"}, "'endpoint_url'"),
        ("gs", {"token": "browser"}, "'token'"),
        ("gs", {"requester_pays": "p"}, "'requester_pays'"),
        ("az", {"account_key": "s3cret"}, "'account_name'"),
        ("az", {"connection_string": "s3cret=="}, "'connection_string'"),
        ("az", {"account_name": "a", "endpoint_url": "https://other.example"}, "endpoint"),
        ("az", {"account_name": "a", "credential": "s3cret"}, "'credential'"),
    ],
)
def test_an_option_without_a_counterpart_is_refused_by_name_and_without_its_value(scheme, options, named):
    with pytest.raises(OptionError, match=re.escape(named)) as refusal:
        store_arguments(scheme, options)
    assert "s3cret" not in str(refusal.value)


def mounted(uri="s3://bucket/p", name="data", **more):
    return {"name": name, "uri": uri, "mode": "ro", "pin": None, "options": {}, "credential": None, **more}


@pytest.mark.parametrize(
    "mount, why",
    [
        (mounted("file:///etc"), "file://"),
        (mounted("/etc"), "file://"),
        (mounted("ftp://h/x"), "schemes"),
        (mounted("s3://"), "bucket/prefix"),
        (mounted("s3://key:s3cret@bucket/p"), "bucket/prefix"),
        (mounted("az://c/p?sig=s3cret"), "bucket/prefix"),
        (mounted("s3://bucket/../other"), "bucket/prefix"),
        (mounted(name="not a name"), "name"),
        (mounted(name="../evil"), "name"),
        (mounted(mode="wo"), "mode"),
        (mounted(options={"requester_pays": True}), "requester_pays"),
        (mounted(credential="nowhere"), "'nowhere' is not defined"),
    ],
)
def test_a_mount_that_cannot_be_served_is_a_400_that_says_why(worker, mount, why):
    answer = worker.execute("x = 1", mounts=[mount])
    assert answer.status == 400 and why in answer.json["detail"] and "s3cret" not in answer.json["detail"]


def test_a_refused_mount_downloads_no_input(peer_worker):
    client, peer = peer_worker
    manifest = peer.manifest("x = 1", [("x", "json/object", b"1")], params={"mounts": [mounted(options={"nope": 1})]})
    assert client.manifest(manifest).status == 400 and not peer.requests


def settings(**environ):
    return Settings.load(
        {name.upper(): value if isinstance(value, str) else json.dumps(value) for name, value in environ.items()}
    )


def arguments_of(loaded, **mount):
    return Store(loaded, Mount("m", "s3://b/p", mount.pop("scheme", "s3"), "b/p", **mount)).arguments


def test_credentials_come_by_name_over_those_of_the_scheme_and_under_the_mounts_own_options(tmp_path):
    (tmp_path / "secret").write_text("first\n")
    loaded = settings(
        strata_notebook_credentials={
            "org": {"key": "org", "secret": "${file:%s}" % (tmp_path / "secret"), "endpoint_url": "http://org"},
            "lab": {"key": "${LAB_KEY}", "client_kwargs": {"region_name": "${LAB_REGION}"}},
        },
        strata_notebook_mount_credentials={"s3": "org"},
        lab_key="lab",
        lab_region="eu-1",
    )
    assert arguments_of(loaded) == {
        "access_key": "org",
        "secret_key": "first",
        "scheme": "http",
        "endpoint_override": "org",
    }
    (tmp_path / "secret").write_text("second")
    assert arguments_of(loaded, credential="lab", options={"endpoint_url": "http://mine"}) == {
        "access_key": "lab",
        "secret_key": "second",
        "region": "eu-1",
        "scheme": "http",
        "endpoint_override": "mine",
    }
    assert arguments_of(
        settings(strata_notebook_mount_credentials={"gcs": "x"}, strata_notebook_credentials={"x": {"project": "p"}}),
        scheme="gs",
    ) == {"project_id": "p"}


@pytest.mark.parametrize(
    "value, named", [("${UNSET}", "UNSET"), ("${file:relative}", "absolute"), ("${file:/no/such}", "cannot be read")]
)
def test_a_credential_that_cannot_be_made_out_is_named(value, named):
    with pytest.raises(WorkerError, match="'lab'.*" + named) as refusal:
        arguments_of(
            settings(strata_notebook_credentials={"lab": {"key": value, "secret": "s3cret"}}), credential="lab"
        )
    assert refusal.value.status == 500 and "s3cret" not in refusal.value.message


def test_a_notebook_cannot_say_where_a_credential_that_is_sent_as_it_is_goes_to():
    loaded = settings(
        strata_notebook_credentials={"lab": {"account_name": "a", "sas_token": "sig=s3cret", "token": "t"}}
    )
    for scheme in ("az", "gs"):
        with pytest.raises(WorkerError, match="endpoint_url"):
            arguments_of(loaded, scheme=scheme, credential="lab", options={"endpoint_url": "http://evil/a"})


def test_an_error_never_quotes_a_secret_in_any_of_its_forms():
    loaded = settings(strata_notebook_credentials={"lab": {"account_name": "a", "sas_token": "sv=1&sig=a%2Fb%2Bc"}})
    store = Store(loaded, Mount("m", "az://b/p", "az", "b/p", credential="lab"))
    shown = store.failure("GET https://a/?sv=1&sig=a%2Fb%2Bc and sig=a/b+c and a%2Fb%2Bc").message
    assert "b+c" not in shown and "2Bc" not in shown and "'m'" in shown


def test_a_cell_sees_no_variable_that_a_credential_is_made_of():
    env = {"STRATA_NOTEBOOK_CREDENTIALS": '{"lab": {"key": "${LAB_KEY}"}}', "LAB_KEY": "s3cret"}
    with WorkerProcess(**env) as client:
        assert "s3cret" not in str(client.run("import os\nseen = dict(os.environ)").json("seen"))


@pytest.mark.parametrize(
    "name, value",
    [
        ("STRATA_NOTEBOOK_CREDENTIALS", "s3cret"),
        ("STRATA_NOTEBOOK_CREDENTIALS", '{"a": "s3cret"}'),
        ("STRATA_NOTEBOOK_MOUNT_CREDENTIALS", '{"ftp": "s3cret"}'),
        ("STRATA_NOTEBOOK_MOUNT_CACHE_MAX_BYTES", "-1"),
    ],
)
def test_a_bad_setting_is_named_and_a_secret_one_not_shown(name, value):
    with pytest.raises(ValueError, match=name) as refusal:
        Settings.load({name: value})
    assert "s3cret" not in str(refusal.value)


# ---------------------------------------------------------------------------------------
# Cache: what is kept of a mount, and what is believed
# ---------------------------------------------------------------------------------------

HOUR = 3600 * 10**9


class Kept:
    """A cache with one object, and a way to ask for it."""

    def __init__(self, folder, age=2 * HOUR):
        self.folder, self.cache = folder, MountCache(folder / "cache", 0, 0)
        self.now = time.time_ns()
        self.info = types.SimpleNamespace(path="bucket/a", size=5, mtime_ns=self.now - age)
        self.keep(b"hello", "v1")

    def keep(self, data, version):
        (self.folder / "fetched").write_bytes(data)
        with open(self.folder / "fetched", "r+b") as file:
            self.cache.keep("scope", self.info, version, file.fileno(), self.now / 1e9)

    def get(self, version="v1", scope="scope"):
        self.asked = []

        def ask(path):
            self.asked.append(path)
            return version

        with open(self.folder / "target", "w+b") as target:
            return (
                target.read()
                if self.cache.copy(scope, self.info, target.fileno(), ask) and not target.seek(0)
                else None
            )

    @property
    def data(self):
        return self.cache.places("scope", "bucket/a")[0]


@pytest.fixture
def kept(tmp_path):
    return Kept(tmp_path)


def test_an_old_object_is_known_by_size_and_time_alone(kept):
    assert kept.get() == b"hello" and kept.asked == []


@pytest.mark.parametrize("change", [{"size": 6}, {"mtime_ns": 1}, {"path": "bucket/b"}])
def test_another_size_time_or_path_is_another_object(kept, change):
    vars(kept.info).update(change)
    assert kept.get() is None


def test_who_reaches_the_store_otherwise_gets_nothing(kept):
    assert kept.get(scope="other") is None


def test_a_fresh_object_is_asked_for_its_version_until_it_is_old(tmp_path, monkeypatch):
    kept = Kept(tmp_path, age=0)
    assert kept.get("v1") == b"hello" and kept.asked == ["bucket/a"]
    assert kept.get("v2") is None
    later = time.time() + 3600
    monkeypatch.setattr(strata_worker.time, "time", lambda: later)
    assert kept.get("v1") == b"hello" and kept.asked == ["bucket/a"]
    assert kept.get("v2") == b"hello" and kept.asked == []


def test_what_a_cell_writes_to_its_copy_is_not_in_the_cache(kept):
    kept.get()
    (kept.folder / "target").write_bytes(b"evil!")
    assert kept.get() == b"hello"
    assert os.stat(kept.data).st_nlink == 1


def rewrite(kept):
    status = os.stat(kept.data)
    kept.data.write_bytes(b"evil!")
    os.utime(kept.data, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap(kept):
    kept.data.with_name("x").write_bytes(b"evil!")
    os.replace(kept.data.with_name("x"), kept.data)


def forge(kept):
    rewrite(kept)
    status = os.stat(kept.data)
    note = kept.data.with_suffix(".json")
    fields = json.loads(note.read_text())
    fields["identity"] = [status.st_ino, status.st_size, status.st_ctime_ns]
    note.write_text(json.dumps(fields))


def link(kept):
    kept.data.unlink()
    kept.data.symlink_to("/etc/passwd")


def pipe(kept):
    kept.data.with_suffix(".json").unlink()
    os.mkfifo(kept.data.with_suffix(".json"))


def junk(kept):
    kept.data.with_suffix(".json").write_text('["no record"]')


@pytest.mark.parametrize("attack", [rewrite, swap, forge, link, pipe, junk])
def test_a_cell_that_tampers_with_the_cache_only_empties_it(kept, attack):
    attack(kept)
    assert kept.get() is None


def test_a_cache_that_cannot_be_written_fails_nothing(tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert Kept(tmp_path).get() is None


def test_the_sweep_takes_the_longest_unused_until_the_rest_fits_and_what_is_idle(kept):
    for number in range(4):
        kept.info = types.SimpleNamespace(path="bucket/%d" % number, size=5, mtime_ns=1)
        kept.keep(b"12345", "v")
        note = kept.cache.places("scope", kept.info.path)[1]
        os.utime(note, (time.time() - number * 86400,) * 2)
    kept.cache.max_bytes = 15
    kept.cache.sweep()
    assert [
        bool(kept.cache.record("scope", path)) for path in ("bucket/a", "bucket/0", "bucket/1", "bucket/2", "bucket/3")
    ] == [True, True, True, False, False]
    kept.cache.max_bytes, kept.cache.max_idle_days = 0, 0.5
    kept.cache.sweep()
    assert kept.cache.record("scope", "bucket/1") is None and kept.cache.record("scope", "bucket/0")
    assert len(list(kept.cache.root.glob("*/*"))) == 4


# ---------------------------------------------------------------------------------------
# Harness: what one cell gets, does and gives back
# ---------------------------------------------------------------------------------------

HARNESS = pathlib.Path(__file__).with_name("harness.py")


# --------------------------------------------------------------------------------------------
# Running a cell
# --------------------------------------------------------------------------------------------


class Ran:
    """A cell that was run: its result, its files and its console."""

    def __init__(self, folder: pathlib.Path, code: int):
        self.folder = folder
        self.code = code
        self.outputs = folder / "outputs"
        self.stdout, self.stderr = (
            path.read_text(errors="replace") if path.exists() else ""  # a cell can delete them
            for path in (folder / "stdout", folder / "stderr")
        )
        result = folder / "result.json"
        self.result = json.loads(result.read_text(), parse_constant=refuse) if result.exists() else {}
        self.error = self.result.get("error")
        self.traceback = self.result.get("traceback")
        self.variables = self.result.get("variables")
        self.displays = self.result.get("displays")
        self.warnings = self.result.get("mutation_warnings")

    def input(self, name: str, **more) -> dict:
        """The variable *name* as the spec of another cell's input."""
        entry = self.variables[name]
        return {"content_type": entry["content_type"], "file": self.outputs / entry["file"], **more}

    def inputs(self, *names: str) -> dict:
        return {name: self.input(name) for name in names}


def refuse(constant: str):
    raise ValueError(f"{constant} in result.json")


class Runner:
    """Runs cells, each in a new folder: `run_cell(source, inputs={...}, tables={...}, ...)`."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.count = 0

    def __call__(self, source, inputs=None, env=None, code=0, python_options=(), **manifest) -> Ran:
        folder = self.new_folder()
        manifest["source"] = textwrap.dedent(source)
        manifest["inputs"] = {name: staged(spec, folder) for name, spec in (inputs or {}).items()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        ran = Ran(folder, spawn(folder, {**os.environ, **(env or {})}, python_options))
        print(ran.traceback or "", ran.stderr)
        assert ran.code == code
        return ran

    def new_folder(self) -> pathlib.Path:
        self.count += 1
        folder = self.root / f"run{self.count}"
        for name in ("inputs", "outputs", "work"):
            (folder / name).mkdir(parents=True)
        return folder


@pytest.fixture
def run_cell(tmp_path):
    return Runner(tmp_path)


def staged(spec: dict, folder: pathlib.Path) -> dict:
    """The spec with its file, and those of what is injected, copied into the run's folder."""
    spec = dict(spec)
    source = pathlib.Path(spec["file"])
    if source.is_dir():
        shutil.copytree(source, folder / "inputs" / source.name)
    elif source.exists():
        shutil.copy(source, folder / "inputs" / source.name)
    spec["file"] = f"inputs/{source.name}"
    injected = spec.get("injected")
    if injected:
        spec["injected"] = {name: staged(inner, folder) for name, inner in injected.items()}
    return spec


def spawn(folder: pathlib.Path, env: dict, python_options) -> int:
    command = [sys.executable, *python_options, str(HARNESS), str(folder / "manifest.json")]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = [os.open(folder / name, flags, 0o600) for name in ("stdout", "stderr")]
    try:
        return subprocess.run(command, stdout=streams[0], stderr=streams[1], env=env, timeout=60).returncode
    finally:
        for stream in streams:
            os.close(stream)


@pytest.fixture
def input_file(tmp_path):
    """Write an input's file: `input_file("json/object", "x.json", b"1")` is its spec."""

    def give(content_type: str, name: str, content: bytes, **more) -> dict:
        path = tmp_path / name
        path.write_bytes(content)
        return {"content_type": content_type, "file": path, **more}

    return give


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def needs(*modules: str):
    """Skip the test, saying why, unless the *modules* are installed."""
    missing = [name for name in modules if not is_installed(name)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def formats(ran: Ran) -> dict:
    return {name: entry.get("content_type") for name, entry in ran.variables.items()}


# --------------------------------------------------------------------------------------------
# Which variables come back, and the result
# --------------------------------------------------------------------------------------------


def test_a_cell_gives_back_every_name_it_bound(run_cell):
    ran = run_cell("x = 1\ny = 'two'\n_hidden = 3")
    assert ran.result["success"] is True
    assert ran.variables == {
        "x": {"content_type": "json/object", "file": "x.json", "bytes": 1, "preview": 1},
        "y": {"content_type": "json/object", "file": "y.json", "bytes": 5, "preview": "two"},
    }
    assert (ran.outputs / "y.json").read_text() == '"two"'


def test_the_result_says_which_interpreter_ran_the_cell(run_cell):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    expected = f"{sys.implementation.name}-{version}-{sys.platform}-{os.uname().machine}"
    assert run_cell("").result["build_env"] == expected


def test_an_empty_cell_gives_back_nothing(run_cell):
    result = run_cell("# nothing").result
    assert (result["variables"], result["displays"], result["mutation_warnings"]) == ({}, [], [])
    assert (result["error"], result["traceback"]) == (None, None)


def test_an_input_comes_back_only_when_rebound(run_cell):
    made = run_cell("a = [1]\nb = [2]")
    ran = run_cell("a = a + b", made.inputs("a", "b"))
    assert ran.variables["a"]["preview"] == [1, 2]
    assert "b" not in ran.variables


def test_an_input_named_in_mutation_defines_comes_back_changed(run_cell):
    made = run_cell("a = [1]")
    ran = run_cell("a.append(2)", made.inputs("a"), mutation_defines=["a", "other"])
    assert ran.variables["a"]["preview"] == [1, 2]
    assert ran.warnings == []


def test_names_with_capitals_get_a_hash_so_that_disks_keep_them_apart(run_cell):
    ran = run_cell("X = 1\nx = 2\nÉté = 3\nžluť = 4")
    files = {name: entry["file"] for name, entry in ran.variables.items()}
    assert files["X"] == "X-4b68ab38.json"
    assert files["x"] == "x.json"
    assert files["Été"].startswith("Été-")
    assert files["žluť"] == "žluť.json"


def test_names_that_are_no_file_names_are_refused_one_by_one(run_cell):
    ran = run_cell(
        """
        good = 1
        globals().update({"../up": 1, "a/b": 1, "a\\0b": 1, "..": 1, "": 1, "n" * 300: 1, 5: 1})
        globals()["\\ud800"] = 1
        """
    )
    assert ran.variables.pop("good")["preview"] == 1
    assert len(ran.variables) == 7
    assert all(set(entry) == {"error", "type"} for entry in ran.variables.values())
    assert sorted(p.name for p in ran.outputs.iterdir()) == ["good.json"]


def test_two_variables_never_share_a_file_name(run_cell):
    ran = run_cell("import math as a\nglobals()['a.module'] = 1")
    assert ran.variables["a"]["file"] == "a.module.json"
    assert "already stored" in ran.variables["a.module"]["error"]


def test_thousands_of_variables_come_back(run_cell):
    ran = run_cell("globals().update({f'v{i}': i for i in range(3_000)})")
    assert len(ran.variables) == 3_000
    assert ran.variables["v2999"]["preview"] == 2999


# --------------------------------------------------------------------------------------------
# The cell's world
# --------------------------------------------------------------------------------------------


def test_main_is_a_real_module(run_cell):
    ran = run_cell(
        """
        import __main__, dataclasses, inspect, pickle, sys, typing

        @dataclasses.dataclass
        class Point:
            x: "int"
            # a comment

        def f(): return 42  # here

        same = sys.modules["__main__"] is __main__ and __main__.Point is Point
        again = pickle.loads(pickle.dumps(Point(1))).x
        hints = str(typing.get_type_hints(Point)["x"])
        source = inspect.getsource(Point) + inspect.getsource(f)
        name = __name__
        """
    )
    previews = {name: entry["preview"] for name, entry in ran.variables.items()}
    assert previews["same"] is True and previews["again"] == 1
    assert previews["hints"] == "<class 'int'>" and previews["name"] == "__main__"
    assert "# a comment" in previews["source"] and "# here" in previews["source"]


def test_a_cell_sees_nothing_of_the_harness(run_cell):
    ran = run_cell(
        """
        import sys
        argv, path = sys.argv, sys.path[0]
        names = [n for n in globals() if not n.startswith("_")]
        try:
            import harness
        except ImportError:
            hidden = True
        """
    )
    assert ran.variables["argv"]["preview"] == [""]
    assert ran.variables["path"]["preview"] == ""
    assert ran.variables["hidden"]["preview"] is True
    assert set(ran.variables["names"]["preview"]) == {"display", "Markdown", "sys", "argv", "path"}


def test_a_cell_starts_in_its_own_empty_folder(run_cell):
    ran = run_cell("import os\nhere, content = os.getcwd(), os.listdir()")
    assert ran.variables["here"]["preview"] == str(ran.folder / "work")
    assert ran.variables["content"]["preview"] == []


def test_a_cell_imports_modules_that_it_wrote(run_cell):
    ran = run_cell("open('mine.py', 'w').write('x = 5')\nfrom mine import x")
    assert ran.variables["x"]["preview"] == 5


def test_top_level_await_and_last_expression_share_one_event_loop(run_cell):
    ran = run_cell(
        """
        import asyncio
        task = asyncio.ensure_future(asyncio.sleep(0, "slept"))
        first = await asyncio.sleep(0, "awaited")
        del asyncio
        (await task) + first
        """
    )
    assert ran.variables["_"]["preview"] == "sleptawaited"


def test_future_imports_reach_the_last_expression(run_cell):
    ran = run_cell(
        """
        from __future__ import annotations
        def f(x: nowhere): pass
        f.__annotations__["x"]
        """
    )
    assert ran.variables["_"]["preview"] == "nowhere"


def test_the_harness_passes_none_of_its_own_future_imports_on(run_cell):
    ran = run_cell("def f(x: int): pass\nf.__annotations__['x'] is int")
    assert ran.variables["_"]["preview"] is True


def test_tables_mounts_and_output_folders_are_bound(run_cell, tmp_path):
    ran = run_cell(
        """
        import pathlib
        (plots / "a.txt").write_text("made")
        kinds = [isinstance(p, pathlib.Path) and p.is_absolute() for p in (data, plots)]
        seen = [t, t_snapshot, (data / "f").read_text(), plots.name]
        """,
        tables={"t": {"uri": "file:///t", "snapshot_id": 7}},
        mounts={"data": str(tmp_path / "m")}
        if (tmp_path / "m").mkdir() is None and (tmp_path / "m" / "f").write_text("mounted")
        else {},
        output_dirs={"plots": "work"},
    )
    assert ran.variables["kinds"]["preview"] == [True, True]
    assert ran.variables["seen"]["preview"] == ["file:///t", 7, "mounted", "work"]


def test_files_and_folders_arrive_as_absolute_paths(run_cell, input_file, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "leaf").write_text("green")
    ran = run_cell(
        "seen = [raw.read_text(), (tree / 'leaf').read_text(), raw.is_absolute()]",
        {
            "raw": input_file("file/path", "raw.csv", b"a,b"),
            "tree": {"content_type": "dir/tar", "file": tmp_path / "tree"},
        },
    )
    assert ran.variables["seen"]["preview"] == ["a,b", "green", True]


def test_nothing_is_imported_that_the_cell_does_not_need(run_cell):
    ran = run_cell(
        "import sys\nx = {'a': [1.5]}\nheavy = sorted(set(sys.modules) & {'pyarrow', "
        "'numpy', 'pandas', 'cloudpickle', 'pickle', 'asyncio', 'traceback', 'typing'})",
        python_options=["-S"],
    )
    assert ran.variables["heavy"]["preview"] == []


# --------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------


def test_a_traceback_shows_the_cells_lines_and_none_of_the_harness(run_cell):
    ran = run_cell("def f(n):\n    return 1 / n\n\nf(0)")
    assert ran.result["success"] is False and ran.variables == {}
    assert ran.error == "ZeroDivisionError: division by zero"
    assert "return 1 / n" in ran.traceback and "line 4, in <module>" in ran.traceback
    assert "harness" not in ran.traceback


def test_an_awaiting_cells_traceback_shows_no_asyncio(run_cell):
    ran = run_cell("import asyncio\nawait asyncio.sleep(0)\n1 / 0")
    assert ran.traceback.count("File") == 1


def test_a_traceback_tells_of_causes_and_notes(run_cell):
    ran = run_cell(
        """
        try:
            try: {}["k"]
            except KeyError as e: raise ValueError("second") from e
        except ValueError as e:
            if hasattr(e, "add_note"): e.add_note("a note")
            raise
        """
    )
    assert "KeyError: 'k'" in ran.traceback and "direct cause" in ran.traceback
    assert ran.error == "ValueError: second"
    assert sys.version_info < (3, 11) or "a note" in ran.traceback


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no exception groups before Python 3.11")
def test_a_traceback_tells_of_every_exception_in_a_group(run_cell):
    ran = run_cell("raise ExceptionGroup('both', [ValueError('one'), OSError('two')])")
    assert "ValueError: one" in ran.traceback and "OSError: two" in ran.traceback


def test_a_syntax_error_shows_its_line(run_cell):
    ran = run_cell("x = 1\ny = = 2")
    assert ran.error.startswith("SyntaxError: ") and "line 2" in ran.error
    assert "y = = 2" in ran.traceback and "^" in ran.traceback


@pytest.mark.parametrize(
    "ending, error",
    [
        ("import sys; sys.exit()", "SystemExit: the cell ended itself with sys.exit()"),
        ("import sys; sys.exit(3)", "SystemExit: the cell ended itself with sys.exit(3)"),
        ("exit('bye')", "SystemExit: the cell ended itself with sys.exit('bye')"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("assert False", "AssertionError"),
    ],
)
def test_whatever_ends_the_cell_is_its_error(run_cell, ending, error):
    ran = run_cell(f"x = 1\n{ending}")
    assert (ran.error, ran.variables) == (error, {})


def test_endless_recursion_is_an_error_like_any_other(run_cell):
    ran = run_cell("def f(n): return f(n + 1)\nf(0)")
    assert ran.error.startswith("RecursionError: ")
    assert len(ran.traceback) < 3_000


def test_an_exception_that_cannot_be_printed_is_still_reported(run_cell):
    ran = run_cell(
        """
        class Meta(type):
            @property
            def __name__(cls): raise OSError
        class Bad(Exception, metaclass=Meta):
            def __str__(self): raise SystemExit
        raise Bad
        """
    )
    assert ran.error == "Bad: <Bad object>"
    assert "Bad" in ran.traceback


def test_a_failed_cell_keeps_its_displays_and_console(run_cell):
    ran = run_cell("print('before')\ndisplay([1])\n1 / 0")
    assert ran.stdout == "before\n"
    assert [entry["preview"] for entry in ran.displays] == [[1]]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"source": 1}', '{"source": "", "inputs": 1}'])
def test_a_bad_manifest_is_exit_code_2(tmp_path, text):
    path = tmp_path / "manifest.json"
    path.write_text(text)
    done = subprocess.run([sys.executable, HARNESS, path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "is no manifest" in done.stderr and "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------
# Inputs that cannot be loaded
# --------------------------------------------------------------------------------------------


def test_an_r_object_fails_the_cell_by_name(run_cell, input_file):
    ran = run_cell("1", {"model": input_file("application/x-r-rds", "model.rds", b"RDX3")})
    assert "'model' (application/x-r-rds)" in ran.error and "data.frame" in ran.error


def test_an_unknown_format_fails_the_cell_by_name(run_cell, input_file):
    ran = run_cell("1", {"v": input_file("video/mp4", "v.bin", b"")})
    assert (
        ran.error == "InputError: input 'v' (video/mp4) could not be loaded: "
        "ValueError: this worker knows no such format"
    )


def test_a_missing_library_is_named(run_cell, input_file):
    spec = input_file("module/import", "m.module.json", b'{"module_name": "no_such.thing"}')
    ran = run_cell("1", {"m": spec})
    assert "'m' (module/import)" in ran.error and "install no_such" in ran.error


def test_a_missing_file_is_named(run_cell, tmp_path):
    spec = {"content_type": "json/object", "file": tmp_path / "gone.json"}
    assert "no file gone.json" in run_cell("1", {"x": spec}).error


def test_a_broken_file_fails_the_cell_by_name(run_cell, input_file):
    inputs = {"x": input_file("pickle/object", "x.pickle", b"no pickle")}
    assert "'x' (pickle/object)" in run_cell("1", inputs).error


# --------------------------------------------------------------------------------------------
# Values that cross from one cell to the next
# --------------------------------------------------------------------------------------------

# Each row: a name; the expression that makes the value in the first cell; the format that it is
# to travel in; and an expression that the second cell must find true of `v`, what arrived there,
# with `made` the same value made anew. All rows cross in one pair of cells: imports cost seconds.
# What a row needs beyond the standard library is seen from the names that it uses.

JSON, PICKLE, ARROW = "json/object", "pickle/object", "arrow/ipc"

SETUP = {
    "cloudpickle": "import cloudpickle",
    "pyarrow": "import pyarrow as pa\nschema = pa.schema({'a': pa.int32()}, {b'k': b'v'})",
    "numpy": "import numpy as np",
    "pandas": "import pandas as pd\nimport pandas.testing as pdt",
    "polars": "import polars as pl\nimport polars.testing as plt",
    "torch": "import torch",
}
ABBREVIATIONS = {
    "pa.": "pyarrow",
    "np.": "numpy",
    "pd.": "pandas",
    "pl.": "polars",
    "torch.": "torch",
    "E.P": "cloudpickle",  # plain pickle names a class of the first cell, which the second lacks
}

STANDARD_SETUP = """
import collections, enum, math
from datetime import *
from decimal import Decimal
from uuid import UUID
E = enum.IntEnum("E", "P")
"""

EQUAL = "v == made and type(v) is type(made)"
SAME_ARRAY = (
    "(v.shape, v.dtype) == (made.shape, made.dtype) and v.flags.writeable"
    " and (v.tolist() if v.dtype == object else v.tobytes())"
    " == (made.tolist() if v.dtype == object else made.tobytes())"
)
SAME_FRAME = "pdt.assert_frame_equal(v, made) is None"
SAME_SERIES = "pdt.assert_series_equal(v, made) is None and type(v.name) is type(made.name)"

ROWS = [
    # What JSON gives back unchanged
    ("nested", "[1, -2.5, 'žluť', True, None, {'k': [[]]}]", JSON, EQUAL),
    (
        "not_finite",
        "[math.nan, math.inf, -math.inf]",
        JSON,
        "math.isnan(v[0]) and v[1:] == made[1:]",
    ),
    ("big_integer", "2 ** 300", JSON, EQUAL),
    ("lone_surrogate", "'\\ud800'", JSON, EQUAL),
    ("numbers", "[1.0, 1, -0.0, 1e300]", JSON, "repr(v) == repr(made)"),
    ("none", "None", JSON, "v is None"),
    # What JSON would change
    ("integer_keys", "{1: 'x'}", PICKLE, EQUAL),
    ("tuple_inside", "[(1, 2)]", PICKLE, EQUAL),
    ("counter", "collections.Counter('aab')", PICKLE, EQUAL),
    ("enum", "E.P", PICKLE, "v == 1 and isinstance(v, enum.IntEnum)"),
    ("set_inside", "{'k': {1}}", PICKLE, EQUAL),
    ("surrogate_pair", "'\\ud83d\\ude00'", PICKLE, EQUAL),
    ("huge_integer", "1 << 20000", PICKLE, EQUAL),
    # Typed scalars
    ("datetime", "datetime(2024, 2, 29, 12, 30, 1, 5)", ARROW, EQUAL),
    ("aware", "datetime(2024, 1, 1, tzinfo=timezone.utc)", ARROW, EQUAL),
    ("date", "date(1, 1, 1)", ARROW, EQUAL),
    ("time", "time(23, 59, 59, 299999)", ARROW, EQUAL),
    ("timedelta", "timedelta(days=-1, microseconds=1)", ARROW, EQUAL),
    ("decimal", "Decimal('1.10')", ARROW, EQUAL + " and str(v) == '1.10'"),
    ("bytes", "bytes(range(256))", ARROW, EQUAL),
    ("bytearray", "bytearray(b'x')", ARROW, "v == made"),
    ("uuid", "UUID(int=7)", ARROW, EQUAL),
    ("complex", "complex(1, -2)", ARROW, EQUAL),
    # Scalars that Arrow would change
    ("longest_timedelta", "timedelta.max", PICKLE, EQUAL),
    ("not_a_decimal", "Decimal('NaN')", PICKLE, "v.is_nan()"),
    ("aware_time", "time(1, tzinfo=timezone.utc)", PICKLE, EQUAL + " and v.tzinfo is timezone.utc"),
    ("nanoseconds", "pd.Timestamp('2024-01-01 00:00:00.000000001')", ARROW, EQUAL),
    ("not_a_time", "pd.NaT", PICKLE, "v is pd.NaT"),
    # Arrays
    ("matrix", "np.arange(6.0).reshape(2, 3)", ARROW, SAME_ARRAY),
    ("single", "np.array(5, dtype='int8')", ARROW, SAME_ARRAY),
    ("empty", "np.zeros((0, 3), dtype='float32')", ARROW, SAME_ARRAY),
    ("booleans", "np.array([[True, False]])", ARROW, SAME_ARRAY),
    ("complex64", "np.array([1 + 2j], dtype='complex64')", ARROW, SAME_ARRAY),
    ("dates", "np.array(['2024', 'NaT'], dtype='M8[D]')", ARROW, SAME_ARRAY),
    ("words", "np.array(['x', 'žluť'])", ARROW, SAME_ARRAY),
    ("half_floats", "np.array([1.5, np.nan], dtype='float16')", ARROW, SAME_ARRAY),
    ("mapped", "np.arange(100_000)", ARROW, SAME_ARRAY),
    ("byte_strings", "np.array([b'ab', b'c'])", ARROW, SAME_ARRAY),
    ("text_objects", "np.array(['s', 't'], dtype=object)", ARROW, SAME_ARRAY),
    (
        "not_contiguous",
        "np.asfortranarray(np.arange(4).reshape(2, 2))[:, ::-1]",
        ARROW,
        SAME_ARRAY,
    ),
    # Arrays that Arrow would change
    ("masked", "np.ma.array([1, 2], mask=[0, 1])", PICKLE, "v.mask.tolist() == [False, True]"),
    ("objects", "np.array([1, None, (2,)], dtype=object)", PICKLE, "v.tolist() == [1, None, (2,)]"),
    ("records", "np.array([(1, 2.0)], dtype='i4,f8')", PICKLE, "v.dtype == made.dtype"),
    ("big_endian", "np.array([1, 2], dtype='>i4')", PICKLE, "v.dtype.str == '>i4'"),
    ("inner_nul", "np.array(['a\\0b'])", PICKLE, "v[0] == 'a\\0b'"),
    ("long_double", "np.longdouble(1) / 3", PICKLE, "v == made"),
    # numpy scalars come back as Python's
    ("float32", "np.float32(0.5)", ARROW, "v == 0.5 and type(v) is float"),
    ("uint64", "np.uint64(2**64 - 1)", ARROW, "v == 2**64 - 1 and type(v) is int"),
    ("bool_", "np.bool_(True)", ARROW, "v is True"),
    ("str_", "np.str_('s')", ARROW, "v == 's' and type(v) is str"),
    ("complex128", "np.complex128(1j)", ARROW, "v == 1j and type(v) is complex"),
    ("datetime64", "np.datetime64('2024-01-01')", ARROW, "v == date(2024, 1, 1)"),
    # Tables
    (
        "arrow_table",
        "pa.table({'a': [1, None]}, schema=schema)",
        ARROW,
        "v.equals(made) and v.schema.equals(schema, check_metadata=True)",
    ),
    ("batch", "pa.RecordBatch.from_pydict({'x': ['a', 'b']})", ARROW, EQUAL),
    ("empty_batch", "pa.RecordBatch.from_pydict({'x': pa.array([], pa.int8())})", ARROW, EQUAL),
    ("equal_names", "pa.table([pa.array([1]), pa.array(['x'])], names=['a', 'a'])", ARROW, EQUAL),
    (
        "frame_with_index",
        "pd.DataFrame({'n': [1.5, None], 's': ['x', None]}, index=['i', 'j'])",
        ARROW,
        SAME_FRAME,
    ),
    ("long_frame", "pd.DataFrame({'big': range(1000)})", ARROW, SAME_FRAME),
    ("series_without_name", "pd.Series([1, 2])", ARROW, SAME_SERIES),
    ("series_with_empty_name", "pd.Series([1, 2], name='')", ARROW, SAME_SERIES),
    ("series_named_0", "pd.Series([1, 2], name=0)", ARROW, SAME_SERIES),
    ("polars_frame", "pl.DataFrame({'n': [1, None], 'l': [['x'], []]})", ARROW, "v.equals(made)"),
    (
        "polars_series",
        "pl.Series('name', ['x', 'y'], dtype=pl.Categorical)",
        ARROW,
        "v.name == 'name' and v.dtype == made.dtype and v.to_list() == ['x', 'y']",
    ),
    # Frames that Arrow refuses
    (
        "mixed_frame",
        "pd.DataFrame({'a': [1, 'x', None], 'b': [1.5, 2.5, math.nan]})",
        ARROW,
        "v['a'].tolist() == [1, 'x', None] and v['b'].tolist()[:2] == [1.5, 2.5]",
    ),
    (
        "mixed_series",
        "pd.Series([1, 'x', (2,)], name='mixed')",
        ARROW,
        "v.name == 'mixed' and v.tolist() == [1, 'x', [2]]",
    ),
    ("twin_columns", "pd.DataFrame([[1, 2]], columns=['c', 'c'])", ARROW, SAME_FRAME),
    ("no_columns", "pd.DataFrame(index=range(3))", ARROW, "v.shape == (3, 0)"),
    # Tensors
    (
        "tensor",
        "torch.arange(6.0).reshape(2, 3).requires_grad_()",
        ARROW,
        "torch.equal(v, made) and v.add_(1) is v",
    ),
    ("tensor_number", "torch.tensor(3)", ARROW, "v.shape == () and v.item() == 3"),
    ("conjugated", "torch.tensor([1 + 2j]).conj()", ARROW, "v.tolist() == [1 - 2j]"),
    ("bfloat16", "torch.ones(2, dtype=torch.bfloat16)", PICKLE, "torch.equal(v, made)"),
]


def modules_of(row: tuple) -> list:
    """The modules that a row needs."""
    _, expression, content_type, check = row
    used = [module for short, module in ABBREVIATIONS.items() if short in expression + check]
    return used + ["pyarrow"] * (content_type == ARROW)


POSSIBLE = [row for row in ROWS if all(map(is_installed, modules_of(row)))]


class Crossed:
    """All possible rows, made in one cell and checked in the next: what became of each."""

    def __init__(self, run_cell: Runner):
        modules = sorted({module for row in POSSIBLE for module in modules_of(row)})
        setup = STANDARD_SETUP + "\n".join(SETUP[module] for module in modules) + "\n"
        self.made = run_cell(setup + "\n".join(f"its_{row[0]} = {row[1]}" for row in POSSIBLE))
        names = [f"its_{row[0]}" for row in POSSIBLE]
        self.found = run_cell(setup + self.checks(), self.made.inputs(*names))

    def checks(self) -> str:
        """The source of a cell that says of each row whether its check holds, or why not."""
        lines = ["found = {}"]
        for name, made, _, check in POSSIBLE:
            lines += [
                "try:",
                f"    v, made = its_{name}, {made}",
                f"    found[{name!r}] = bool({check})",
            ]
            lines += ["except Exception as error:", f"    found[{name!r}] = repr(error)"]
        return "\n".join(lines)

    def __call__(self, name: str) -> tuple:
        """(the value's entry in the result, whether its check held)"""
        entry = self.made.variables[f"its_{name}"]
        return entry, self.found.variables["found"]["preview"][name]

    def content(self, name: str) -> bytes:
        return (self.made.outputs / self(name)[0]["file"]).read_bytes()

    def metadata(self, name: str) -> dict:
        import pyarrow

        metadata = pyarrow.ipc.open_stream(self.content(name)).schema.metadata
        return {key: value for key, value in metadata.items() if key != b"pandas"}


@pytest.fixture(scope="session")
def crossed(tmp_path_factory):
    return Crossed(Runner(tmp_path_factory.mktemp("crossed")))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_value_crosses_in_its_format_and_arrives_as_it_was(request, row):
    if row not in POSSIBLE:
        pytest.skip(f"not installed: one of {', '.join(modules_of(row))}")
    entry, found = request.getfixturevalue("crossed")(row[0])
    assert (entry.get("content_type"), found) == (row[2], True), entry


# --------------------------------------------------------------------------------------------
# JSON
# --------------------------------------------------------------------------------------------


def test_json_keeps_nan_in_the_file_and_not_in_the_preview(run_cell):
    ran = run_cell("x = [float('nan'), float('inf'), 1.5]")
    assert (ran.outputs / "x.json").read_text() == "[NaN, Infinity, 1.5]"
    assert ran.variables["x"]["preview"] == [None, None, 1.5]


def test_deep_json_does_not_reach_the_preview(run_cell):
    ran = run_cell("x = []\nfor _ in range(400): x = [x]")
    assert ran.variables["x"]["content_type"] == "json/object"
    assert ran.variables["x"]["preview"] == "<list, 401 levels deep>"


# --------------------------------------------------------------------------------------------
# Pickle
# --------------------------------------------------------------------------------------------


def test_a_pickle_lies_in_an_envelope(run_cell):
    ran = run_cell("x = {1, 2}", env={"STRATA_NOTEBOOK_OBJECT_CODEC": " Pickle "})
    envelope = pickle.loads((ran.outputs / "x.pickle").read_bytes())
    assert envelope.pop("__strata_object_codec__") == "strata.notebook.object_codec.v1"
    assert pickle.loads(envelope.pop("payload")) == {1, 2}
    assert envelope == {"codec": "pickle"}
    entry = ran.variables["x"]
    assert (entry["codec"], entry["type"], entry["preview"]) == ("pickle", "set", "<set object>")


@needs("cloudpickle")
def test_functions_and_classes_of_the_cell_travel_by_value(run_cell):
    made = run_cell("k = 3\nclass P: v = 7\np = P()\ndef f(n): return n * k + p.v")
    assert made.variables["f"]["codec"] == "cloudpickle"
    ran = run_cell("seen = [f(2), p.v, P.v]", made.inputs("f", "p", "P"))
    assert ran.variables["seen"]["preview"] == [13, 7, 7]


@needs("cloudpickle")
def test_display_in_a_function_of_another_cell_displays_in_this_one(run_cell):
    made = run_cell("def show(x): display(x)\nnote = Markdown('hi')")
    ran = run_cell("show([1])\nnote", made.inputs("show", "note"))
    assert [entry["content_type"] for entry in ran.displays] == ["json/object", "text/markdown"]


def test_a_bare_pickle_is_read(run_cell, input_file):
    spec = input_file("pickle/object", "x.pickle", pickle.dumps({"a": {1}}))
    assert run_cell("y = list(x['a'])", {"x": spec}).variables["y"]["preview"] == [1]


def test_an_unknown_codec_is_an_error_of_its_variable(run_cell, input_file):
    ran = run_cell("x = {1}\ny = 1", env={"STRATA_NOTEBOOK_OBJECT_CODEC": "dill"})
    assert "'dill'" in ran.variables["x"]["error"] and ran.variables["y"]["preview"] == 1
    envelope = {"__strata_object_codec__": "strata.notebook.object_codec.v1", "codec": "dill"}
    spec = input_file("pickle/object", "x.pickle", pickle.dumps({**envelope, "payload": b""}))
    assert "'dill'" in run_cell("1", {"x": spec}).error


# --------------------------------------------------------------------------------------------
# Modules and cell instances
# --------------------------------------------------------------------------------------------


def test_a_module_is_imported_again_by_name(run_cell):
    made = run_cell("import os.path as p")
    assert made.variables["p"]["preview"] == "<module 'posixpath'>"
    assert json.loads((made.outputs / "p.module.json").read_text()) == {"module_name": "posixpath"}
    assert run_cell("y = p.sep", made.inputs("p")).variables["y"]["preview"] == "/"


def test_a_module_without_a_name_to_import_it_by_is_an_error(run_cell):
    ran = run_cell("import types\nm = types.ModuleType('m')\nm.__dict__['__name__'] = 'nowhere'")
    assert "cannot be imported" in ran.variables["m"]["error"]


POINTS = """
import dataclasses

RUNS.append(1)

@dataclasses.dataclass
class Point:
    x: int
    def scaled(self): return self.x * factor

class Slotted:
    __slots__ = ("a", "__b")
    def __init__(self): raise RuntimeError("not called when restored")
    def set(self, b): self.__b = b
    def get(self): return self.__b

class Own:
    def __getstate__(self): return ["kept", self.v]
    def __setstate__(self, state): self.v = state

class Bag(list): pass

def double(x): return x * 2
"""


@pytest.fixture
def points(input_file):
    """The specs of what a cell module defines, with the values that its source uses."""
    injected = {
        "factor": input_file("json/object", "factor.json", b"10"),
        "RUNS": input_file("json/object", "RUNS.json", b"[]"),
    }

    def spec(symbol: str) -> dict:
        about = {"module_name": "cell-1f-abc", "symbol_name": symbol, "source": POINTS}
        content = json.dumps(about).encode()
        return input_file("module/cell", f"{symbol}.cell_module.json", content, injected=injected)

    names = ("Point", "Slotted", "Own", "Bag", "double")
    return {name: spec(name) for name in names}


def test_a_cell_module_runs_once_with_what_is_injected(run_cell, points):
    ran = run_cell(
        """
        import inspect, sys
        module = sys.modules["cell-1f-abc"]
        runs, six, scaled = module.RUNS, double(3), Point(4).scaled()
        marks = [module.__strata_cell_module__, Point.__strata_cell_exported_class__]
        source = inspect.getsource(double)
        kept = module.__strata_cell_module_source__
        del module
        """,
        points,
    )
    previews = {name: entry.get("preview") for name, entry in ran.variables.items()}
    assert (previews["runs"], previews["six"], previews["scaled"]) == ([1], 6, 40)
    assert previews["marks"] == [True, True] and previews["kept"] == POINTS
    assert previews["source"] == "def double(x): return x * 2\n"


def test_instances_of_a_cell_modules_classes_travel_with_its_source(run_cell, points):
    made = run_cell(
        """
        p = Point(4)
        p.more = "dynamic"
        s = Slotted.__new__(Slotted)
        s.set(5)
        o = Own()
        o.v = 6
        """,
        points,
    )
    assert {made.variables[n]["content_type"] for n in "pso"} == {"module/cell-instance"}
    entry = made.variables["p"]
    assert (entry["file"], entry["type"]) == ("p.cell_instance.pickle", "Point")
    about = pickle.loads((made.outputs / entry["file"]).read_bytes())
    assert set(about) == {"module_name", "class_name", "source", "state_codec", "state_payload"}
    state = pickle.loads(about["state_payload"])
    assert state["__strata_cell_instance_state__"] == "strata.notebook.cell_instance_state.v1"
    assert (state["dict"], state["slots"]) == ({"x": 4, "more": "dynamic"}, {})
    ran = run_cell(
        "seen = [p.scaled(), p.more, s.get(), o.v, p == Point(4)]",
        {**made.inputs("p", "s", "o"), **points},
    )
    assert ran.variables["seen"]["preview"] == [40, "dynamic", 5, ["kept", 6], True]


def test_the_older_form_of_a_cell_instance_is_read(run_cell, input_file):
    about = {"module_name": "m-1", "class_name": "C", "source": "class C: pass"}
    content = pickle.dumps({**about, "state_pickle": pickle.dumps({"v": 8})})
    spec = input_file("module/cell-instance", "c.cell_instance.pickle", content)
    assert run_cell("v = c.v", {"c": spec}).variables["v"]["preview"] == 8


@needs("cloudpickle")
def test_instances_inside_other_values_bring_their_module_along(run_cell, points):
    made = run_cell("many = {'p': [Point(1), Point(2)]}", points)
    again = run_cell("many = dict(many)\none = many['p'][1]", made.inputs("many"))
    assert formats(again) == {"many": "pickle/object", "one": "module/cell-instance"}
    seen = "seen = [many['p'][1].scaled(), many['p'][0] == Point(1), one.x]"
    ran = run_cell(seen, {**again.inputs("many", "one"), **points})
    assert ran.variables["seen"]["preview"] == [20, True, 2]


@needs("cloudpickle")
def test_an_instance_with_content_of_its_own_keeps_it(run_cell, points):
    made = run_cell("b = Bag([1, 2])", points)
    ran = run_cell("seen = list(b)", {**made.inputs("b"), **points})
    assert ran.variables["seen"]["preview"] == [1, 2]


# --------------------------------------------------------------------------------------------
# Arrow
# --------------------------------------------------------------------------------------------


@needs("pyarrow", "pandas")
def test_a_frame_that_arrow_refuses_becomes_a_json_table(crossed):
    entry, content = crossed("mixed_frame")[0], crossed.content("mixed_frame")
    table = json.loads(content)
    assert table["__strata_arrow_json_fallback__"] is True
    assert table["format"] == "strata.notebook.arrow_json_fallback.v1"
    assert (table["kind"], table["columns"], table["series_name"]) == (
        "dataframe",
        ["a", "b"],
        None,
    )
    assert table["data"][:2] == [[1, 1.5], ["x", 2.5]]
    assert entry["preview"] == [[1, 1.5], ["x", 2.5], ["", None]]


@needs("pyarrow", "pandas")
def test_tables_are_described_by_rows_columns_and_their_first_twenty_rows(crossed):
    entry = crossed("frame_with_index")[0]
    assert (entry["rows"], entry["columns"]) == (2, ["n", "s", "__index_level_0__"])
    assert entry["preview"] == [[1.5, "x", "i"], ["", "", "j"]]
    entry = crossed("long_frame")[0]
    assert (entry["rows"], entry["preview"]) == (1000, [[n] for n in range(20)])


@needs("pyarrow", "numpy")
def test_arrays_and_scalars_are_described_by_their_previews(crossed):
    previews = {
        "matrix": "ndarray shape=(2, 3) dtype=float64",
        "single": "ndarray shape=() dtype=int8",
    }
    previews.update(datetime="2024-02-29 12:30:01.000005", float32=0.5)
    assert {name: crossed(name)[0]["preview"] for name in previews} == previews


@needs("pyarrow", "pandas")
def test_arrow_metadata_says_how_to_rebuild_the_value(crossed):
    metadata = crossed.metadata("series_without_name")
    assert metadata[b"strata.arrow.shape"] == b"table"
    assert metadata[b"strata.arrow.source"] == b"pandas.Series"
    assert metadata[b"strata.arrow.pandas.name"] == b"null"
    assert crossed.metadata("complex64") == {
        b"strata.arrow.shape": b"tensor",
        b"strata.arrow.tensor.shape": b"[1]",
        b"strata.arrow.tensor.dtype": b"complex64",
    }
    assert crossed.metadata("uuid") == {
        b"strata.arrow.shape": b"scalar",
        b"strata.arrow.scalar.type": b"uuid",
    }


@needs("pyarrow", "jax")
def test_a_64_bit_jax_array_never_comes_back_as_32_bits(harness, run_cell, tmp_path):
    import numpy

    table = harness.tensor_table(numpy.ones(3), b"jax.Array")
    with open(tmp_path / "a.arrow", "wb") as file:
        harness.write_stream(table, file)
    spec = {"content_type": "arrow/ipc", "file": tmp_path / "a.arrow"}
    ran = run_cell("seen = [str(a.dtype), type(a).__module__[:3], a.tolist()]", {"a": spec})
    assert ran.variables["seen"]["preview"] == ["float64", "jax", [1, 1, 1]]


@needs("pyarrow")
def test_exporters_of_arrow_streams_come_back_as_tables(run_cell):
    made = run_cell(
        """
        import pyarrow as pa
        class Exporter:
            def __arrow_c_stream__(self, schema=None):
                return pa.table({'a': [1]}).__arrow_c_stream__(schema)
        class Iterator(Exporter):
            def __next__(self): raise StopIteration
        class Device:
            def __dlpack__(self, **options): raise RuntimeError("not on the CPU")
        x, i, d = Exporter(), Iterator(), Device()
        del Exporter, Iterator, Device
        """
    )
    assert formats(made)["x"] == "arrow/ipc"
    assert formats(made)["i"] == formats(made)["d"] == "pickle/object"
    ran = run_cell("y = x.to_pydict()", made.inputs("x"))
    assert ran.variables["y"]["preview"] == {"a": [1]}


@needs("pyarrow", "numpy")
def test_the_files_of_inputs_never_change(run_cell):
    made = run_cell("import numpy as np\na = np.zeros(100_000)")
    before = (made.outputs / "a.arrow").read_bytes()
    ran = run_cell("a += 1\ns = float(a.sum())", made.inputs("a"), mutation_defines=["a"])
    assert ran.variables["s"]["preview"] == 100_000
    assert (ran.folder / "inputs" / "a.arrow").read_bytes() == before
    assert (ran.outputs / "a.arrow").read_bytes() != before


# --------------------------------------------------------------------------------------------
# Frames that hypothesis makes
# --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def harness():
    """harness.py as a module of this process."""
    spec = importlib.util.spec_from_file_location("harness_in_process", HARNESS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frame_columns():
    """Strategies of columns, each of three values, by what is odd about them."""
    import pandas as pd
    from hypothesis import strategies as st

    def of(*options):
        return st.sampled_from(options)

    stamps = pd.to_datetime(["2024-01-01", "2024-02-01", None])
    text = pd.array(["a", None, "ž"], dtype="string")
    return of(
        [1, 2, 3],
        [1.5, None, float("inf")],
        ["x", "y", None],
        [1, "x", None],
        [None, None, None],
        [[1, 2], [], [3]],
        [{"k": 1}, {"k": 2}, {"k": None}],
        [b"x", b"", None],
        [{1, 2}, object, 3],
        pd.Categorical(["lo", "hi", None], categories=["lo", "hi"], ordered=True),
        pd.array([1, None, 3], dtype="Int64"),
        pd.array([True, None, False], dtype="boolean"),
        text,
        stamps,
        stamps.tz_localize("Europe/Prague"),
        pd.period_range("2024-01", periods=3, freq="M"),
        pd.interval_range(0, 3),
        pd.arrays.SparseArray([0.0, 0.0, 1.5]),
        pd.to_timedelta(["1s", None, "2D"]),
        pd.array([1, None, 3], dtype=pd.ArrowDtype(__import__("pyarrow").int32())),
    )


def frames():
    """Frames of up to four odd columns under odd labels, with odd indexes."""
    import pandas as pd
    from hypothesis import strategies as st

    label = st.one_of(
        st.text(max_size=3),
        st.integers(-2, 2),
        st.none(),
        st.tuples(st.integers(0, 1), st.text(max_size=1)),
    )
    index = st.sampled_from(
        [
            None,
            ["i", "i", "j"],
            pd.RangeIndex(5, 11, 2, name="r"),
            pd.MultiIndex.from_tuples([(1, "a"), (1, "b"), (2, "a")], names=["n", None]),
            pd.date_range("2024", periods=3, tz="UTC"),
            pd.CategoricalIndex(["a", "b", "a"]),
            pd.Index([1.5, None, 2.5]),
        ]
    )
    columns = st.lists(st.tuples(label, frame_columns()), max_size=4)
    return st.builds(make_frame, columns, index, st.booleans(), st.booleans())


def make_frame(columns, index, wide, empty):
    import pandas as pd

    series = [pd.Series(values) for _, values in columns]
    frame = pd.concat(series, axis=1) if series else pd.DataFrame(index=range(3))
    labels = [label for label, _ in columns]
    frame.columns = pd.Index(labels, tupleize_cols=False) if labels else frame.columns
    if wide and labels:
        frame.columns = pd.MultiIndex.from_tuples([(str(label), 1) for label in labels])
    if index is not None:
        frame.index = index
    frame.attrs = {"unit": "m"}
    return frame.iloc[:0] if empty else frame


@needs("hypothesis", "pyarrow", "pandas")
def test_every_frame_round_trips_or_falls_back(harness, tmp_path):
    from hypothesis import HealthCheck, given, settings

    options = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))

    @options
    @given(frames())
    def check(frame):
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        path, entry, back = round_trip(harness, tmp_path, frame)
        assert entry["rows"] == len(frame)
        assert len(back) == len(frame) and back.shape == frame.shape
        json.dumps(entry, allow_nan=False)
        if path.read_bytes()[:1] != b"{":
            assert_frames_alike(back, frame)

    check()


@needs("hypothesis", "pyarrow", "pandas")
def test_every_series_round_trips_or_falls_back(harness, tmp_path):
    from hypothesis import given, settings
    from hypothesis import strategies as st

    names = st.one_of(st.none(), st.text(max_size=3), st.integers(), st.booleans())

    @settings(max_examples=50, deadline=None, database=None)
    @given(frame_columns(), names)
    def check(values, name):
        import pandas as pd

        series = pd.Series(values, name=name)
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        _, _, back = round_trip(harness, tmp_path, series)
        assert type(back) is pd.Series and len(back) == 3
        assert back.name == name and type(back.name) is type(name)

    check()


def round_trip(harness, folder, value):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = harness.write_value(harness.Outputs(str(folder)), "value", value)
        assert entry["content_type"] == "arrow/ipc"
        path = folder / entry["file"]
        return path, entry, harness.READERS["arrow/ipc"](str(path))


def assert_frames_alike(back, frame):
    """Equal values and index; labels equal, or equal as text where Arrow has made text of them."""
    assert back.columns.map(text_label).tolist() == frame.columns.map(text_label).tolist()
    assert back.index.astype(object).equals(frame.index.astype(object))
    for place in range(frame.shape[1]):
        left, right = back.iloc[:, place], frame.iloc[:, place]
        assert [plain(item) for item in left] == [plain(item) for item in right]


def text_label(label) -> str:
    return "" if plain(label) is None else str(label).replace("'", "")


def plain(item):
    """The value in a form that == compares: missing ones are all alike, arrays are lists."""
    import pandas as pd

    item = item.tolist() if hasattr(item, "tolist") else item
    missing = item is None or (pd.api.types.is_scalar(item) and pd.isna(item))
    return None if missing else item


# --------------------------------------------------------------------------------------------
# Displays
# --------------------------------------------------------------------------------------------

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAIAAAASFvFNAAAAC0lEQVR4nGNgQAEAAA4AAYpTiOcAAAAASUVORK5CYII=")


def test_displays_come_in_order_and_the_last_is_also_a_variable(run_cell):
    ran = run_cell("display(1)\ndisplay('a', None, 'b')\nMarkdown('# hi')")
    assert [entry["content_type"] for entry in ran.displays] == ["json/object"] * 3 + ["text/markdown"]
    assert [entry["file"] for entry in ran.displays] == [
        "__display__0.json",
        "__display__1.json",
        "__display__2.json",
        "__display__3.md",
    ]
    assert ran.variables["_"] == ran.displays[-1]
    assert ran.displays[-1]["markdown_text"] == "# hi" and ran.displays[-1]["preview"] is None
    assert (ran.outputs / "__display__3.md").read_text() == "# hi"


def test_a_display_of_a_variable_shares_its_file(run_cell):
    ran = run_cell("x = [1, 2]\nx")
    assert ran.displays == [ran.variables["x"]] and ran.variables["_"] == ran.variables["x"]
    assert os.listdir(ran.outputs) == ["x.json"]


def test_a_display_in_another_format_than_its_variable_has_its_own_file(run_cell):
    ran = run_cell("x = Markdown('hi')\nx")
    assert ran.displays[0]["file"] == "__display__0.md" and ran.variables["x"]["file"] == "x.pickle"


def test_png_displays_carry_their_size_and_data(run_cell):
    ran = run_cell(f"class Image:\n    def _repr_png_(self): return {PNG!r}\nImage()")
    entry = ran.displays[0]
    assert (entry["content_type"], entry["width"], entry["height"]) == ("image/png", 3, 2)
    assert entry["inline_data_url"] == "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert (ran.outputs / entry["file"]).read_bytes() == PNG


def test_a_display_shows_the_state_at_its_time(run_cell):
    ran = run_cell("m = Markdown('one')\ndisplay(m)\nm.text = 'two'\ndisplay(m)")
    assert [entry["markdown_text"] for entry in ran.displays] == ["one", "two"]


def test_a_display_that_fails_is_an_entry_with_the_reason(run_cell):
    ran = run_cell(
        """
        class Bad:
            def __init__(self, error): self.error = error
            def _repr_png_(self): raise self.error
        display(Bad(ValueError("no")))
        display(Bad(SystemExit(1)))
        display(x for x in ())
        display(1)
        """
    )
    assert ran.result["success"] is True
    assert ran.displays[0] == {"error": "ValueError: no", "type": "Bad"}
    assert "sys.exit(1)" in ran.displays[1]["error"] and "generator" in ran.displays[2]["error"]
    assert ran.displays[3]["preview"] == 1


@needs("matplotlib")
def test_shown_figures_are_displays_and_closed(run_cell):
    ran = run_cell(
        """
        import matplotlib
        from matplotlib import pyplot as plt
        plt.plot([1, 2])
        plt.show()
        display("between")
        figure, axes = plt.subplots(figsize=(2, 1), dpi=50)
        figure.show()
        plt.show(block=True)
        left = plt.get_fignums()
        backend = matplotlib.get_backend().lower()
        del figure, axes
        """,
        env={"MPLBACKEND": ""} if os.environ.get("MPLBACKEND") else None,
    )
    types = [entry["content_type"] for entry in ran.displays]
    assert types == ["image/png", "json/object", "image/png", "image/png"]
    assert (ran.displays[2]["width"], ran.displays[2]["height"]) == (100, 50)
    assert ran.variables["left"]["preview"] == [] and ran.variables["backend"]["preview"] == "agg"


@needs("PIL")
def test_a_pillow_image_is_a_png(run_cell):
    ran = run_cell("from PIL import Image\nImage.new('RGB', (4, 5))")
    assert (ran.displays[0]["width"], ran.displays[0]["height"]) == (4, 5)


# --------------------------------------------------------------------------------------------
# Mutation warnings
# --------------------------------------------------------------------------------------------


def test_inputs_changed_in_place_or_deleted_are_warned_of(run_cell):
    made = run_cell("a = [1, [2]]\nb = {'k': 1}\nc = {1, 2}\nd = [1]\ne = {'x': {}}")
    ran = run_cell("a[1].append(3)\nb['k'] = 2\nc.add(3)\ndel d\ne['x']", made.inputs(*"abcde"))
    assert [warning["var_name"] for warning in ran.warnings] == ["a", "b", "c", "d"]
    assert all(set(w) == {"var_name", "message", "suggestion"} for w in ran.warnings)
    assert "deleted" in ran.warnings[3]["message"]
    assert not {"a", "b", "c", "d", "e"} & set(ran.variables)


def test_inputs_that_come_back_are_not_warned_of(run_cell):
    made = run_cell("a = [1]\nb = [2]")
    ran = run_cell("a.append(2); a = a[:]\nb.append(3)", made.inputs("a", "b"), mutation_defines=["b"])
    assert ran.warnings == []


def test_outputs_that_share_a_mutable_object_are_warned_of(run_cell):
    ran = run_cell(
        """
        inner = [1]
        outer = {"a": (inner,)}
        class Box: pass
        box = Box()
        box.content = outer
        import os, sys
        one = two = "text"
        three = four = (1, "x")
        """
    )
    pairs = [(w["var_name"], w["message"].split("'")[3]) for w in ran.warnings]
    assert pairs == [("inner", "outer"), ("outer", "box"), ("inner", "box")] or sorted(pairs) == [
        ("inner", "box"),
        ("inner", "outer"),
        ("outer", "box"),
    ]


@needs("pyarrow", "pandas", "numpy")
def test_arrays_and_frames_changed_in_place_are_warned_of(run_cell):
    made = run_cell(
        """
        import numpy as np, pandas as pd
        a = np.arange(6.0)
        big = np.zeros(1_000_000)
        df = pd.DataFrame({"x": [1, 2], "y": ["a", None]})
        same = df.copy()
        s = pd.Series([1, 2])
        """
    )
    ran = run_cell(
        """
        a[3] = 9
        big *= 0
        big += 1
        df.loc[0, "y"] = "b"
        same.groupby("y").sum(); same["x"].mean(); same.to_numpy(); list(same.iterrows())
        s.iloc[0] = 5
        """,
        made.inputs("a", "big", "df", "same", "s"),
    )
    assert [warning["var_name"] for warning in ran.warnings] == ["a", "big", "df", "s"]


# --------------------------------------------------------------------------------------------
# Console
# --------------------------------------------------------------------------------------------


def test_the_console_keeps_the_order_of_python_c_and_children(run_cell):
    ran = run_cell(
        """
        import ctypes, os, subprocess, sys
        libc = ctypes.CDLL(None)
        print("python")
        libc.puts(b"c")
        os.system("echo shell")
        subprocess.run(["echo", "child"])
        os.write(1, b"descriptor\\n")
        libc.printf(b"%s", b"no newline ")
        print("end", end="")
        print("err", file=sys.stderr)
        del libc
        """
    )
    assert ran.stdout.splitlines()[:5] == ["python", "c", "shell", "child", "descriptor"]
    assert "no newline" in ran.stdout and "end" in ran.stdout and ran.stderr == "err\n"


FLOOD = "import os, sys, time\nfor number in range(300_000): print('line', number)\n"
FLOODED = "".join("line %d\n" % number for number in range(300_000))


def test_a_flood_of_lines_is_not_a_write_for_each(run_cell):
    need(Path("/proc/self/io").exists(), "needs /proc")
    count = "int(open('/proc/self/io').read().split('syscw: ')[1].split()[0])"
    ran = run_cell("before = %s\n%sprint(%s - before, file=sys.stderr)" % (count, FLOOD, count))
    assert ran.stdout == FLOODED and int(ran.stderr) < 100_000


def test_a_long_line_is_written_in_pieces_between_which_it_can_be_trimmed(run_cell):
    need(Path("/proc/self/io").exists(), "needs /proc")
    count = "int(open('/proc/self/io').read().split('syscw: ')[1].split()[0])"
    ran = run_cell("import sys\nbefore = %s\nprint('y' * 10**8)\nprint(%s - before, file=sys.stderr)" % (count, count))
    assert len(ran.stdout) == 10**8 + 1 and int(ran.stderr) >= 10**8 // 2**24


def test_what_a_flood_leaves_in_a_buffer_is_on_its_way_without_another_print(run_cell):
    wait = """
until = time.monotonic() + 10
while os.fstat(1).st_size < %d and time.monotonic() < until: time.sleep(0.01)
print(os.fstat(1).st_size, file=sys.stderr)
"""
    ran = run_cell(FLOOD + wait % len(FLOODED))
    assert ran.stdout == FLOODED and int(ran.stderr) == len(FLOODED)


def test_a_fork_in_a_flood_prints_nothing_twice_and_finds_no_thread(run_cell):
    forks = """
import warnings
warnings.simplefilter("error")
for child in range(5):
    print("before", child)
    pid = os.fork()
    if not pid:
        print("child", child)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""
    ran = run_cell(FLOOD + forks)
    ends = "".join("before %d\nchild %d\n" % (child, child) for child in range(5))
    assert ran.error is None and ran.stdout == FLOODED + ends


def test_a_stream_that_is_closed_in_a_flood_harms_nobody(run_cell):
    ran = run_cell(FLOOD + "sys.stdout.close()\nx = 1")
    assert ran.error is None and "x" in ran.variables and ran.stdout == FLOODED


def test_any_text_can_be_printed(run_cell):
    ran = run_cell("print('\\ud800 žluť \\0')", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert ran.stdout == "\\ud800 žluť \0\n" and ran.error is None


# --------------------------------------------------------------------------------------------
# Hostile cells
# --------------------------------------------------------------------------------------------

HOSTILE_VALUES = """
class Reduce:
    def __reduce__(self): raise ValueError("will not")
class Exits:
    def __reduce__(self): raise SystemExit(4)
class Interrupts:
    def __reduce__(self): raise KeyboardInterrupt
class Class:
    @property
    def __class__(self): raise RuntimeError("no class")
class Repr:
    def __repr__(self): raise RuntimeError("no repr")
    __str__ = __hash__ = __eq__ = __bool__ = __len__ = __repr__
class Attribute:
    def __getattribute__(self, name): raise SystemExit(name)
class Meta(type):
    @property
    def __name__(cls): raise RuntimeError("no name")
class Odd(metaclass=Meta): pass
reduce, exits, interrupts, classless = Reduce(), Exits(), Interrupts(), Class()
unprintable, untouchable, odd = Repr(), Attribute(), Odd()
lock = __import__("threading").Lock()
keyed = {Repr: 1, "k": Reduce()}
deep = []
for _ in range(100_000): deep = [deep]
loop = []
loop.append(Reduce()); loop.append(loop)
good = 1
del Reduce, Exits, Interrupts, Class, Repr, Attribute, Meta, Odd, _
"""


def test_a_hostile_value_costs_no_other_variable(run_cell):
    ran = run_cell(HOSTILE_VALUES)
    assert ran.result["success"] is True, ran.traceback
    assert ran.variables["good"]["preview"] == 1
    errors = {n: e for n, e in ran.variables.items() if "error" in e}
    assert {"reduce", "exits", "interrupts", "lock", "keyed", "deep", "loop"} <= set(errors)
    assert errors["reduce"] == {"error": "ValueError: will not", "type": "Reduce"}
    assert "sys.exit(4)" in errors["exits"]["error"] and errors["lock"]["type"] == "lock"
    assert "RecursionError" in errors["deep"]["error"] or "recursion" in errors["deep"]["error"]
    assert ran.variables["odd"]["type"] == "Odd"


def test_hostile_inputs_and_displays_cost_no_result(run_cell):
    made = run_cell("x = 1")
    ran = run_cell(HOSTILE_VALUES + "\nfor v in list(globals().values()): display(v)", made.inputs("x"))
    assert ran.result["success"] is True and ran.variables["good"]["preview"] == 1


@pytest.mark.parametrize(
    "deed",
    [
        "import sys; sys.stdout = sys.stderr = None",
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import os; os.closerange(0, 64)",
        "del __builtins__",
        "import builtins; vars(builtins).clear()",
        "import builtins; builtins.open = builtins.len = builtins.isinstance = None",
        "import json; json.dumps = json.loads = None",
        "import os; os.open = os.replace = os.unlink = os.write = os.path.join = os.stat = None",
        "import os; os.chdir('/')",
        "import os, shutil; shutil.rmtree(os.path.dirname(os.getcwd()))",
        "import os, shutil; shutil.rmtree('../outputs')",
        "import os; os.rename('../outputs', '../else'); os.symlink('/tmp', '../outputs')",
        "import os; os.symlink('/etc/passwd', '../outputs/good.json')",
        "import os; os.symlink('/etc/passwd', '../result.json.tmp')",
        "import os; os.chmod('../outputs', 0); os.chmod('..', 0); os.umask(0o777)",
        "import sys; sys.modules.pop('__main__'); sys.path.clear(); sys.meta_path.clear()",
        "import sys; sys.setrecursionlimit(40)",
        "import sys; sys.settrace(lambda *a: 1 / 0); sys.setprofile(lambda *a: None)",
        "import atexit, time; atexit.register(time.sleep, 600)",
        "import atexit, os; atexit.register(os._exit, 9)",
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
        "import multiprocessing, time; multiprocessing.get_context('fork').Process("
        "target=time.sleep, args=(5,)).start()",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "import os\ntry:\n    while True: os.dup(0)\nexcept OSError: pass",
        "import signal; signal.signal(signal.SIGALRM, lambda *a: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.0005)",
    ],
)
def test_nothing_a_cell_does_to_its_process_costs_the_result(run_cell, deed):
    ran = run_cell(f"good = 1\n{deed}", code=9 if "os._exit, 9" in deed else 0)
    if "ITIMER" in deed and ran.error:
        assert ran.error == "ZeroDivisionError: division by zero"
        return
    assert ran.result["success"] is True, ran.traceback
    assert ran.variables["good"]["preview"] == 1
    assert (ran.outputs / "good.json").read_text() == "1"
    assert not (ran.outputs / "good.json").is_symlink()


def test_a_process_that_ends_itself_leaves_no_result(run_cell):
    ran = run_cell("print('so far')\nimport os\nos._exit(7)", code=7)
    assert ran.result == {} and ran.stdout == "so far\n"


def test_a_crash_is_seen_as_its_signal(run_cell):
    code = -signal.SIGSEGV
    ran = run_cell("import ctypes\nprint('so far')\nctypes.string_at(1)", code=code)
    assert ran.result == {} and ran.stdout == "so far\n"


def test_exit_handlers_run_and_open_files_are_flushed(run_cell):
    ran = run_cell(
        """
        import atexit
        atexit.register(print, 'bye')
        log = open('log', 'w')
        log.write('kept')
        """
    )
    assert ran.stdout == "bye\n"
    assert (ran.folder / "work" / "log").read_text() == "kept"


def test_a_full_disk_is_exit_code_1_and_says_so(run_cell):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))"
    ran = run_cell(f"x = 1\n{limit}", code=1)
    assert "could not be written" in ran.stderr and ran.result == {}


# ---------------------------------------------------------------------------------------
# Environments under attack, and in bad weather
# ---------------------------------------------------------------------------------------


def environment_of(client):
    return next(marker.parent for marker in client.envs.glob("*/.strata-complete"))


def worker_at(folder, **env):
    return WorkerProcess(**{"STRATA_WORKER_ENV_ROOT": str(folder / "envs"), "PATH": path_with_uv(), **env})


def registry_worker(folder, peer, **env):
    return worker_at(folder, STRATA_WORKER_ENV_REGISTRY_URL=peer.url, **env)


# What reaches a build


def test_no_variable_of_the_worker_changes_what_a_lock_installs(tmp_path):
    folder = tmp_path / "notebook"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "n"\nversion = "1"\nrequires-python = ">=3.9"\n[dependency-groups]\ndev = ["six==1.17.0"]\n'
    )
    subprocess.run(
        [shutil.which("uv", path=path_with_uv()), "lock", "--quiet", "--python", sys.executable], cwd=folder, check=True
    )
    lockfile = (folder / "uv.lock").read_text()
    block = {
        "key": strata_worker.uv_lock_key(lockfile),
        "lockfile": lockfile,
        "pyproject": (folder / "pyproject.toml").read_text(),
        "python": "%d.%d" % sys.version_info[:2],
    }
    leak = dict.fromkeys(
        ("UV_NO_DEV", "UV_NO_DEFAULT_GROUPS", "UV_NO_SOURCES", "UV_NO_BINARY", "UV_LOCKED", "UV_NO_SYNC"), "1"
    )
    with worker_at(
        tmp_path, **leak, UV_NO_GROUP="dev", UV_PYTHON="2.7", UV_PROJECT_ENVIRONMENT=str(tmp_path / "elsewhere")
    ) as client:
        assert client.run(WHERE, environment=block, timeout_seconds=60).json("version") == "1.17.0"
    assert not (tmp_path / "elsewhere").exists()


def test_settings_of_uv_in_the_temporary_folder_or_where_the_worker_was_started_reach_no_build(
    tmp_path, block, monkeypatch
):
    for name in ("tmp", "started"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "uv.toml").write_text("no-such-setting = 1\n")
        (tmp_path / name / "pyproject.toml").write_text(
            '[project]\nname = "x"\nversion = "1"\nrequires-python = ">=3.99"\n'
        )
    monkeypatch.chdir(tmp_path / "started")
    with worker_at(tmp_path, TMPDIR=str(tmp_path / "tmp"), STRATA_WORKER_RUN_ROOT=str(tmp_path)) as client:
        assert client.run(WHERE, environment=block, timeout_seconds=60).json("version") == "1.17.0"


def test_a_build_sees_index_logins_but_nothing_else_that_is_kept_from_cells(tmp_path, block):
    path = fake_uv(tmp_path / "bin", "env > %s" % (tmp_path / "seen"))
    hidden = {"STRATA_WORKER_TOKEN": "the-token", "DATABASE_PASSWORD": "the-password"}
    with worker_at(
        tmp_path,
        PATH=path,
        STRATA_NOTEBOOK_HARNESS_ENV_ALLOWLIST="SHOWN",
        SHOWN="shown",
        UV_INDEX_MINE_PASSWORD="index-login",
        **hidden,
    ) as client:
        client.token = "the-token"
        cell = client.run("import os\nseen = dict(os.environ)", environment=block, timeout_seconds=60).json("seen")
    seen = (tmp_path / "seen").read_text()
    assert "index-login" in seen and "shown" in seen and "the-token" not in seen and "the-password" not in seen
    assert cell["SHOWN"] == "shown" and not {"index-login", "the-token", "the-password"} & set(cell.values())


def test_a_locked_environment_comes_first_whatever_the_notebook_asks_for(env_worker, block):
    bundle = env_worker.run(
        "import os, shutil, six, sys\nfound = [shutil.which('python'), os.environ['VIRTUAL_ENV']]",
        environment=block,
        env={"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": "/elsewhere"},
        timeout_seconds=60,
    )
    assert all(path.startswith(str(env_worker.envs)) for path in bundle.json("found"))


def test_the_root_may_be_a_relative_path(tmp_path, block, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with worker_at(tmp_path, STRATA_WORKER_ENV_ROOT="relative") as client:
        assert (
            client.run(WHERE, environment=block, timeout_seconds=60)
            .json("where")[0]
            .startswith(str(tmp_path / "relative"))
        )


def test_console_scripts_of_a_built_environment_work(env_worker, tmp_path):
    block = lock_block(tmp_path / "scripts", dependencies=["tabulate==0.9.0"])
    bundle = env_worker.run(
        "import subprocess\nsaid = subprocess.run(['tabulate'], input='a b', capture_output=True, text=True).stdout",
        environment=block,
        timeout_seconds=60,
    )
    assert "a" in bundle.json("said")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"python": ["3.12"]}, "environment.python"),
        ({"python": {"a": 1}}, "environment.python"),
        ({"python": "", "pyproject": "a = " + "[" * 5000}, "environment.pyproject"),
        ({"python": "", "pyproject": "[project]\nrequires-python = [1]"}, "environment.python"),
        ({"python": "", "pyproject": "project = 7"}, "environment.pyproject"),
        ({"lockfile": "a = " + "[" * 5000}, "not a uv.lock"),
        ({"lockfile": "# \ud800"}, "environment.lockfile"),
        ({"pyproject": "# \ud800"}, "environment.pyproject"),
    ],
)
def test_a_python_block_of_any_shape_is_500_with_the_reason(env_worker, block, change, reason):
    answer = env_worker.execute("x = 1", environment={**block, **change})
    assert (
        answer.status == 500
        and answer.json["error"].startswith("locked environment: ")
        and reason in answer.json["error"]
    )
    assert env_worker.worker.log().count("Traceback") == 0


# Builds that end badly


def test_the_build_of_a_dead_worker_writes_nothing_into_the_next_one(tmp_path, block):
    stubborn = 'trap "" HUP TERM PIPE; echo $$ > {0}/pid; while :; do mkdir -p "$UV_PROJECT_ENVIRONMENT/lib"; echo x >> "$UV_PROJECT_ENVIRONMENT/lib/of-the-dead"; done'
    path = fake_uv(tmp_path / "bin", "[ -e {0}/pid ] || {{ {1}; }}".format(tmp_path, stubborn.format(tmp_path)))
    worker = worker_at(tmp_path, PATH=path)
    with worker as client, in_background(lambda: pytest.raises(OSError, client.execute, WHERE, environment=block)):
        eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the build runs")
        worker.process.kill()
    with worker_at(tmp_path, PATH=path) as client:
        assert client.run(WHERE, environment=block, timeout_seconds=60).json("version") == "1.17.0"
        assert not strata_worker.is_running(int((tmp_path / "pid").read_text()))
    assert not list((tmp_path / "envs").rglob("of-the-dead"))


def test_a_cancelled_build_leaves_no_process_and_no_file(tmp_path, block):
    path = fake_uv(
        tmp_path / "bin",
        'mkdir -p "$UV_PROJECT_ENVIRONMENT/bin"; setsid sleep 60 & echo $! > %s; wait' % (tmp_path / "pid"),
    )
    with (
        worker_at(tmp_path, PATH=path) as client,
        in_background(lambda: client.execute("x = 1", environment=block, build_id="b")) as answer,
    ):
        pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the build runs"))
        assert client.cancel("b")["cancelled"]
        assert answer(10).status == 409
        assert not strata_worker.is_running(pid)
        assert [entry.suffix for entry in (tmp_path / "envs").iterdir()] == [".lock"]


def test_a_run_that_waits_for_anothers_build_can_be_cancelled(tmp_path, block):
    path = fake_uv(tmp_path / "bin", "touch %s; sleep 60 & wait" % (tmp_path / "runs"))
    with worker_at(tmp_path, PATH=path) as one, worker_at(tmp_path, PATH=path) as two:
        with in_background(lambda: one.execute("x = 1", environment=block, build_id="builds")) as builds:
            eventually((tmp_path / "runs").exists, "the build runs")
            with in_background(lambda: two.execute("x = 1", environment=block, build_id="waits")) as waits:
                eventually(lambda: two.cancel("waits")["cancelled"], "it waits")
                assert waits(5).status == 409
            one.cancel("builds")
            assert builds(10).status == 409


def test_a_build_whose_fork_server_dies_is_not_taken_for_a_good_one(tmp_path, block):
    path = fake_uv(
        tmp_path / "bin",
        'mkdir -p "$UV_PROJECT_ENVIRONMENT/bin"; cp /bin/sh "$UV_PROJECT_ENVIRONMENT/bin/python"; touch {0}/runs; while [ ! -e {0}/go ]; do sleep 0.05; done; exit 1'.format(
            tmp_path
        ),
    )
    with (
        worker_at(tmp_path, PATH=path, STRATA_WORKER_PRELOAD="off") as client,
        in_background(lambda: client.execute("x = 1", environment=block)) as answer,
    ):
        eventually((tmp_path / "runs").exists, "the build runs")
        for pid in [pid for pid, command in processes_of(client.worker.process.pid) if "--fork-server" in command]:
            os.kill(pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert answer(20).status == 500
    assert not list((tmp_path / "envs").glob("*/.strata-complete"))


def test_a_build_that_prints_without_end_or_line_break_costs_no_memory(tmp_path, block):
    path = fake_uv(tmp_path / "bin", "head -c 50000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 3")
    with worker_at(tmp_path, PATH=path) as client:
        answer = client.execute("x = 1", environment=block)
        assert answer.status == 500 and answer.json["error"].endswith("the end") and len(answer.body) < 400_000


def test_an_environment_whose_python_is_gone_is_built_again(env_worker, block):
    env_worker.run(WHERE, environment=block, timeout_seconds=60)
    python = environment_of(env_worker) / "bin" / "python"
    python.unlink()
    python.symlink_to("/gone/with/the/old/image/python")
    assert env_worker.run(WHERE, environment=block, timeout_seconds=60).manifest["environment"]["installed"] is True


# Archives


def packed_tar(*members):
    return gzip.decompress(archive_of(*members))


HALVES = (
    ("bin/python", LINK, "/x/bin/python"),
    ("pyvenv.cfg", FILE, b"home = /x\n"),
    ("lib/a.py", FILE, bytes(5000)),
    ("lib/b.py", FILE, b"b" * 5000),
)


def header(name, kind, size):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


DAMAGED = {
    "a tar that breaks off before a member": gzip.compress(packed_tar(*HALVES)[: 512 * 4]),
    "a tar that breaks off in a member": gzip.compress(packed_tar(*HALVES)[: 512 * 8]),
    "a tar without its end": gzip.compress(packed_tar(*HALVES).rstrip(b"\0") + bytes(120)),
    "a header that is damaged": gzip.compress(packed_tar(*HALVES).replace(b"lib/b.py", b"lib/c.py")),
    "a checksum that is wrong": archive_of(*HALVES)[:-8] + b"0000" + archive_of(*HALVES)[-4:],
    "a gzip that breaks off": archive_of(*HALVES)[:-3],
    "a header of 64 MiB": gzip.compress(header("././@PaxHeader", b"x", 64 * 2**20) + bytes(64 * 2**20)),
    "a name of 64 MiB": gzip.compress(header("././@LongLink", b"L", 64 * 2**20) + b"a" * (64 * 2**20)),
    "a negative size": gzip.compress(packed_tar(*HALVES)[:12800] + header("a", FILE, -1024) + bytes(10240)),
    "no tar": gzip.compress(b"x" * 2000),
    "nothing": b"",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_archive_is_never_taken_for_a_whole_one(tmp_path, damage):
    (tmp_path / "archive").write_bytes(DAMAGED[damage])
    with pytest.raises(strata_worker.EnvironmentFailure):
        strata_worker.unpack(tmp_path / "archive", tmp_path / "env", 10**9, lambda: None, sys.executable)


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 512 * 12), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_an_archive_of_any_bytes_is_unpacked_inside_or_refused(changes):
    tar = bytearray(packed_tar(*HALVES))
    for at, data in changes:
        tar[at : at + len(data)] = data
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "archive").write_bytes(gzip.compress(bytes(tar), 1))
        with contextlib.suppress(strata_worker.EnvironmentFailure):
            strata_worker.unpack(folder / "archive", folder / "env", 10**6, lambda: None, sys.executable)
        assert sorted(path.name for path in folder.iterdir()) == ["archive", "env"]


def test_unpacking_uses_no_memory_for_what_a_header_says(tmp_path):
    (tmp_path / "archive").write_bytes(DAMAGED["a header of 64 MiB"])
    program = "import resource, strata_worker, sys; before = resource.getrusage(0).ru_maxrss\ntry: strata_worker.unpack(strata_worker.Path(sys.argv[1], 'archive'), strata_worker.Path(sys.argv[1], 'env'), 10**9, lambda: None)\nexcept strata_worker.EnvironmentFailure: print(resource.getrusage(0).ru_maxrss - before)"
    grown = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=HERE, capture_output=True, text=True, check=True
    ).stdout
    assert int(grown) < 16 * (1024 if sys.platform.startswith("linux") else 2**20)


def test_a_cancel_ends_the_unpacking_of_one_large_file(tmp_path):
    (tmp_path / "archive").write_bytes(archive_of(("large", FILE, bytes(20 * 2**20))))
    calls = iter(range(10**6))

    def check():
        if next(calls) == 10:
            raise strata_worker.run_failed("the execution was cancelled", 409)

    with pytest.raises(strata_worker.WorkerError, match="cancelled"):
        strata_worker.unpack(tmp_path / "archive", tmp_path / "env", 10**9, check)


def test_no_archive_writes_to_the_workers_interpreter(tmp_path, peer, block):
    """pyvenv.cfg may not be a link: one to bin/python would be one to the interpreter, and its home is rewritten."""
    (tmp_path / "interpreter").write_text("#!/bin/sh\nhome = 1\n")
    for at, members in enumerate(
        [[("pyvenv.cfg", LINK, "bin/python")], [("a", LINK, "bin/python"), ("pyvenv.cfg", LINK, "a")], []]
    ):
        archive = tmp_path / ("archive-%d" % at)
        archive.write_bytes(archive_of(("bin/python", LINK, "/x/bin/python"), *members))
        with pytest.raises(strata_worker.EnvironmentFailure, match="pyvenv.cfg"):
            strata_worker.unpack(archive, tmp_path / str(at), 10**6, lambda: None, str(tmp_path / "interpreter"))
            strata_worker.relocate(tmp_path / str(at), str(tmp_path / "interpreter"))
    assert (tmp_path / "interpreter").read_text() == "#!/bin/sh\nhome = 1\n"


def test_an_archive_packed_larger_than_the_limit_is_500_and_names_the_setting(tmp_path, peer, block):
    peer.blobs[registry_path(block["key"])] = archive_of(("big", FILE, os.urandom(200_000)))
    with registry_worker(tmp_path, peer, STRATA_WORKER_ENV_MAX_BYTES="100000") as client:
        answer = client.execute("x = 1", environment=block)
    assert (
        answer.status == 500
        and answer.json["error"].startswith("locked environment: ")
        and "STRATA_WORKER_ENV_MAX_BYTES" in answer.json["error"]
    )


def test_a_registry_that_cannot_be_reached_fails_the_cell(tmp_path, block):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = "http://127.0.0.1:%d" % taken.getsockname()[1]
    with worker_at(tmp_path, STRATA_WORKER_ENV_REGISTRY_URL=url) as client:
        answer = client.execute("x = 1", environment=block)
    assert answer.status == 500 and answer.json["error"].startswith("locked environment: ")


def test_an_archive_with_one_folder_around_it_is_welcome(tmp_path, peer, block, packed):
    box = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(packed)) as old, tarfile.open(fileobj=box, mode="w:gz") as new:
        for member in old:
            data = old.extractfile(member) if member.isreg() else None
            member.name = "env/" + member.name
            new.addfile(member, data)
    peer.blobs[registry_path(block["key"])] = box.getvalue()
    with registry_worker(tmp_path, peer) as client:
        assert client.run(WHERE, environment=block).json("version") == "from the registry"
    assert not list((tmp_path / "envs").glob("*.building"))


def test_a_fetched_environment_works_with_an_interpreter_that_is_a_link(tmp_path, packed):
    link = tmp_path / "bin" / "python3"
    link.parent.mkdir()
    link.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "archive").write_bytes(packed)
    strata_worker.unpack(tmp_path / "archive", tmp_path / "env", 10**9, lambda: None, str(link))
    strata_worker.relocate(tmp_path / "env", str(link))
    said = subprocess.run(
        [str(tmp_path / "env" / "bin" / "python"), "-c", "import six, sys, ssl; print(six.__version__, sys.prefix)"],
        capture_output=True,
        text=True,
    )
    assert said.stdout.strip() == "from the registry %s" % (tmp_path / "env") and said.stderr == ""


def test_a_real_environment_of_uv_can_be_served_and_moved(tmp_path, peer):
    block = lock_block(tmp_path / "notebook", dependencies=["six==1.17.0", "tabulate==0.9.0"])
    env = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "made"), "UV_PYTHON_DOWNLOADS": "never"}
    subprocess.run(
        [
            shutil.which("uv", path=path_with_uv()),
            "sync",
            "--quiet",
            "--frozen",
            "--no-install-project",
            "--python",
            sys.executable,
        ],
        cwd=tmp_path / "notebook",
        env=env,
        check=True,
    )
    box = io.BytesIO()
    with tarfile.open(fileobj=box, mode="w:gz") as tar:
        tar.add(tmp_path / "made", ".")
    shutil.rmtree(tmp_path / "made")
    peer.blobs[registry_path(block["key"])] = box.getvalue()
    with registry_worker(tmp_path, peer) as client:
        bundle = client.run(
            WHERE
            + "\nimport subprocess\nsaid = subprocess.run(['tabulate'], input='a b', capture_output=True, text=True).stdout",
            environment=block,
        )
    assert bundle.json("version") == "1.17.0" and "a" in bundle.json("said")


# The root


def aged(folder, days, marked=True):
    folder.mkdir(parents=True)
    strata_worker.lock_of(folder).touch()
    if marked:
        (folder / ".strata-complete").touch()
        os.utime(folder / ".strata-complete", (time.time() - days * 86400,) * 2)


def test_the_sweep_takes_what_is_old_or_was_never_finished_and_nothing_else(tmp_path):
    root = tmp_path / "envs"
    for name, days in (("old", 40), ("new", 1), ("r/old", 40), ("r/cache", 40)):
        aged(root / name, days)
    for name in ("half", "new.building", "half.building"):
        aged(root / name, 0, marked=False)
    for name in ("new.building.lock", "half.building.lock"):
        (root / name).unlink()
    (root / "somebody-elses").mkdir()
    root.chmod(0o2775)
    environments = strata_worker.Environments(strata_worker.Settings(env_root=str(root)), None, None)
    environments.sweep()
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir())
    assert left == ["new", "new.building", "r", "somebody-elses"]
    assert root.stat().st_mode & 0o7777 == 0o2775


def test_an_environment_that_is_being_built_is_not_swept(tmp_path, block):
    path = fake_uv(
        tmp_path / "bin",
        'mkdir -p "$UV_PROJECT_ENVIRONMENT"; touch {0}/runs; while [ ! -e {0}/go ]; do sleep 0.05; done; rmdir "$UV_PROJECT_ENVIRONMENT"'.format(
            tmp_path
        ),
    )
    with (
        worker_at(tmp_path, PATH=path) as client,
        in_background(lambda: client.run(WHERE, environment=block, timeout_seconds=60)) as bundle,
    ):
        eventually((tmp_path / "runs").exists, "the build runs")
        strata_worker.Environments(
            strata_worker.Settings(env_root=str(tmp_path / "envs"), env_max_idle_days=0.0), None, None
        ).sweep()
        (tmp_path / "go").touch()
        assert bundle(30).json("version") == "1.17.0"


def test_a_build_leaves_nothing_in_the_root_but_the_environment_and_its_lock(env_worker, block):
    env_worker.run(WHERE, environment=block, timeout_seconds=60)
    found = environment_of(env_worker).name
    assert sorted(path.name for path in env_worker.envs.iterdir()) == [found, found + ".lock"]
    assert found == "%s-%s" % (
        block["key"],
        run_command("--print-env-path", sys.executable).stdout.strip().replace("/", "-"),
    )


# R


@pytest.fixture
def r_block():
    need(shutil.which("Rscript"), "needs Rscript")
    lockfile = json.dumps(
        {"R": {"Version": "4.0.0"}, "Packages": {"alphaone": {"Package": "alphaone", "Version": "1.0"}}}
    )
    return {"key": hashlib.sha256(lockfile.encode()).hexdigest(), "lockfile": lockfile}


def r_registry_path(block):
    return "/r/%s/%s/%s" % (
        block["key"],
        *subprocess.run(["Rscript", "-e", strata_worker.DESCRIBE_R], capture_output=True, text=True).stdout.split(),
    )


def test_a_locked_library_comes_first_whatever_the_worker_or_the_notebook_says(tmp_path, peer, r_block):
    peer.blobs[r_registry_path(r_block)] = archive_of(("alphaone/DESCRIPTION", FILE, b"Package: alphaone\n"))
    for name in ("own", "asked"):
        (tmp_path / name).mkdir()
    with registry_worker(tmp_path, peer, R_LIBS=str(tmp_path / "own"), RENV_PROJECT="/elsewhere") as client:
        source = "paths <- .libPaths()\nproject <- Sys.getenv('RENV_PROJECT')"
        plain = client.execute(source, language="r", environment=r_block).bundle
        asked = client.execute(
            source, language="r", environment=r_block, env={"R_LIBS": str(tmp_path / "asked")}
        ).bundle
    for bundle, second in ((plain, "own"), (asked, "asked")):
        assert bundle.json("paths")[0].startswith(str(tmp_path / "envs" / "r")) and bundle.json("paths")[1] == str(
            tmp_path / second
        )
        assert bundle.json("project") == ""


@pytest.mark.parametrize(
    "lockfile",
    [
        '{"Packages": [{"a": 1}]}',
        '{"Packages": 7}',
        "[1]",
        "[" * 100_000,
        '{"Packages": {"..": {}}}',
        '{"Packages": {"a/b": {}}}',
        '"\ud800"',
    ],
)
def test_an_r_block_of_any_shape_is_500_with_the_reason(env_worker, r_block, lockfile):
    block = {"key": hashlib.sha256(lockfile.encode("utf-8", "surrogatepass")).hexdigest(), "lockfile": lockfile}
    answer = env_worker.execute("x <- 1", language="r", environment=block)
    assert answer.status == 500 and "environment.lockfile" in answer.json["error"]


def test_a_locked_r_cell_without_r_is_500_in_the_words_of_the_protocol(tmp_path):
    with worker_at(tmp_path, PATH="/nowhere") as client:
        answer = client.execute("x <- 1", language="r", environment={"key": "k", "lockfile": "{}"})
    assert answer.status == 500 and answer.json["error"] == "Rscript is not installed on this worker"
