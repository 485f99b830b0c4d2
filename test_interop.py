"""Tests with real peers: the Strata server, strata-pool, object stores. All on loopback.

    Peers            where they come from: environments made once, processes ended by pid
    Notebook         a real notebook, run by the real server here, there and by turns
    Signed           the same over the pull model, from a live server
    Pool             strata-pool with a backend that starts this worker
    Stores           presigned URLs of S3, Azure and Google Cloud storage
"""

import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from test_worker import Bundle, Client, Peer, WorkerProcess, eventually, need

# ---------------------------------------------------------------------------------------
# Peers: where they come from
# ---------------------------------------------------------------------------------------

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata-worker-tests"


def uv():
    """The uv command, from the tests' own environment first."""
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    need(found, "needs uv")
    return found


def new_python():
    """A Python that strata-notebook runs on, or None."""
    for minor in (12, 13, 14):
        found = [shutil.which("python3.%d" % minor), *Path.home().glob(".pyenv/versions/3.%d.*/bin/python" % minor)]
        for python in filter(None, found):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                done = subprocess.run([python, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=True)
                return done.stdout.strip()
    return None


@pytest.fixture(scope="session")
def strata():
    """The folder of an environment with the Strata server and strata-pool, made once."""
    python = new_python()
    need(python, "needs Python 3.12 or newer for strata-notebook")
    folder = CACHE / "strata-notebook-0.11"
    if not (folder / "complete").exists():
        run(uv(), "venv", "--quiet", "--clear", "--python", python, folder)
        run(uv(), "pip", "install", "--quiet", "--python", folder / "bin" / "python", "strata-notebook==0.11.*", "strata-pool==0.11.*")
        (folder / "complete").touch()
    return folder


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


@contextlib.contextmanager
def serving(command, url, **options):
    """A server process that answers at ``url``, ended by its pid."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        eventually(lambda: answers(url) or process.poll(), "%s answers" % command[0], 60)
        assert process.poll() is None, "%s ended with %s" % (command[0], process.returncode)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


# ---------------------------------------------------------------------------------------
# Notebook: a real notebook, run by the real server here, there and by turns
# ---------------------------------------------------------------------------------------

# Cells come in pairs: the second of a pair reads what the first made, so that running them
# by turns on the server and on the worker has each side read the other's files.
CELLS = {
    "json": "data = {'a': [1, 2.5, None, True], 'ž': 'é', 'nan': float('inf')}\nX = 7\nx = 8",
    "json_read": "seen_json = [data['a'], data['ž'], data['nan'] > 1e300, X, x]",
    "pandas": (
        "import pandas as pd\nframe = pd.DataFrame({'n': [1, 2], 's': ['a', 'ü'], 't': pd.to_datetime(['2020-01-01', None])}, index=['r1', 'r2'])\n"
        "series = pd.Series([1.5, 2.5], name='prices')\nmixed = pd.DataFrame({'m': [1, 'a']})"
    ),
    "pandas_read": "seen_pandas = [frame.to_json(), list(frame.index), str(frame.dtypes.to_dict()), series.name, list(series), mixed.m.tolist()]",
    "polars": "import polars as pl\npolar = pl.DataFrame({'n': [1, 2], 's': ['a', None]})",
    "polars_read": "seen_polars = [type(polar).__module__.split('.')[0], polar.to_dict(as_series=False)]",
    "numpy": "import numpy as np\narray = np.arange(6, dtype='int16').reshape(2, 3)\nwaves = np.array([1 + 2j])\nnumber = np.float32(1.5)",
    "numpy_read": "seen_numpy = [array.tolist(), str(array.dtype), waves[0].imag, str(waves.dtype), float(number)]",
    "scalars": (
        "import datetime, decimal, uuid\nwhen = datetime.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=datetime.timezone.utc)\nday = datetime.date(2024, 5, 6)\n"
        "price = decimal.Decimal('1.10')\nident = uuid.UUID(int=5)\nz = 1 + 2j\nraw = b'\\0\\xff'\nspan = datetime.timedelta(days=1, microseconds=1)"
    ),
    "scalars_read": "seen_scalars = [when.isoformat(), str(day), str(price), str(ident), str(z), list(raw), span.total_seconds()]",
    "pickle": "things = {1, 2, 3}\npair = (1, 'two')\nby_number = {1: 'one'}",
    "pickle_read": "seen_pickle = [sorted(things), list(pair), by_number[1]]",
    "function": "rate = 3\ndef scale(value):\n    return value * rate",
    "function_read": "seen_function = scale(4)",
    "class": "class Point:\n    def __init__(self, a):\n        self.a = a\n    def double(self):\n        return self.a * 2",
    "class_use": "point = Point(21)",
    "class_read": "seen_class = point.double()",
    "module": "import math as m",
    "module_read": "seen_module = m.floor(2.5)",
    "mutation": "items = [1]",
    "mutation_change": "items.append(2)",
    "mutation_read": "seen_mutation = items",
    "unicode_name": "Žluť = 5",
    "unicode_read": "seen_unicode = Žluť + 1",
    "await": "import asyncio\nawaited = await asyncio.sleep(0, 'done')",
    "await_read": "seen_await = awaited",
    "console": "import os, sys\nprint('to stdout')\nos.write(1, b'to descriptor\\n')\nprint('to stderr', file=sys.stderr)",
    "display": "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nMarkdown('**bold**')",
}
TROUBLE = {
    "fine": "x = 1",
    "raising": "print('before')\nraise ValueError('boom')",
    "timeout": "# @timeout 2\nimport time\ntime.sleep(30)",
    "crash": "import os\nos.abort()",
    "after": "seen_after = x + 1",
}
PYPROJECT = """[project]
name = "interop"
version = "0.1.0"
requires-python = ">=3.12"
dependencies = ["pyarrow", "orjson", "cloudpickle", "pandas==%s", "polars==%s", "numpy", "matplotlib"]
"""


def versions():
    import pandas
    import polars

    return pandas.__version__, polars.__version__


def make_notebook(folder, cells, worker=None, transport="direct", local=()):
    """A notebook's folder; its cells run on the worker, but for those named in ``local``."""
    (folder / "cells").mkdir(parents=True)
    toml = ['notebook_id = "%s"' % folder.name, 'name = "interop"']
    if worker:
        toml.append('worker = "remote"')
    for order, (name, source) in enumerate(cells.items()):
        (folder / "cells" / (name + ".py")).write_text(source)
        toml += ["[[cells]]", 'id = "%s"' % name, 'file = "%s.py"' % name, 'language = "python"', "order = %d" % order]
        toml += ['worker = "local"'] if name in local else []
    if worker:
        toml += ["[[workers]]", 'name = "remote"', 'backend = "executor"', "[workers.config]", 'url = "%s"' % worker, 'transport = "%s"' % transport]
    (folder / "notebook.toml").write_text("\n".join(toml) + "\n")
    (folder / "pyproject.toml").write_text(PYPROJECT % versions())
    return folder


def server_environment(strata):
    """As a person would start it: uv and the server's Python on PATH, and no setting of this machine's."""
    python = Path(os.path.realpath(strata / "bin" / "python")).parent
    path = os.pathsep.join([str(python), str(Path(uv()).parent), str(strata / "bin"), os.environ["PATH"]])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("STRATA_", "VIRTUAL_ENV"))}
    return {**clean, "PATH": path, "MPLBACKEND": "Agg"}


def run_notebook(strata, folder):
    """What ``strata run`` says of each cell, by its id."""
    done = subprocess.run(
        [str(strata / "bin" / "strata"), "run", str(folder), "--format", "json"],
        env=server_environment(strata), capture_output=True, text=True, timeout=300,
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    return {cell["id"]: cell for cell in json.loads(done.stdout)["cells"]}


@pytest.fixture(scope="session")
def notebooks(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="session")
def local_run(strata, notebooks):
    return run_notebook(strata, make_notebook(notebooks / "local", CELLS))


@pytest.fixture(scope="session")
def interop_worker():
    with WorkerProcess(STRATA_WORKER_ALLOW_LOCAL_HOSTS="1") as client:
        yield client


def contents(cell):
    """A cell's values that are bytes of JSON, by name: the same on both sides or wrong."""
    return {output["name"]: output["content_sha256"] for output in cell.get("outputs", []) if output["name"].startswith("seen_")}


def compare(remote, local):
    for name, cell in local.items():
        assert remote[name]["status"] == cell["status"] == "ok", (name, remote[name], cell)
        assert contents(remote[name]) == contents(cell), name
        assert remote[name].get("stdout") == cell.get("stdout"), name
        assert sorted(o["name"] for o in remote[name].get("outputs", [])) == sorted(o["name"] for o in cell.get("outputs", [])), name


def test_a_notebook_gives_cell_for_cell_what_it_gives_on_a_local_run(strata, notebooks, local_run, interop_worker):
    url = interop_worker.worker.url + "/v1/execute"
    compare(run_notebook(strata, make_notebook(notebooks / "direct", CELLS, url)), local_run)


@pytest.mark.parametrize("side", [0, 1])
def test_server_and_worker_read_each_others_values(strata, notebooks, local_run, interop_worker, side):
    """Producers here and consumers there, then the other way around."""
    consumers = {name for name in CELLS if name.endswith(("_read", "_use", "_change"))}
    local = consumers if side else set(CELLS) - consumers
    url = interop_worker.worker.url + "/v1/execute"
    compare(run_notebook(strata, make_notebook(notebooks / ("turns-%d" % side), CELLS, url, local=local)), local_run)


def test_cells_that_fail_are_told_apart_and_the_cell_after_them_runs(strata, notebooks, interop_worker):
    url = interop_worker.worker.url + "/v1/execute"
    cells = run_notebook(strata, make_notebook(notebooks / "trouble", TROUBLE, url))
    assert [cells[name]["status"] for name in TROUBLE] == ["ok", "error", "error", "error", "ok"]
    assert cells["raising"]["error"] == "ValueError: boom" and cells["raising"]["stdout"] == "before\n"
    assert "raise ValueError('boom')" in cells["raising"]["traceback"]
    assert "timed out after 2" in cells["timeout"]["error"]
    assert "SIGABRT" in cells["crash"]["error"]


# ---------------------------------------------------------------------------------------
# Signed: the same over the pull model, from a live server
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server(strata, notebooks):
    """The URL of a live server in personal mode."""
    port = free_port()
    env = {
        **server_environment(strata), "STRATA_PORT": str(port), "STRATA_HOST": "127.0.0.1",
        "STRATA_CACHE_DIR": str(notebooks / "cache"), "STRATA_ARTIFACT_DIR": str(notebooks / "artifacts"),
    }
    url = "http://127.0.0.1:%d" % port
    with serving([strata / "bin" / "strata-notebook", "--notebook-dir", notebooks], url + "/health", env=env, cwd=notebooks):
        yield url


def post(url, content, timeout=200):
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def open_notebook(server, folder):
    """The session of a notebook, once its environment is there."""
    session = post(server + "/v1/notebooks/open", {"path": str(folder)})["session_id"]
    eventually(lambda: (folder / ".venv" / "bin" / "python").exists(), "the notebook's environment is there", 120)
    return session


def run_cell(strata, server, session, cell):
    done = subprocess.run(
        [str(strata / "bin" / "strata"), "cell", "run", "--server", server, "--session", session, cell, "--format", "json"],
        env=server_environment(strata), capture_output=True, text=True, timeout=200,
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_notebook_runs_over_signed_urls(strata, notebooks, server, interop_worker):
    """A last cell that needs every other: the server runs them all, each as a signed build."""
    reads = {name: re.match(r"seen_\w+", source).group() for name, source in CELLS.items() if source.startswith("seen_")}
    cells = {**CELLS, "all": "import hashlib, json\nseen = [%s]\nprint(json.dumps(seen))" % ", ".join(reads.values())}
    session = open_notebook(server, make_notebook(notebooks / "signed", cells, interop_worker.worker.url, "signed"))
    answer = run_cell(strata, server, session, "all")
    assert answer["status"] == "ok", answer
    assert answer["execution_method"] == "executor"
    seen = dict(zip(reads.values(), json.loads(answer["stdout"])))
    assert seen["seen_numpy"] == [[[0, 1, 2], [3, 4, 5]], "int16", 2.0, "complex128", 1.5]
    assert seen["seen_function"] == 12 and seen["seen_class"] == 42 and seen["seen_mutation"] == [1, 2]
    for cell in ("console", "display"):
        assert run_cell(strata, server, session, cell)["status"] == "ok"
    assert interop_worker.worker.log().count("run nbbuild-") >= len(cells)


def test_signed_cells_that_fail_are_told_apart(strata, notebooks, server, interop_worker):
    session = open_notebook(server, make_notebook(notebooks / "signed-trouble", TROUBLE, interop_worker.worker.url, "signed"))
    answers = {name: run_cell(strata, server, session, name) for name in TROUBLE}
    assert [answers[name]["status"] for name in TROUBLE] == ["ok", "error", "error", "error", "ok"]
    assert "boom" in answers["raising"]["error"]
    assert "SIGABRT" in answers["crash"]["error"]


# ---------------------------------------------------------------------------------------
# Pool: strata-pool with a backend that starts this worker
# ---------------------------------------------------------------------------------------

# The pool runs under its own Python, so this travels as text; README shows the same backend.
POOL = '''
import asyncio, json, os, re, signal, sys, urllib.request
from strata_pool import MachineType, Pool, PoolStore, ProvisionedWorker

class LocalBackend:
    """Runs each machine as a process of this one: strata_worker.py on a free port."""

    name = "local"

    def __init__(self, command):
        self.command, self.processes = command, {}

    async def start(self, spec, env=None):
        process = await asyncio.create_subprocess_exec(
            *self.command, "--port", "0", env={**os.environ, **spec.env, **(env or {}), "STRATA_WORKER_HOST": "127.0.0.1"},
            stderr=asyncio.subprocess.PIPE)
        while True:
            line = (await process.stderr.readline()).decode()
            if not line:
                raise RuntimeError("the worker ended before it listened")
            found = re.search(r"listening on (\\S+)", line)
            if found:
                break
        asyncio.ensure_future(process.stderr.read())
        self.processes[str(process.pid)] = process
        return ProvisionedWorker(backend_id=str(process.pid), endpoint=found.group(1))

    async def stop(self, backend_id):
        process = self.processes.pop(backend_id, None)
        if process is not None and process.returncode is None:
            process.terminate()
            await process.wait()

    async def health(self, endpoint):
        def ask():
            with urllib.request.urlopen(endpoint + "/health", timeout=5) as answer:
                return answer.status == 200
        try:
            return await asyncio.to_thread(ask)
        except OSError:
            return False

async def main(command, store, manifests):
    backend = LocalBackend(command)
    machine = MachineType(name="local", image="", env={"STRATA_WORKER_ALLOW_LOCAL_HOSTS": "1"})
    pool = Pool(store=PoolStore(store), backend=backend, machine_types=[machine])
    await pool.recover()
    try:
        for name, manifest in manifests.items():
            job = await pool.submit(tenant_id="t", machine_type="local", payload=json.dumps(manifest).encode())
            if name == "cancel":
                while (await asyncio.to_thread(lambda: None)) or pool._store.get_job(job.id).state.value not in ("running",):
                    await asyncio.sleep(0.1)
                await asyncio.sleep(1)
                await pool.cancel(job.id, manifest["build_id"])
            done = await pool.wait(job.id, timeout=60)
            print(json.dumps({"name": name, "state": done.state.value, "error": done.error}), flush=True)
    finally:
        for backend_id in list(backend.processes):
            await backend.stop(backend_id)
        await pool.aclose()

asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
'''


@pytest.fixture
def peer():
    with contextlib.closing(Peer()) as peer:
        yield peer


def run_pool(strata, tmp_path, manifests):
    command = [sys.executable, str(Path(__file__).resolve().parent / "strata_worker.py")]
    done = run(strata / "bin" / "python", "-c", POOL, json.dumps(command), tmp_path / "pool.sqlite", json.dumps(manifests))
    return {line["name"]: line for line in map(json.loads, done.splitlines())}


def test_the_pool_runs_cancels_and_survives_a_crash_on_this_worker(strata, tmp_path, peer):
    manifests = {
        "submit": peer.manifest("y = x + 1", [("x", "json/object", b"41")], build_id="submit"),
        "cancel": peer.manifest("import time; time.sleep(60)", build_id="cancel"),
        "crash": peer.manifest("import os; os.abort()", build_id="crash"),
        "after": peer.manifest("z = 2", build_id="after"),
    }
    states = run_pool(strata, tmp_path, manifests)
    assert states["submit"]["state"] == "completed", states
    assert states["cancel"]["state"] == "cancelled", states
    assert states["crash"]["state"] == "failed" and "SIGABRT" in states["crash"]["error"]
    assert states["after"]["state"] == "completed"
    assert peer.bundle().json("y") == 42
    restarted = run_pool(strata, tmp_path, {"again": peer.manifest("x = 1", build_id="again")})
    assert restarted["again"]["state"] == "completed"
