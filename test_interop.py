"""Tests with real peers: the Strata server, strata-pool, object stores. All on loopback.

Peers            where they come from: environments made once, processes ended by pid
Notebook         a real notebook, run by the real server here, there and by turns
Signed           the same over the pull model, from a live server
Pool             strata-pool with a backend that starts this worker
R environments   renv and its libraries
Lock keys        the worker's own computation beside the server's
Stores           presigned URLs of S3, Azure and Google Cloud storage
R                harness.R, run as the worker runs it
Relay            the codec by itself, then a worker before relays on the websockets package
Listening        the other ways in, each on a real worker
Core             builds of a real server's POST /v1/materialize
Jobs             a real server that polls
Folders          a notebook with mounts and output folders, by every way that a server has
Through a relay  a real server, whose worker nobody can reach
"""

import base64
import contextlib
import datetime
import hashlib
import http.client
import http.server
import io
import json
import math
import os
import queue
import re
import shutil
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import urllib.parse
import urllib.request
import warnings
from pathlib import Path

import psutil
import pytest
import trustme
from hypothesis import given, settings, strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, SERVER
from websockets.sync.server import serve

import strata_worker
from test_worker import (
    Bundle,
    Peer,
    WorkerProcess,
    eventually,
    in_background,
    mounted,
    need,
    processes_of,
    settings as settings_of,
)
from strata_worker import (
    BINARY,
    CLOSE,
    Disconnected,
    FileSlice,
    FrameError,
    FrameReader,
    Handshake,
    MountCache,
    PING,
    PONG,
    Relay,
    RelayRefused,
    Response,
    Store,
    TEXT,
    WorkerError,
    error_response,
    frame,
    json_response,
    masked,
)

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
                done = subprocess.run(
                    [python, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=True
                )
                return done.stdout.strip()
    return None


@pytest.fixture(scope="session")
def strata():
    """The folder of an environment with the Strata server and strata-pool, made once."""
    python = new_python()
    need(python, "needs Python 3.12 or newer for strata-notebook")
    folder = CACHE / "strata-notebook-0.11-s3"
    if not (folder / "complete").exists():
        run(uv(), "venv", "--quiet", "--clear", "--python", python, folder)
        run(
            uv(),
            "pip",
            "install",
            "--quiet",
            "--python",
            folder / "bin" / "python",
            "strata-notebook[s3]==0.11.*",
            "strata-pool==0.11.*",
        )
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
    "values": (
        "import datetime, decimal, uuid\nimport numpy as np\nimport pandas as pd\nimport polars as pl\n"
        "data = {'a': [1, 2.5, None, True], 'ž': 'é', 'nan': float('inf')}\nX = 7\nx = 8\nété = 5\n"
        "frame = pd.DataFrame({'n': [1, 2], 's': ['a', 'ü'], 't': pd.to_datetime(['2020-01-01', None])}, index=['r1', 'r2'])\n"
        "series = pd.Series([1.5, 2.5], name='prices')\nmixed = pd.DataFrame({'m': [1, 'a']})\npolar = pl.DataFrame({'n': [1, 2], 's': ['a', None]})\n"
        "array = np.arange(6, dtype='int16').reshape(2, 3)\nwaves = np.array([1 + 2j])\nnumber = np.float32(1.5)\n"
        "when = datetime.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=datetime.timezone.utc)\nday = datetime.date(2024, 5, 6)\n"
        "price = decimal.Decimal('1.10')\nident = uuid.UUID(int=5)\nz = 1 + 2j\nraw = b'\\0\\xff'\nspan = datetime.timedelta(days=1, microseconds=1)\n"
        "things = {1, 2, 3}\npair = (1, 'two')\nby_number = {1: 'one'}"
    ),
    "values_read": (
        "seen_values = [data['a'], data['ž'], data['nan'] > 1e300, X, x, été, frame.to_json(), list(frame.index), str(frame.dtypes.to_dict()), series.name,"
        " list(series), mixed.m.tolist(), type(polar).__module__.split('.')[0], polar.to_dict(as_series=False), array.tolist(), str(array.dtype), waves[0].imag,"
        " str(waves.dtype), float(number), when.isoformat(), str(day), str(price), str(ident), str(z), list(raw), span.total_seconds(), sorted(things),"
        " list(pair), by_number[1]]"
    ),
    "function": "rate = 3\ndef scale(value):\n    return value * rate",
    "function_read": "seen_function = scale(4)",
    "class": "class Point:\n    def __init__(self, a):\n        self.a = a\n    def double(self):\n        return self.a * 2",
    "class_use": "point = Point(21)",
    "class_read": "seen_class = point.double()",
    "module": "import math as m\nitems = [1]",
    "module_read": "seen_module = m.floor(2.5)",
    "mutation_change": "items.append(2)",
    "mutation_read": "seen_mutation = items",
    "console": "import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)",
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
dependencies = ["pyarrow", "orjson", "cloudpickle"%s]
"""
LIBRARIES = ', "pandas==%s", "polars==%s", "numpy", "matplotlib"'


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
        toml += [
            "[[workers]]",
            'name = "remote"',
            'backend = "executor"',
            "[workers.config]",
            'url = "%s"' % worker,
            'transport = "%s"' % transport,
        ]
    (folder / "notebook.toml").write_text("\n".join(toml) + "\n")
    needs_libraries = "import pandas" in "".join(cells.values())  # else its environment is made in a moment
    (folder / "pyproject.toml").write_text(PYPROJECT % (LIBRARIES % versions() if needs_libraries else ""))
    return folder


def server_environment(strata):
    """As a person would start it: uv and the server's Python on PATH, and no setting of this machine's."""
    python = Path(os.path.realpath(strata / "bin" / "python")).parent
    path = os.pathsep.join([str(python), str(Path(uv()).parent), str(strata / "bin"), os.environ["PATH"]])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("STRATA_", "VIRTUAL_ENV"))}
    return {**clean, "PATH": path, "MPLBACKEND": "Agg"}


def run_notebook(strata, folder, **env):
    """What ``strata run`` says of each cell, by its id."""
    done = subprocess.run(
        [str(strata / "bin" / "strata"), "run", str(folder), "--format", "json"],
        env={**server_environment(strata), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    return {cell["id"]: cell for cell in json.loads(done.stdout)["cells"]}


@pytest.fixture(scope="session")
def notebooks(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="session")
def local_run(strata, notebooks):
    """A local run of the notebook: its folder, and what was said of each cell."""
    folder = make_notebook(notebooks / "local", CELLS)
    return folder, run_notebook(strata, folder)


@pytest.fixture(scope="session")
def interop_worker(strata, notebooks):
    env = {"PATH": server_environment(strata)["PATH"], "STRATA_WORKER_ENV_ROOT": str(notebooks / "environments")}
    with WorkerProcess(STRATA_WORKER_ALLOW_LOCAL_HOSTS="1", **env) as client:
        yield client


def contents(folder, cell):
    """A cell's JSON values by name, as the server stored them. Their layout is the writer's own."""
    blobs = folder / ".strata" / "artifacts" / "blobs"
    return {
        output["name"]: json.loads((blobs / ("%(artifact_id)s@v=%(version)d.arrow" % output)).read_bytes())
        for output in cell.get("outputs", [])
        if output["name"].startswith("seen_")
    }


def compare(folder, remote, local_run):
    local_folder, local = local_run
    assert set(remote) == set(local)
    for name, cell in local.items():
        assert remote[name]["status"] == cell["status"] == "ok", (name, remote[name], cell)
        assert contents(folder, remote[name]) == contents(local_folder, cell), name
        assert remote[name].get("stdout") == cell.get("stdout"), name
        assert sorted(o["name"] for o in remote[name].get("outputs", [])) == sorted(
            o["name"] for o in cell.get("outputs", [])
        ), name


def test_a_notebook_gives_cell_for_cell_what_it_gives_on_a_local_run(strata, notebooks, local_run, interop_worker):
    url = interop_worker.worker.url + "/v1/execute"
    folder = make_notebook(notebooks / "direct", CELLS, url)
    compare(folder, run_notebook(strata, folder), local_run)


@pytest.mark.parametrize("side", [0, 1])
def test_server_and_worker_read_each_others_values(strata, notebooks, local_run, interop_worker, side):
    """Producers here and consumers there, then the other way around."""
    consumers = {name for name in CELLS if name.endswith(("_read", "_use", "_change"))}
    local = consumers if side else set(CELLS) - consumers
    url = interop_worker.worker.url + "/v1/execute"
    folder = make_notebook(notebooks / ("turns-%d" % side), CELLS, url, local=local)
    compare(folder, run_notebook(strata, folder), local_run)


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


@contextlib.contextmanager
def strata_server(strata, folder, **env):
    """The URL of a live server in personal mode, over the notebooks in a folder."""
    port = free_port()
    env = {
        **server_environment(strata),
        "STRATA_PORT": str(port),
        "STRATA_HOST": "127.0.0.1",
        "STRATA_CACHE_DIR": str(folder / "cache"),
        "STRATA_ARTIFACT_DIR": str(folder / "artifacts"),
        **env,
    }
    url = "http://127.0.0.1:%d" % port
    command = [strata / "bin" / "strata-notebook", "--notebook-dir", folder]
    with serving(command, url + "/health", env=env, cwd=folder):
        yield url


@pytest.fixture(scope="session")
def server(strata, notebooks):
    with strata_server(strata, notebooks) as url:
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
        [
            str(strata / "bin" / "strata"),
            "cell",
            "run",
            "--server",
            server,
            "--session",
            session,
            cell,
            "--format",
            "json",
        ],
        env=server_environment(strata),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_notebook_runs_over_signed_urls(strata, notebooks, server, interop_worker):
    """A last cell that needs every other: the server runs them all, each as a signed build."""
    reads = {
        name: re.match(r"seen_\w+", source).group() for name, source in CELLS.items() if source.startswith("seen_")
    }
    cells = {**CELLS, "all": "import hashlib, json\nseen = [%s]\nprint(json.dumps(seen))" % ", ".join(reads.values())}
    session = open_notebook(server, make_notebook(notebooks / "signed", cells, interop_worker.worker.url, "signed"))
    answer = run_cell(strata, server, session, "all")
    assert answer.get("status") == "ok", json.dumps(answer)
    assert answer["execution_method"] == "executor"
    seen = dict(zip(reads.values(), json.loads(answer["stdout"])))
    assert len(seen["seen_values"]) == 29 and seen["seen_values"][14:16] == [[[0, 1, 2], [3, 4, 5]], "int16"]
    assert seen["seen_function"] == 12 and seen["seen_class"] == 42
    for cell in ("console", "display"):
        assert run_cell(strata, server, session, cell)["status"] == "ok"
    # The last run logs its line after its answer; what nothing needs is not run for the last cell.
    eventually(
        lambda: interop_worker.worker.log().count("run nbbuild-") >= len(cells) - 1, "each cell was a signed build"
    )


def test_signed_cells_that_fail_are_told_apart(strata, notebooks, server, interop_worker):
    session = open_notebook(
        server, make_notebook(notebooks / "signed-trouble", TROUBLE, interop_worker.worker.url, "signed")
    )
    answers = {name: run_cell(strata, server, session, name) for name in ("raising", "crash", "after")}
    assert [answer["status"] for answer in answers.values()] == ["error", "error", "ok"]
    assert "boom" in answers["raising"]["error"]
    assert "SIGABRT" in answers["crash"]["error"]


# ---------------------------------------------------------------------------------------
# Pool: strata-pool with a backend that starts this worker
# ---------------------------------------------------------------------------------------


def backend_of_the_readme():
    """README's example of a Backend, as it can be pasted; the pool runs it under its own Python."""
    readme = (Path(__file__).parent / "README.md").read_text()
    block = re.search(r"^    import asyncio, os(?:    .*\n|.*\n(?=    |\n))+?(?=    pool = Pool)", readme, re.MULTILINE)
    return "import json, sys\n" + textwrap.dedent(block.group())


BACKEND = backend_of_the_readme()

POOL = (
    BACKEND
    + """
async def main(command, store, manifests):
    backend = LocalBackend(command)
    machine = MachineType(name="local", image="", env={"STRATA_WORKER_ALLOW_LOCAL_HOSTS": "1"})
    pool = Pool(store=PoolStore(store), backend=backend, machine_types=[machine])
    await pool.recover()
    try:
        for name, manifest in manifests.items():
            job = await pool.submit(tenant_id="t", machine_type="local", payload=json.dumps(manifest).encode())
            if name == "cancel":
                while pool.store.get_job(job.id).state.value != "running":
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
"""
)


@pytest.fixture
def peer():
    with contextlib.closing(Peer()) as peer:
        yield peer


def run_pool(strata, tmp_path, manifests):
    command = [sys.executable, str(Path(__file__).resolve().parent / "strata_worker.py")]
    done = run(
        strata / "bin" / "python", "-c", POOL, json.dumps(command), tmp_path / "pool.sqlite", json.dumps(manifests)
    )
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


# ---------------------------------------------------------------------------------------
# R environments: renv and its libraries
# ---------------------------------------------------------------------------------------


def r_says(expression):
    done = subprocess.run(["Rscript", "-e", "cat(isTRUE(%s))" % expression], capture_output=True, text=True)
    return done.stdout == "TRUE"


@pytest.fixture(scope="session")
def r_lock(tmp_path_factory):
    """The ``environment`` block of a lock with two packages of a repository made here."""
    need(shutil.which("Rscript"), "needs Rscript")
    folder = tmp_path_factory.mktemp("r")
    contrib = folder / "repository" / "src" / "contrib"
    contrib.mkdir(parents=True)
    for name, version, needs in (("betaone", "0.2.0", ""), ("alphaone", "1.0.1", "Imports: betaone\n")):
        package = folder / name
        package.mkdir()
        (package / "DESCRIPTION").write_text(
            "Package: %s\nVersion: %s\nTitle: T\nDescription: D.\nAuthor: A\nMaintainer: A <a@b.c>\nLicense: none\n%s"
            % (name, version, needs)
        )
        (package / "NAMESPACE").write_text("export(hello)\n")
        (package / "hello.R").parent.joinpath("R").mkdir()
        (package / "R" / "hello.R").write_text('hello <- function() "from %s"\n' % name)
        run("R", "CMD", "build", package, cwd=contrib)
    run("Rscript", "-e", 'tools::write_PACKAGES("%s", type = "source")' % contrib)
    packages = {
        "alphaone": {
            "Package": "alphaone",
            "Version": "1.0.1",
            "Source": "Repository",
            "Repository": "LOCAL",
            "Requirements": ["betaone"],
        },
        "betaone": {"Package": "betaone", "Version": "0.2.0", "Source": "Repository", "Repository": "LOCAL"},
        "renv": {"Package": "renv", "Version": "99.0.0", "Source": "Repository", "Repository": "LOCAL"},
    }
    version = run("Rscript", "-e", 'cat(R.version$major, R.version$minor, sep = ".")')
    repositories = [{"Name": "LOCAL", "URL": "file://%s" % (folder / "repository")}]
    lock = json.dumps({"R": {"Version": version, "Repositories": repositories}, "Packages": packages})
    return {"key": hashlib.sha256(lock.encode()).hexdigest(), "lockfile": lock}


HELLO = "said <- alphaone::hello()\nwhere <- find.package('alphaone')"


@pytest.fixture
def r_worker(tmp_path):
    with WorkerProcess(STRATA_WORKER_ENV_ROOT=str(tmp_path / "envs"), STRATA_WORKER_ALLOW_LOCAL_HOSTS="1") as client:
        client.envs = tmp_path / "envs"
        yield client


def test_an_r_cell_runs_through_the_worker(interop_worker):
    need(shutil.which("Rscript"), "needs Rscript")
    assert "r" in interop_worker.health()["capabilities"]["features"]["languages"]
    bundle = interop_worker.execute("y <- x + 0.1\nprint(y)", [("x", "json/object", b"0.2")], language="r").bundle
    assert bundle.json("y") == 0.2 + 0.1 and bundle.stdout.startswith("[1] 0.3")
    failed = interop_worker.execute("f <- function() stop('boom')\nf()", language="r").bundle
    assert failed.manifest["success"] is False and "boom" in failed.manifest["error"]


def test_an_r_cell_that_is_killed_leaves_no_temporary_folder(tmp_path):
    need(shutil.which("Rscript"), "needs Rscript")
    with WorkerProcess(TMPDIR=str(tmp_path)) as client:
        answer = client.execute("file.create(tempfile())\nSys.sleep(60)", language="r", timeout_seconds=2)
        assert answer.status == 408
        # A probe of R, for /health, removes its own.
        eventually(lambda: not list(tmp_path.glob("**/Rtmp*")), "nothing of R is left")


def test_an_r_lock_is_restored_once_and_used_by_the_cell(r_worker, r_lock):
    if not r_says('requireNamespace("renv", quietly = TRUE)'):
        pytest.skip("needs the R package renv")
    eventually(lambda: r_worker.health()["capabilities"]["features"]["locked_r_environments"] is True, "renv is found")
    first = r_worker.execute(HELLO, language="r", environment=r_lock, timeout=120).bundle
    assert first.json("said") == "from alphaone" and first.json("where").startswith(str(r_worker.envs / "r"))
    assert first.manifest["environment"] == {"key": r_lock["key"], "installed": True}
    again = r_worker.execute(HELLO, language="r", environment=r_lock).bundle
    assert again.manifest["environment"]["installed"] is False


def test_an_r_library_is_fetched_from_the_registry_when_it_is_whole(tmp_path, peer, r_lock):
    version, platform = run("Rscript", "-e", strata_worker.DESCRIBE_R).split()
    library = tmp_path / "library"
    library.mkdir()
    contrib = json.loads(r_lock["lockfile"])["R"]["Repositories"][0]["URL"][len("file://") :] + "/src/contrib"
    path = "/r/%s/%s/%s" % (r_lock["key"], version, platform)
    env = {
        "STRATA_WORKER_ENV_ROOT": str(tmp_path / "envs"),
        "STRATA_WORKER_ENV_REGISTRY_URL": peer.url,
        "STRATA_WORKER_ALLOW_LOCAL_HOSTS": "1",
    }
    with WorkerProcess(**env) as client:
        for package in ("betaone_0.2.0", "alphaone_1.0.1"):
            run(
                "R",
                "CMD",
                "INSTALL",
                "--no-docs",
                "--library=%s" % library,
                "%s/%s.tar.gz" % (contrib, package),
                env={**os.environ, "R_LIBS": str(library)},
            )
            peer.blobs[path] = packed_folder(library)
            answer = client.execute(HELLO, language="r", environment=r_lock)
            if package.startswith("betaone"):
                assert answer.status == 500 and "lacks alphaone" in answer.json["error"]
        assert answer.bundle.json("said") == "from alphaone"
        os.rename(library / "betaone", tmp_path / "cached")
        os.symlink(tmp_path / "cached", library / "betaone")
        peer.blobs[path] = packed_folder(library)
        shutil.rmtree(tmp_path / "envs" / "r")
        linked = client.execute(HELLO, language="r", environment=r_lock)
    assert linked.status == 500 and "link" in linked.json["error"]


def packed_folder(folder):
    box = io.BytesIO()
    with tarfile.open(fileobj=box, mode="w:gz") as tar:
        tar.add(folder, ".")
    return box.getvalue()


@pytest.mark.parametrize(
    "change, reason",
    [({"key": "0" * 64}, "not the key"), ({"lockfile": "{"}, "not JSON"), ({"lockfile": None}, "missing")],
)
def test_an_r_lock_that_cannot_be_restored_is_500_with_the_reason(interop_worker, r_lock, change, reason):
    answer = interop_worker.execute("x <- 1", language="r", environment={**r_lock, **change})
    assert answer.status == 500 and reason in answer.json["error"]


# ---------------------------------------------------------------------------------------
# Lock keys: the worker's own computation beside the server's
# ---------------------------------------------------------------------------------------

PROJECTS = {
    "virtual": {"": ("six",)},
    "editable": {"": ("six",), "build": True},
    "extras": {"": ("requests[socks]",)},
    "markers": {"": ("six; python_version < '3.13'", "colorama; sys_platform == 'win32'")},
    "dev group": {"": ("six",), "more": '[dependency-groups]\ndev = ["iniconfig"]\nlint = ["packaging"]\n'},
    "own extras": {"": ("six",), "more": '[project.optional-dependencies]\nfast = ["idna"]\n'},
    "sources": {
        "": ("six",),
        "more": '[tool.uv]\nconstraint-dependencies = ["six<2"]\noverride-dependencies = ["six==1.16.0"]\n',
    },
    "workspace": {
        "": ("member",),
        "more": '[tool.uv.sources]\nmember = { workspace = true }\n[tool.uv.workspace]\nmembers = ["member"]\n',
        "member": True,
    },
    "workspace editable": {
        "": ("member",),
        "build": True,
        "more": '[tool.uv.sources]\nmember = { workspace = true }\n[tool.uv.workspace]\nmembers = ["member"]\n',
        "member": True,
    },
    "path": {"": ("member",), "more": '[tool.uv.sources]\nmember = { path = "member" }\n', "member": True},
    "conflicts": {
        "": (),
        "more": '[project.optional-dependencies]\na = ["six==1.16.0"]\nb = ["six==1.17.0"]\n[tool.uv]\nconflicts = [[{ extra = "a" }, { extra = "b" }]]\n',
    },
    "empty": {"": ()},
}
BUILD = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'


def lock_project(folder, name, project):
    head = '[project]\nname = "%s"\nversion = "0.1.0"\nrequires-python = ">=3.9"\ndependencies = %s\n'
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        head % (name, json.dumps(list(project[""]))) + project.get("more", "") + (BUILD if project.get("build") else "")
    )
    if project.get("member"):
        (folder / "member").mkdir()
        (folder / "member" / "pyproject.toml").write_text(head % ("member", '["six"]') + BUILD)
    run(uv(), "lock", "--quiet", "--python", sys.executable, cwd=folder)
    return (folder / "uv.lock").read_text()


def test_a_locks_key_is_the_one_the_server_computes(strata, tmp_path):
    if sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    locks = {
        name: lock_project(tmp_path / name.replace(" ", "-"), "a-notebook", project)
        for name, project in PROJECTS.items()
    }
    program = "import json, sys; from strata.notebook.env import uv_lock_key; print(json.dumps({n: uv_lock_key(t) for n, t in json.load(open(sys.argv[1])).items()}))"
    (tmp_path / "locks.json").write_text(json.dumps(locks))
    theirs = json.loads(run(strata / "bin" / "python", "-c", program, tmp_path / "locks.json"))
    assert {name: strata_worker.uv_lock_key(text) for name, text in locks.items()} == theirs
    assert len(set(theirs.values())) > len(PROJECTS) / 2  # virtual and editable roots, say, are one


# ---------------------------------------------------------------------------------------
# Stores: presigned URLs of S3, Azure and Google Cloud storage
# ---------------------------------------------------------------------------------------


class S3:
    """moto's S3 server, with presigned GET and POST made by boto3."""

    def __init__(self, url):
        import boto3

        self.client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
        )
        self.client.create_bucket(Bucket="bucket")

    def input(self, name, data):
        self.client.put_object(Bucket="bucket", Key=name, Body=data)
        return self.client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": name})

    def output(self, name):
        post = self.client.generate_presigned_post("bucket", name, Conditions=[["content-length-range", 1, 10**9]])
        return {"url": post["url"], "fields": post["fields"]}

    def read(self, name):
        return self.client.get_object(Bucket="bucket", Key=name)["Body"].read()


class Azure:
    """Azurite, with SAS URLs made by azure-storage-blob."""

    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own, in its manual
    ACCOUNT = "devstoreaccount1"

    def __init__(self, url):
        from azure.storage.blob import BlobServiceClient

        self.url = "%s/%s" % (url, self.ACCOUNT)
        self.container = BlobServiceClient(self.url, credential=self.KEY).create_container("container")

    def signed(self, name, **permissions):
        from azure.storage.blob import BlobSasPermissions, generate_blob_sas

        expiry = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
        sas = generate_blob_sas(
            self.ACCOUNT,
            "container",
            name,
            account_key=self.KEY,
            permission=BlobSasPermissions(**permissions),
            expiry=expiry,
        )
        return "%s/container/%s?%s" % (self.url, name, sas)

    def input(self, name, data):
        self.container.upload_blob(name, data)
        return self.signed(name, read=True)

    def output(self, name):
        return {
            "url": self.signed(name, create=True, write=True),
            "method": "PUT",
            "headers": {"x-ms-blob-type": "BlockBlob"},
        }

    def read(self, name):
        return self.container.download_blob(name).readall()


class GoogleCloud:
    """A storage emulator that takes signed URLs without looking at the signature. It knows no
    form uploads, so its output is a signed PUT."""

    def __init__(self, url):
        self.url = url

    def signed(self, name):
        return "%s/bucket/%s?X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Signature=00" % (self.url, name)

    def input(self, name, data):
        request = urllib.request.Request(
            self.signed(name), data, {"Content-Type": "application/octet-stream"}, method="PUT"
        )
        urllib.request.urlopen(request).close()
        return self.signed(name)

    def output(self, name):
        return {"url": self.signed(name), "method": "PUT", "headers": {}}

    def read(self, name):
        with urllib.request.urlopen(self.signed(name)) as answer:
            return answer.read()


def program(name):
    """A command of the tests' own environment, else of PATH, else of the cache's npm packages."""
    places = [Path(sys.executable).parent / name, CACHE / "node_modules" / ".bin" / name, shutil.which(name)]
    return next((str(place) for place in places if place and Path(place).exists()), None)


STORES = {
    "S3": (S3, "moto_server", ["-H", "127.0.0.1", "-p"]),
    "Azure": (Azure, "azurite-blob", ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort"]),
    "GoogleCloud": (
        GoogleCloud,
        "gcp-storage-emulator",
        ["start", "--host=127.0.0.1", "--in-memory", "--default-bucket=bucket", "--port"],
    ),
}


@pytest.fixture(scope="session", params=STORES)
def store(request, tmp_path_factory):
    kind, name, arguments = STORES[request.param]
    command = program(name)
    need(command, "needs %s" % name)
    port = free_port()
    with serving([command, *arguments, port], "http://127.0.0.1:%d" % port, cwd=tmp_path_factory.mktemp("store")):
        yield kind("http://127.0.0.1:%d" % port)


def test_a_manifest_goes_from_a_store_to_a_store_by_its_own_signed_urls(store, peer, interop_worker):
    manifest = peer.manifest("y = x + 1\nblob = bytes(3 * 2**20)", [("x", "json/object", b"41")])
    manifest["inputs"][0]["url"] = store.input("in/x.json", b"41")
    manifest["output"] = {**store.output("builds/1/bundle.tar"), "max_bytes": 10**9}
    answer = interop_worker.manifest(manifest)
    assert answer.status == 200, answer.body
    bundle = Bundle(store.read("builds/1/bundle.tar"))
    assert bundle.json("y") == 42 and answer.json["byte_size"] == len(store.read("builds/1/bundle.tar"))


def test_a_store_that_says_no_is_502_with_its_status_and_no_signature(store, peer, interop_worker):
    manifest = peer.manifest("y = x", [("x", "json/object", b"1")])
    manifest["inputs"][0]["url"] = store.input("in/gone", b"1").replace("in/gone", "in/missing")
    answer = interop_worker.manifest(manifest)
    assert answer.status == 502 and re.search(r"'x'.*40[34]", answer.json["detail"])
    assert "ignature" not in answer.json["detail"] and "sig=" not in answer.json["detail"]


# ---------------------------------------------------------------------------------------
# Mounts: the whole way, on S3, Azure and Google Cloud storage
# ---------------------------------------------------------------------------------------


def mount_on(store, path, name="data", mode="ro", **options):
    """A mount of what the ``store`` of test_interop.py holds below ``path``."""
    kind = type(store).__name__
    if kind == "S3":
        uri = "s3://bucket"
        own = {"key": "k", "secret": "s", "endpoint_url": store.client.meta.endpoint_url}
    elif kind == "Azure":
        uri = "az://container"
        own = {
            "connection_string": "AccountName=%s;AccountKey=%s;BlobEndpoint=%s" % (store.ACCOUNT, store.KEY, store.url)
        }
    else:
        uri, own = "gs://bucket", {"token": "anon", "endpoint_url": store.url}
    return mounted("%s/%s" % (uri, path), name, mode=mode, options={**own, **options})


@pytest.fixture(scope="module")
def mounting(tmp_path_factory):
    cache = tmp_path_factory.mktemp("mount-cache")
    with WorkerProcess(STRATA_NOTEBOOK_MOUNT_CACHE_DIR=str(cache), STRATA_WORKER_STALL_SECONDS="5") as client:
        client.cache = cache
        yield client


@pytest.fixture
def prefix(request):
    return hashlib.sha256(request.node.name.encode()).hexdigest()[:8]


LIST = "seen = {str(p.relative_to(data)): p.read_text() for p in data.rglob('*') if p.is_file()}"


def test_a_read_only_mount_is_a_folder_and_is_fetched_once(store, mounting, prefix):
    names = ["a.txt", "sub/deep er/ü+&.txt"]
    for name in names:
        store.input(
            "%s/%s" % (prefix, urllib.parse.quote(name) if type(store).__name__ == "GoogleCloud" else name),
            name.encode(),
        )
    store.input(prefix + "-beside/x", b"not in it")
    mount = mount_on(store, prefix)
    for moved in (sum(len(name.encode()) for name in names[:2]), 0):
        bundle = mounting.run(LIST, mounts=[mount])
        assert bundle.json("seen") == {"a.txt": "a.txt", "sub/deep er/ü+&.txt": "sub/deep er/ü+&.txt"}
        assert bundle.manifest["mount_bytes"] == {"data": moved} and bundle.manifest["mount_writes"] == []


def test_an_object_that_changed_is_fetched_again_be_it_of_the_same_size_and_second(store, mounting, prefix):
    for content in (b"one", b"two", b"six"):
        store.input(prefix + "/f", content) if not hasattr(store, "container") else store.container.upload_blob(
            prefix + "/f", content, overwrite=True
        )
        bundle = mounting.run(LIST, mounts=[mount_on(store, prefix)])
        assert bundle.json("seen") == {"f": content.decode()} and bundle.manifest["mount_bytes"] == {"data": 3}


def test_a_cell_that_writes_to_a_read_only_mount_or_to_the_cache_spoils_it_for_nobody(store, mounting, prefix):
    store.input(prefix + "/f", b"good")
    mounts = [mount_on(store, prefix)]
    mounting.run("import os\nos.chmod(data / 'f', 0o600)\n(data / 'f').write_text('evil')", mounts=mounts)
    assert mounting.run(LIST, mounts=mounts).json("seen") == {"f": "good"}
    evil = (
        "import pathlib\nfor p in pathlib.Path(%r).rglob('*'):\n    if p.is_file() and p.suffix != '.json': p.write_text('evil')"
        % str(mounting.cache)
    )
    mounting.run(evil)
    assert mounting.run(LIST, mounts=mounts).json("seen") == {"f": "good"}


def test_a_writable_mount_is_written_back_where_it_changed(store, mounting, prefix):
    # Large enough for several parts; the Google emulator stalls on uploads in parts.
    size = 300_000 if type(store).__name__ == "GoogleCloud" else 20 * 2**20 + 1
    for name in ("same", "touched", "changed", "gone"):
        store.input("%s/%s" % (prefix, name), b"old")
    source = (
        "import os\n(data / 'touched').write_text('old')\n(data / 'changed').write_text('new')\n(data / 'gone').unlink()\n"
        "(data / 'a b').mkdir()\n(data / 'a b' / 'ž').write_text('made')\nos.symlink('/etc/passwd', data / 'link')\n"
        "(data / 'big.gz').write_bytes(b'x' * %d)"
    ) % size
    mount = mount_on(store, prefix, mode="rw")
    bundle = mounting.run(source, mounts=[mount])
    big = b"x" * size
    files = [
        {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in (("a b/ž", b"made"), ("big.gz", big), ("changed", b"new"))
    ]
    assert bundle.manifest["mount_writes"] == [{"mount": "data", "uri": mount["uri"], "files": files}]
    assert bundle.manifest["mount_bytes"] == {"data": 12}
    assert [store.read("%s/%s" % (prefix, name)) for name in ("changed", "same", "gone", "big.gz")] == [
        b"new",
        b"old",
        b"old",
        big,
    ]
    assert "'link' is left out" in bundle.stderr
    source = "seen = [len((data / 'big.gz').read_bytes()), (data / 'a b' / 'ž').read_text()]"  # over several parts
    assert mounting.run(source, mounts=[mount_on(store, prefix)]).json("seen") == [size, "made"]


def test_a_change_under_an_old_mtime_is_noticed(store, mounting, prefix):
    store.input(prefix + "/f", b"old")
    source = "import os\nold = os.stat(data / 'f')\n(data / 'f').write_text('new')\nos.utime(data / 'f', ns=(old.st_atime_ns, old.st_mtime_ns))"
    mounting.run(source, mounts=[mount_on(store, prefix, mode="rw")])
    assert store.read(prefix + "/f") == b"new"


def test_a_failed_cell_writes_nothing_back(store, mounting, prefix):
    store.input(prefix + "/f", b"old")
    bundle = mounting.execute(
        "(data / 'f').write_text('new')\nraise ValueError('x')", mounts=[mount_on(store, prefix, mode="rw")]
    ).bundle
    assert bundle.manifest["mount_writes"] == [] and store.read(prefix + "/f") == b"old"


def test_a_prefix_without_objects_is_an_empty_folder_that_can_be_filled(store, mounting, prefix):
    bundle = mounting.run(
        "seen = list(data.iterdir())\n(data / 'first').write_text('1')", mounts=[mount_on(store, prefix, mode="rw")]
    )
    assert bundle.json("seen") == [] and store.read(prefix + "/first") == b"1"


def test_a_mount_of_one_object_is_a_folder_that_holds_it(store, mounting, prefix):
    store.input(prefix + "/one.txt", b"only")
    store.input(prefix + "/two.txt", b"other")
    bundle = mounting.run(
        LIST + "\n(data / 'one.txt').write_text('new')", mounts=[mount_on(store, prefix + "/one.txt", mode="rw")]
    )
    assert bundle.json("seen") == {"one.txt": "only"} and store.read(prefix + "/one.txt") == b"new"


def test_a_name_that_is_a_file_and_a_folder_is_refused(store, mounting, prefix):
    if type(store).__name__ == "GoogleCloud":
        pytest.skip("this emulator keeps objects as files")
    for name in ("f", "f/x"):
        store.input("%s/%s" % (prefix, name), b"x")
    answer = mounting.execute("x = 1", mounts=[mount_on(store, prefix)])
    assert answer.status == 500 and "'f'" in answer.json["error"] and "'data'" in answer.json["error"]


def test_a_missing_bucket_is_said(store, mounting):
    mount = mount_on(store, "x")
    mount["uri"] = mount["uri"].replace("//bucket", "//nowhere-1").replace("//container", "//nowhere-1")
    answer = mounting.execute("x = 1", mounts=[mount])
    assert answer.status == 500 and "nowhere-1" in answer.json["error"], answer.body


def test_several_mounts_come_at_once_each_with_its_own_options(store, mounting, prefix):
    store.input(prefix + "/a/f", b"a")
    store.input(prefix + "/b/f", b"b")
    mounts = [mount_on(store, prefix + "/a", "left"), mount_on(store, prefix + "/b", "right", "rw")]
    source = "seen = [(left / 'f').read_text(), (right / 'f').read_text()]"
    assert mounting.run(source, mounts=mounts).json("seen") == ["a", "b"]


def test_the_probe_answers_what_is_here_and_null_for_what_it_cannot_tell(store, mounting, prefix):
    for name in ("a", "b"):
        store.input("%s/%s" % (prefix, name), b"12345")
    mount = mount_on(store, prefix)
    mounting.run("x = 1", mounts=[mount])
    store.input(prefix + "/c", b"123")
    whole = "%s/%s" % (mount["uri"].split("://")[1].split("/")[0], prefix)
    now = time.strftime("%Y-%m-%d %H:%M:%S+00:00", time.gmtime())
    record = [
        {"key": "%s/%s" % (whole, name), "name": "", "etag": "", "mtime": now, "size": size}
        for name, size in (("a", 5), ("b", 5), ("c", 3))
    ]
    probe = {
        "mounts": [
            {
                "spec": mount,
                "entries": [{**entry, "etag": etag_of(mounting, store, mount, entry["key"])} for entry in record],
            },
            {"spec": {**mount, "mode": "rw"}, "entries": record},
            {"spec": {**mount, "credential": "nowhere"}, "entries": record},
            {"spec": mount, "entries": [{"key": record[0]["key"], "size": 5, "etag": "", "mtime": ""}]},
            {"spec": mount, "entries": "junk"},
            {"spec": None, "entries": []},
            {"spec": mount, "entries": []},
        ]
    }
    answer = mounting.request("POST", "/v1/mount-cache/cached", json.dumps(probe).encode())
    assert answer.status == 200 and answer.json == {"cached_bytes": [10, None, None, None, None, None, 0]}


def etag_of(mounting, store, mount, key):
    """The version that the cache noted; what fsspec lists as an object's etag."""
    loaded = settings_of(strata_notebook_mount_cache_dir=str(mounting.cache))
    scope = Store(loaded, strata_worker.parse_mount(mount)).scope
    record = MountCache(*strata_worker.cache_settings(loaded)).record(scope, key)
    return '"%s"' % record["version"] if record else "other"


def test_a_cancel_ends_a_transfer_at_once_and_leaves_no_process(mounting):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        mount = mounted(
            options={"key": "k", "secret": "s3cret", "endpoint_url": "http://127.0.0.1:%d" % silent.getsockname()[1]}
        )
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(mounting.execute("x = 1", build_id="m1", mounts=[mount]))
        )
        thread.start()
        helpers = lambda: [line for _, line in processes_of(mounting.worker.process.pid) if "--mount-helper" in line]  # noqa: E731
        silent.settimeout(20)
        silent.accept()[0].close()
        assert "s3cret" not in str(helpers())
        began = time.monotonic()
        assert mounting.cancel("m1")["cancelled"]
        thread.join()
        assert time.monotonic() - began < 2 and answers[0].status == 409
        eventually(lambda: not helpers(), "the helper is gone")


def test_a_wrong_secret_is_an_error_that_does_not_show_it(store, mounting):
    if type(store).__name__ != "Azure":
        pytest.skip("only Azurite looks at signatures")
    wrong = "c2VjcmV0LXRoYXQtaXMtd3Jvbmc="
    mount = mount_on(store, "p")
    mount["options"]["connection_string"] = mount["options"]["connection_string"].replace(store.KEY, wrong)
    answer = mounting.execute("x = 1", mounts=[mount])
    assert answer.status == 500 and "'data'" in answer.json["error"] and wrong not in answer.json["error"]


def test_an_anonymous_mount_needs_no_key(store, mounting, prefix):
    store.input(prefix + "/f", b"public")
    mount = mount_on(store, prefix)
    if type(store).__name__ == "S3":
        store.client.put_object_acl(Bucket="bucket", Key=prefix + "/f", ACL="public-read")
        mount["options"] = {"anon": True, "endpoint_url": mount["options"]["endpoint_url"]}
    elif type(store).__name__ == "Azure":
        store.container.set_container_access_policy({}, public_access="container")
        mount["options"] = {"account_name": store.ACCOUNT, "endpoint_url": store.url}
    assert mounting.run(LIST, mounts=[mount]).json("seen") == {"f": "public"}


S3_ONLY = {"S3": STORES["S3"]}


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    from test_interop import free_port, need, program, serving

    kind, name, arguments = STORES["S3"]
    need(program(name), "needs %s" % name)
    port = free_port()
    with serving([program(name), *arguments, port], "http://127.0.0.1:%d" % port, cwd=tmp_path_factory.mktemp("s3")):
        yield kind("http://127.0.0.1:%d" % port)


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "./dot", "/absolute", "a//b", "n" * 300])
def test_an_object_whose_name_leaves_the_folder_is_refused(s3, mounting, name, prefix):
    s3.input("%s/%s" % (prefix, name), b"x")
    answer = mounting.execute("x = 1", mounts=[mount_on(s3, prefix)])
    assert answer.status == 500 and "cannot be a file" in answer.json["error"], answer.body


def test_a_folders_own_marker_is_no_file(s3, mounting, prefix):
    s3.input(prefix + "/", b"")
    s3.input(prefix + "/sub/", b"")
    s3.input(prefix + "/sub/f", b"x")
    assert mounting.run(LIST, mounts=[mount_on(s3, prefix)]).json("seen") == {"sub/f": "x"}


def test_a_profile_and_a_named_credential_reach_the_store(s3, prefix, tmp_path):
    s3.input(prefix + "/f", b"x")
    (tmp_path / "aws").write_text("[lab]\naws_access_key_id = k\naws_secret_access_key = s\n")
    env = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "aws"),
        "STRATA_NOTEBOOK_MOUNT_CACHE_DIR": str(tmp_path / "cache"),
        "STRATA_NOTEBOOK_CREDENTIALS": json.dumps(
            {"lab": {"profile": "lab", "endpoint_url": s3.client.meta.endpoint_url}}
        ),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with WorkerProcess(**env) as client:
        assert client.run(LIST, mounts=[mounted("s3://bucket/" + prefix, credential="lab")]).json("seen") == {"f": "x"}


def test_the_worker_itself_never_imports_pyarrow(mounting, s3, prefix):
    s3.input(prefix + "/f", b"x")
    mounting.run("x = 1", mounts=[mount_on(s3, prefix)])
    assert "pyarrow" not in Path("/proc/%d/maps" % mounting.worker.process.pid).read_text()


def test_a_helper_ends_with_its_worker(tmp_path):
    import subprocess

    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = {
            "scheme": "s3",
            "path": "b/p",
            "scope": "s",
            "folder": str(tmp_path / "m"),
            "cache": None,
            "stall": 60,
            "arguments": {
                "access_key": "k",
                "secret_key": "s",
                "scheme": "http",
                "endpoint_override": "127.0.0.1:%d" % silent.getsockname()[1],
            },
        }
        helper = subprocess.Popen(
            [sys.executable, strata_worker.__file__, "--mount-helper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        helper.stdin.write(json.dumps(job).encode() + b"\n")
        helper.stdin.flush()
        silent.settimeout(20)
        silent.accept()[0].close()
        helper.stdin.close()
        assert helper.wait(5) == 1
        helper.stdout.close()


def test_a_mount_and_an_output_folder_reach_an_r_cell_too(s3, mounting, prefix):
    if "r" not in mounting.health()["capabilities"]["features"]["languages"]:
        pytest.skip("needs R")
    s3.input(prefix + "/f", b"from S3")
    source = "# @output_dir out\nseen <- readLines(file.path(data, 'f'), warn = FALSE)\nwriteLines(seen, file.path(out, 'copy'))"
    bundle = mounting.run(source, mounts=[mount_on(s3, prefix)], language="r")
    assert bundle.files["dirs/out/copy"] == b"from S3\n"


# ---------------------------------------------------------------------------------------
# R: harness.R, run as the worker runs it
# ---------------------------------------------------------------------------------------

HARNESS = Path(__file__).with_name("harness.R")


def has_r_package(*names: str) -> bool:
    return r_says(" && ".join(f"requireNamespace('{name}', quietly = TRUE)" for name in names))


HAS_R = has_r_package("jsonlite")
HAS_ARROW = HAS_R and has_r_package("arrow")
HAS_TABLES = HAS_ARROW or (HAS_R and has_r_package("nanoarrow"))
HAS_GGPLOT2 = HAS_R and has_r_package("ggplot2")
HAS_BIT64 = HAS_R and has_r_package("bit64")

needs_tables = pytest.mark.skipif(not HAS_TABLES, reason="needs the R package arrow or nanoarrow")
needs_nanoarrow = pytest.mark.skipif(not HAS_TABLES or HAS_ARROW, reason="needs the R package nanoarrow, without arrow")
needs_ggplot2 = pytest.mark.skipif(not HAS_GGPLOT2, reason="needs the R package ggplot2")


class Finished:
    """A cell that was run: its process, its result and the files it left."""

    def __init__(self, folder: Path, process: subprocess.CompletedProcess):
        self.outputs = folder / "outputs"
        self.code, self.stderr = process.returncode, process.stderr.decode()
        self.stdout = process.stdout.decode()
        path = folder / "result.json"
        self.result = json.loads(path.read_text("utf-8")) if path.exists() else None

    def __getattr__(self, name):
        return self.result[name]

    def kinds(self) -> dict:
        return {name: entry["content_type"] for name, entry in self.variables.items()}

    def path(self, name: str) -> Path:
        return self.outputs / self.variables[name]["file"]

    def json(self, name: str):
        assert self.variables[name]["content_type"] == "json/object"
        return json.loads(self.path(name).read_text("utf-8"))

    def table(self, name: str):
        ipc = pytest.importorskip("pyarrow.ipc")
        assert self.variables[name]["content_type"] == "arrow/ipc"
        with ipc.open_stream(self.path(name).read_bytes()) as stream:
            return stream.read_all()

    def as_inputs(self) -> dict:
        return {
            name: (entry["content_type"], entry["file"], self.path(name).read_bytes())
            for name, entry in self.variables.items()
            if name != "_"
        }


def make_run(folder: Path, source: str, inputs: dict, more: dict) -> Path:
    for name in ("inputs", "outputs", "work"):
        (folder / name).mkdir(parents=True)
    specs = {}
    for name, (content_type, file, content) in inputs.items():
        (folder / "inputs" / file).write_bytes(content)
        specs[name] = {"content_type": content_type, "file": f"inputs/{file}"}
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"source": source, "inputs": specs, **more}), "utf-8")
    return manifest


@pytest.fixture
def cell(tmp_path):
    """`cell(source, inputs={name: (content type, file name, bytes)}, **more of the manifest)`."""
    need(HAS_R, "needs Rscript and the R package jsonlite")
    count = iter(range(100))

    def run(source: str, inputs: dict | None = None, env: dict | None = None, **more) -> Finished:
        folder = tmp_path / f"run{next(count)}"
        manifest = make_run(folder, source, inputs or {}, more)
        process = subprocess.run(
            ["Rscript", "--no-echo", "--no-restore", str(HARNESS), str(manifest)],
            check=False,
            cwd=folder / "work",
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        return Finished(folder, process)

    return run


def from_json(**values) -> dict:
    return {name: ("json/object", f"{name}.json", json.dumps(value).encode()) for name, value in values.items()}


def from_tables(**tables) -> dict:
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    inputs = {}
    for name, table in tables.items():
        sink = pyarrow.BufferOutputStream()
        with ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        inputs[name] = ("arrow/ipc", f"{name}.arrow", sink.getvalue().to_pybytes())
    return inputs


# Saves a cell's values aside, and compares what the next cell gets with them.
KEEP = "\n.values <- mget(setdiff(ls(), c('kept'))); saveRDS(.values, kept)"
COMPARE = """
.values <- readRDS(kept)
for (.name in names(.values)) if (!identical(.values[[.name]], get0(.name))) cat(.name, "differs\n")
cat(length(.values), "compared\n")
"""


def check_round_trip(cell, tmp_path, source: str) -> Finished:
    """Runs *source*; fails unless a second R cell gets every value of it back, identical."""
    kept = from_json(kept=str(tmp_path / "kept.rds"))
    first = cell(source + KEEP, kept)
    assert first.success, first.traceback
    assert not [name for name, entry in first.variables.items() if "error" in entry]
    second = cell(COMPARE, {**first.as_inputs(), **kept})
    assert second.success, second.traceback
    assert second.stdout == f"{len(set(first.variables) - {'_'})} compared\n"
    return first


# Values


def test_an_r_vector_or_list_is_a_plain_python_value(cell):
    done = cell(
        """
        one <- 1; whole <- 1:3; part <- 0.1 + 0.2; many <- c(1.5, -2, 1e300); tiny <- 5e-324
        yes <- TRUE; flags <- c(TRUE, NA); gaps <- c(1L, NA); odd <- c(NaN, Inf, -Inf, NA)
        text <- "\u017elu\u0165\\n\\"\\\\\\u0001"; texts <- c("a", NA); none <- NULL; nothing <- list()
        named <- c(b = 1, a = 2); record <- list(x = 1L, y = list("z", TRUE)); plain <- list(1, 2)
        """
    )
    assert set(done.kinds().values()) == {"json/object"}
    assert repr(done.json("one")) == "1.0" and repr(done.json("whole")) == "[1, 2, 3]"
    assert done.json("part") == 0.1 + 0.2 and done.json("many") == [1.5, -2, 1e300]
    assert done.json("tiny") == 5e-324
    assert done.json("yes") is True and done.json("flags") == [True, None]
    assert done.json("gaps") == [1, None]
    assert [str(number) for number in done.json("odd")] == ["nan", "inf", "-inf", "None"]
    assert done.json("text") == 'žluť\n"\\\x01' and done.json("texts") == ["a", None]
    assert done.json("none") is None and done.json("nothing") == []
    assert list(done.json("named").items()) == [("b", 1.0), ("a", 2.0)]
    assert done.json("record") == {"x": 1, "y": ["z", True]} and done.json("plain") == [1, 2]
    assert done.variables["odd"]["preview"] == [None] * 4
    assert done.variables["record"]["preview"] == {"x": 1, "y": ["z", True]}
    assert done.variables["one"]["bytes"] == done.path("one").stat().st_size == 3


def test_what_json_cannot_hold_comes_back_as_rds(cell):
    done = cell(
        """
        a <- NA; b <- c(NA_real_, NA_real_); c <- character(); d <- as.Date("2024-02-29")
        e <- as.POSIXct("2024-01-01", tz = "Europe/Prague"); f <- factor("x"); g <- matrix(1:4, 2)
        h <- 1i; i <- as.raw(1); j <- list(1, NA); k <- structure(1, unit = "m"); l <- y ~ x
        m <- c(a = 1, a = 2); n <- lm(dist ~ speed, cars); o <- new.env(); p <- "\\xff"
        """
    )
    assert set(done.kinds().values()) == {"application/x-r-rds"} and len(done.kinds()) == 16
    assert done.variables["n"]["type"] == "lm" and done.variables["n"]["preview"] == "<lm object>"
    assert done.variables["d"]["file"] == "d.rds" and done.variables["d"]["bytes"] > 0


def test_every_r_value_reaches_the_next_r_cell_unchanged(cell, tmp_path):
    check_round_trip(
        cell,
        tmp_path,
        """
        set.seed(1)
        n1 <- 1; n2 <- 1L; n3 <- c(0.1 + 0.2, 1 / 3, 1e22, 123456789012345678, 2^53, 5e-324)
        n4 <- runif(1000) * 10^sample(-300:300, 1000, TRUE); n5 <- c(1, NA, NaN, Inf); n6 <- NA
        n7 <- c(NA_integer_, NA); n8 <- integer(); n9 <- -2147483647L; n10 <- 1e5; n11 <- 100000L
        s1 <- "\u017elu\u0165"; s2 <- c("", NA, "NaN", "[ x", "{ y"); s3 <- "a\\\\\\"b\\n\\t\\u001f"
        s4 <- NA_character_; b1 <- c(TRUE, NA); b2 <- c(NA, NA)
        v1 <- c(a = 1, b = NA); v2 <- c(x = "y"); v3 <- c(a = NA); v4 <- setNames(1:2, c("", "z"))
        l1 <- list(); l2 <- list(1); l3 <- list(1, 2); l4 <- list(a = 1, b = list(2, "c", NULL))
        l5 <- list(1:3, 4:6); l6 <- list(list(list(1))); l7 <- setNames(list(), character())
        l8 <- list(list(a = 1), list(a = 2)); l9 <- list(NULL, NULL); l10 <- list(a = c(x = 1))
        l11 <- list(1, b = 2); l12 <- list("NaN", NaN); x1 <- as.POSIXlt("2024-01-01", tz = "UTC")
        x2 <- Sys.time(); x3 <- as.difftime(5, units = "mins"); x4 <- quote(a + b)
        x5 <- factor(c("b", "a"), levels = c("b", "a", "z")); x6 <- array(1:8, c(2, 2, 2)); x7 <- NULL
        """,
    )


@pytest.mark.skipif(not HAS_BIT64, reason="needs the R package bit64")
def test_integers_past_2_to_the_53_keep_every_digit(cell, tmp_path):
    done = check_round_trip(cell, tmp_path, "big <- bit64::as.integer64('9007199254740993')")
    assert done.kinds() == {"big": "application/x-r-rds"}
    done = cell("cat(format(x), format(y[[1]]))", from_json(x=2**60 + 1, y=[2**53 + 1, 1]))
    assert done.stdout == "1152921504606846977 9007199254740993"


def test_python_values_arrive_as_r_vectors_and_lists(cell):
    inputs = from_json(
        numbers=[1, 2, 3], mixed=[1, 2.5, None], words=["a", None], flags=[True, False], none=None,
        record={"name": "žluť", "tags": ["x"], "nested": {"n": None}}, grid=[[1, 2], [3, 4]],
        odd=[1, "a"], nan=float("nan"), inf=[float("-inf"), 1], empty=[], quoted="NaN [ 1 { Infinity",
    )  # fmt: skip
    done = cell(
        """
        stopifnot(
          identical(numbers, 1:3), identical(mixed, c(1, 2.5, NA)), identical(words, c("a", NA)),
          identical(flags, c(TRUE, FALSE)), is.null(none), identical(empty, list()),
          identical(record, list(name = "\u017elu\u0165", tags = "x", nested = list(n = NULL))),
          identical(grid, list(1:2, 3:4)), identical(odd, list(1L, "a")), is.nan(nan),
          identical(inf, c(-Inf, 1)), identical(quoted, "NaN [ 1 { Infinity")
        )
        """,
        inputs,
    )
    assert done.success, done.traceback
    assert done.variables == {}


def test_files_are_named_so_that_case_never_matters(cell):
    long = "A" + "b" * 60
    done = cell(f"X <- 1; x <- 2; Žluť <- 3; žluť <- 4; {long} <- 5; `a b` <- 6; `a/b` <- 7")
    assert done.variables["X"]["file"] == "X-4b68ab38.json"
    assert done.variables["x"]["file"] == "x.json"
    assert done.variables["Žluť"]["file"] == "Žluť-26925fcf.json"
    assert done.variables["žluť"]["file"] == "žluť.json"
    assert done.variables[long]["file"] == f"{long}-{hashlib.sha256(long.encode()).hexdigest()[:8]}.json"
    assert done.variables["a b"]["file"] == "a b.json"
    assert "cannot be stored as a file" in done.variables["a/b"]["error"]


def test_a_value_that_cannot_be_written_costs_only_itself(cell):
    done = cell("good <- 1; conn <- file('x.txt', 'w'); delayedAssign('late', stop('too late'))")
    assert done.success and done.json("good") == 1
    assert done.variables["conn"]["type"] == "file" and "process" in done.variables["conn"]["error"]
    assert done.variables["late"]["error"] == "too late"


def test_only_what_the_cell_bound_comes_back(cell):
    inputs = from_json(kept=1, rebound=1, mutated=[1, 2], same=5)
    done = cell(
        "f <- function() 1; .hidden <- 1; `_x` <- 1; rebound <- 2; new <- 3; same <- 5L",
        inputs,
        mutation_defines=["mutated", "absent"],
    )
    assert set(done.variables) == {"rebound", "mutated", "new"}


def test_a_deleted_input_is_warned_of(cell):
    done = cell("rm(x)", from_json(x=1))
    (warning,) = done.mutation_warnings
    assert warning["var_name"] == "x" and "deleted" in warning["message"]
    assert warning["suggestion"] is None


def test_tables_mounts_and_folders_are_bound_as_text(cell, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "made").mkdir()
    done = cell(
        "cat(t, t_snapshot, data, basename(made), file.exists(given), sep = '|')",
        {"given": ("file/path", "any name.csv", b"a,b")},
        tables={"t": {"uri": "strata://t", "snapshot_id": 7}},
        mounts={"data": str(tmp_path / "data")},
        output_dirs={"made": "../made"},
    )
    assert done.stdout == f"strata://t|7|{tmp_path / 'data'}|made|TRUE"
    assert done.variables == {}


@pytest.mark.parametrize(
    ("content_type", "way_out"),
    [
        ("pickle/object", "data frame"),
        ("module/import", "Call it in a Python cell"),
        ("module/cell", "Call it in a Python cell"),
        ("module/cell-instance", "data frame"),
        ("application/unheard-of", "no reader"),
    ],
)
def test_an_input_r_cannot_read_is_an_error_with_a_way_out(cell, content_type, way_out):
    done = cell("cat('never')", {"thing": (content_type, "thing.bin", b"")})
    assert done.code == 0 and not done.success and done.stdout == ""
    assert "'thing'" in done.error and content_type in done.error and way_out in done.error


# The console


def test_the_console_reads_as_at_r_s_own_prompt(cell):
    done = cell(
        """
x <- 1
x
invisible(2)
"\u017elu\u0165"
setClass("P", representation(n = "numeric")); setMethod("show", "P", function(object) cat("a P\n"))
new("P", n = 1)
print.mine <- function(x, ...) cat("mine\n")
structure(1, class = "mine")
for (i in 1:2) i
"""
    )
    shown = '[1] 1\n[1] "žluť"\na P\nmine\n'
    assert done.stdout == shown and done.stderr == ""


def test_warnings_and_messages_are_printed_as_r_prints_them(cell):
    done = cell(
        """
f <- function() warning("inside")
warning("top"); message("said")
f()
for (i in 1:12) warning(i)
options(warn = 1); f()
"""
    )
    assert done.stderr == (
        "Warning message:\ntop \nsaid\nWarning message:\nIn f() : inside\n"
        "There were 12 warnings (use warnings() to see them)\nWarning in f() : inside\n"
    )


def test_output_of_r_and_of_child_processes_keeps_its_order_and_is_live(tmp_path):
    go = tmp_path / "go"
    source = f"""
    cat("one\n"); system("echo two"); print("three"); message("err")
    while (!file.exists("{go}")) Sys.sleep(0.02)
    cat("four")
    """
    manifest = make_run(tmp_path / "run", source, {}, {})
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    with out.open("ab") as stdout, err.open("ab") as stderr:
        process = subprocess.Popen(["Rscript", str(HARNESS), str(manifest)], stdout=stdout, stderr=stderr)
    deadline = time.monotonic() + 30
    while b"three" not in out.read_bytes() or not err.read_bytes():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    assert out.read_text() == 'one\ntwo\n[1] "three"\n' and err.read_text() == "err\n"
    go.touch()
    assert process.wait(30) == 0
    assert out.read_text().endswith("four")


# Errors


def test_an_error_names_its_call_and_the_cells_own_calls(cell):
    done = cell("x <- 1\nf <- function(a) {\n  g(a)\n}\ng <- function(b) stop('boom ž')\nf(1)\n")
    assert done.code == 0 and not done.success and done.variables == {}
    assert done.error == "Error in g(a) : boom ž"
    assert done.traceback == (
        "Traceback (the cell's calls, outermost first):\n  line 6: f(1)\n  line 3: g(a)\n" + done.error
    )


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("stop('top')", "Error: top"),
        ("nope + 1", "Error: object 'nope' not found"),
        ("log('a')", 'Error in log("a") : non-numeric argument to mathematical function'),
        ("x <- 1\ny y", "Error in parse(cell) : line 2, column 3: unexpected symbol"),
        ("f(", "Error in parse(cell) : line 2, column 0: unexpected end of input"),
        ("options(warn = 2)\nwarning('w')", "Error: (converted from warning) w"),
        ("tryCatch(quit(status = 3), error = identity)", "Error: the cell ended itself with quit"),
        ("base::q()", "Error: the cell ended itself with quit(status = 0)"),
        ("invokeRestart('abort')", "Error: the cell was aborted"),
        ("f <- function() f()\nf()", "Error: "),
        ("options(error = quote(q()), warn = 1)\nstop('a\nb')", "Error: a\nb"),
    ],
)
def test_whatever_ends_a_cell_is_its_error(cell, source, error):
    done = cell(source)
    assert done.code == 0 and not done.success
    assert done.error.startswith(error) and done.traceback.endswith(done.error)
    for harness_call in ("eval(", "tryCatch(withCalling", "evaluate(", ".handleSimpleError"):
        assert harness_call not in done.traceback


def test_a_parse_error_runs_nothing(cell):
    done = cell("cat('ran')\n1 +* 2")
    assert done.stdout == "" and "line 2, column 4" in done.error


def test_a_manifest_that_is_none_is_exit_code_2(tmp_path):
    for text in (None, "{", "[]", "{}"):
        manifest = tmp_path / "manifest.json"
        if text is not None:
            manifest.write_text(text)
        done = subprocess.run(["Rscript", str(HARNESS), str(manifest)], check=False, capture_output=True)
        assert done.returncode == 2 and b"manifest" in done.stderr
        assert not (tmp_path / "result.json").exists()


def test_a_cell_cannot_break_the_harness_by_accident(cell):
    done = cell(
        """
        rm(list = ls()); setwd("/"); sink(tempfile()); closeAllConnections(); sink(tempfile())
        options(warn = 2, error = quote(stop("again")), OutDec = ",", digits = 3, scipen = -9)
        options(encoding = "latin1", device = "none")
        c <- list <- print <- paste0 <- get <- function(...) stop("mine")
        T <- FALSE; `{` <- base::`{`; unlink(tempdir(), recursive = TRUE)
        invisible(suppressWarnings(Sys.setlocale("LC_ALL", "C")))
        for (package in search()[-1]) try(detach(package, character.only = TRUE), silent = TRUE)
        on.exit(cat("")); v <- base::c(0.1, NA, 1e-9); s <- "\\u017e"
        """
    )
    assert done.success, done.traceback
    assert done.json("v") == [0.1, None, 1e-9] and done.json("s") == "ž"


def test_a_forked_child_of_the_cell_reports_nothing(cell):
    done = cell("x <- unlist(parallel::mclapply(1:2, function(i) i * 2)); y <- 1")
    assert done.success and done.json("x") == [2, 4] and done.json("y") == 1


def test_the_result_names_the_interpreter(cell):
    done = cell("cat(R.version$major, R.version$minor)")
    major, minor = done.stdout.split()
    machine = os.uname().machine
    assert done.build_env == f"r-{major}.{minor.split('.')[0]}-{os.uname().sysname.lower()}-{machine}"


def test_a_cell_starts_with_an_empty_folder_and_workspace_in_any_locale(cell):
    source = "cat(basename(getwd()), 'ž', length(ls(all.names = TRUE))); ž <- list.files()"
    done = cell(source, env={"LC_ALL": "C", "LANG": "C"})
    assert done.stdout == "work ž 0" and done.kinds() == {"ž": "application/x-r-rds"}


# Displays


def png_size(content: bytes) -> tuple:
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_every_page_drawn_is_a_png_display_in_order(cell):
    done = cell(
        """
        plot(1:3)
        lines(3:1)
        dev.off()
        png("own.png"); plot(9); invisible(dev.off())
        plot.new()
        par(mfrow = c(1, 2)); hist(c(1, 2, 2)); barplot(1:3); barplot(3:1)
        dev.new(width = 4, height = 3); plot(2)
        library(grid); grid.newpage(); grid.rect(); grid.newpage()
        """
    )
    assert done.success, done.traceback
    files = [display["file"] for display in done.displays]
    assert files == [f"__display__{number}.png" for number in range(5)]
    sizes = [(display["width"], display["height"]) for display in done.displays]
    assert sizes == [(800, 600)] * 3 + [(384, 288)] * 2
    for display in done.displays:
        content = (done.outputs / display["file"]).read_bytes()
        assert png_size(content) == (display["width"], display["height"])
        url = "data:image/png;base64," + base64.b64encode(content).decode()
        assert display["inline_data_url"] == url
        assert display["content_type"] == "image/png" and display["bytes"] == len(content)
        assert display["preview"] is None
    assert done.variables == {"_": done.displays[-1]}
    assert sorted(path.name for path in done.outputs.iterdir()) == files


def test_a_cell_that_draws_nothing_has_no_display_and_no_stray_file(cell):
    done = cell("plot.new(); x <- 1; x", None)
    assert done.displays == [] and "_" not in done.variables
    assert [path.name for path in done.outputs.iterdir()] == ["x.json"]


def test_a_failed_cell_keeps_its_plots(cell):
    done = cell("plot(1); stop('after')")
    assert not done.success and len(done.displays) == 1


@needs_ggplot2
def test_a_ggplot_is_a_display(cell):
    done = cell("library(ggplot2)\nggplot(mtcars, aes(mpg, wt)) + geom_point()")
    assert done.success, done.traceback
    assert [display["content_type"] for display in done.displays] == ["image/png"]


# Tables

FRAMES = """
full <- data.frame(
  l = c(TRUE, NA, FALSE), i = c(1L, NA, 3L), d = c(NA, NaN, 0.1 + 0.2), s = c("\u017e", NA, ""),
  f = factor(c("b", NA, "a"), levels = c("b", "a", "z")), D = as.Date(c("2024-02-29", NA, "1600-01-01")),
  o = factor(c("lo", "hi", "lo"), levels = c("lo", "hi"), ordered = TRUE),
  p = as.POSIXct(c("2024-01-01 12:00:00", NA, "1969-12-31 23:59:59.25"), tz = "Europe/Prague"),
  now = Sys.time() + c(0, NA, 1 / 3), h = as.difftime(c(1.5, NA, 2), units = "hours"), r = as.raw(0:2)
)
full$`\u017elu\u0165 x` <- c(Inf, -Inf, 1e-320)
full$big <- structure(c(4.4501477170144033e-308, -0, 4.9406564584124654e-324), class = "integer64")
full$items <- list(1:2, NULL, integer()); full$bytes <- list(as.raw(1:3), NULL, raw())
zero <- full[0, c("l", "i", "d", "s", "f", "D", "p", "h", "r")]; empty <- data.frame()
cars <- head(mtcars, 3); odd <- data.frame(a = 1:5)[c(2, 4), , drop = FALSE]
classy <- structure(data.frame(x = I(1:2)), class = c("mine", "data.frame"), note = "n")
half <- data.frame(day = structure(c(0.5, NA), class = "Date"), z = structure(1:2, unit = "m"))
"""


@needs_tables
def test_a_data_frame_reaches_the_next_r_cell_unchanged(cell, tmp_path):
    done = check_round_trip(cell, tmp_path, FRAMES)
    assert set(done.kinds().values()) == {"arrow/ipc"}
    full = done.variables["full"]
    assert full["rows"] == 3 and full["columns"][:4] == ["l", "i", "d", "s"]
    assert full["preview"][1][:6] == ["", "", None, "", "", ""]
    assert full["preview"][0][:6] == [True, 1, "", "ž", "b", "2024-02-29"]
    assert done.variables["zero"]["rows"] == 0 and done.variables["zero"]["preview"] == []


@needs_tables
def test_a_frame_that_arrow_cannot_hold_is_rds(cell, tmp_path):
    done = check_round_trip(
        cell,
        tmp_path,
        """
        a <- data.frame(z = 1i); b <- data.frame(x = 1, x = 2, check.names = FALSE)
        c <- data.frame(m = I(matrix(1:4, 2))); d <- data.frame(row.names = 1:3)
        e <- data.frame(x = 1:2); e$l <- list(list(1), 2); f <- data.frame(s = "\\xff")
        """,
    )
    assert set(done.kinds().values()) == {"application/x-r-rds"}


@needs_tables
def test_python_reads_the_table_that_r_wrote(cell):
    done = cell(FRAMES)
    table = done.table("full")
    assert table.schema.metadata[b"strata.arrow.shape"] == b"table"
    rows = table.to_pydict()
    assert rows["l"] == [True, None, False] and rows["i"] == [1, None, 3]
    assert rows["d"][0] is None and math.isnan(rows["d"][1]) and rows["d"][2] == 0.1 + 0.2
    assert rows["s"] == ["ž", None, ""] and rows["f"] == ["b", None, "a"]
    assert rows["D"] == [datetime.date(2024, 2, 29), None, datetime.date(1600, 1, 1)]
    assert str(table.schema.field("p").type) == "timestamp[us, tz=Europe/Prague]"
    assert rows["p"][0].isoformat() == "2024-01-01T12:00:00+01:00"
    assert rows["h"][0] == datetime.timedelta(hours=1.5)
    assert rows["big"] == [2**53 + 1, None, 1]
    assert rows["r"] == [0, 1, 2] and rows["items"] == [[1, 2], None, []]
    assert rows["bytes"] == [b"\x01\x02\x03", None, b""]
    assert done.table("zero").num_rows == 0
    cars = done.table("cars")
    assert cars.column_names[-1] == "__index_level_0__"
    assert json.loads(cars.schema.metadata[b"pandas"])["index_columns"] == ["__index_level_0__"]


@needs_tables
def test_r_reads_the_tables_that_python_writes(cell):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(
        {
            "i": pyarrow.array([1, None]),
            "f": pyarrow.array([None, float("nan")]),
            "u": pyarrow.array([1, 2**32 - 1], pyarrow.uint32()),
            "s": pyarrow.array(["ž", None]),
            "b": [True, None],
            "d": [datetime.date(2024, 1, 1), None],
            "t": pyarrow.array([1_700_000_000_000_000_000, None], pyarrow.timestamp("ns", "Asia/Tokyo")),
            "naive": [datetime.datetime(2024, 1, 1, 12), None],
            "n": pyarrow.nulls(2),
            "l": [["x"], None],
            "x": [{"k": 1}, None],
            "y": [b"ab", None],
        }
    )
    done = cell(
        """
        stopifnot(
          identical(t$i, c(1L, NA)), is.na(t$f) == c(TRUE, TRUE), is.nan(t$f) == c(FALSE, TRUE),
          identical(t$u, c(1, 4294967295)), identical(t$s, c("\u017e", NA)), identical(t$b, c(TRUE, NA)),
          identical(t$d, as.Date(c("2024-01-01", NA))), identical(attr(t$t, "tzone"), "Asia/Tokyo"),
          as.numeric(t$t)[1] == 1700000000, format(t$naive[1], usetz = TRUE) == "2024-01-01 12:00:00 UTC",
          all(is.na(t$n)), identical(t$l[[1]], "x"), is.null(t$l[[2]]), t$x$k[1] == 1, is.na(t$x$k[2]),
          identical(as.raw(t$y[[1]]), charToRaw("ab")), nrow(none) == 0, identical(names(none), "z")
        )
        """,
        from_tables(t=table, none=pyarrow.table({"z": pyarrow.array([], pyarrow.int64())})),
    )
    assert done.success, done.traceback + done.stderr


@needs_tables
def test_arrays_and_scalars_of_python_arrive_as_such(cell):
    pyarrow = pytest.importorskip("pyarrow")
    tensor = pyarrow.table({"values": list(range(6))}).replace_schema_metadata(
        {
            "strata.arrow.shape": "tensor",
            "strata.arrow.tensor.shape": "[2, 3]",
            "strata.arrow.tensor.dtype": "int64",
        }
    )
    scalar = pyarrow.table({"value": [datetime.date(2024, 1, 1)]}).replace_schema_metadata(
        {"strata.arrow.shape": "scalar"}
    )
    done = cell(
        "stopifnot(identical(a, matrix(0:5, 2, byrow = TRUE)), identical(s, as.Date('2024-01-01')))",
        from_tables(a=tensor, s=scalar),
    )
    assert done.success, done.traceback


def test_a_json_table_needs_no_table_package(cell):
    table = {
        "__strata_arrow_json_fallback__": True,
        "format": "strata.notebook.arrow_json_fallback.v1",
        "kind": "dataframe",
        "columns": ["a", "b"],
        "data": [[1, "x"], [None, 2]],
        "series_name": None,
    }
    done = cell(
        "stopifnot(identical(t$a, c(1L, NA)), identical(t$b, list('x', 2L)))",
        {"t": ("arrow/ipc", "t.arrow", json.dumps(table).encode())},
    )
    assert done.success, done.traceback


@needs_tables
def test_a_last_table_is_a_display_that_shares_its_variables_file(cell):
    done = cell("df <- data.frame(a = 1:2); plot(1)\ndf")
    plot, table = done.displays
    assert plot["file"] == "__display__0.png" and table["file"] == "df.arrow"
    assert done.variables["_"] == table and table["rows"] == 2 and "  a\n1 1\n" in done.stdout
    done = cell("df <- data.frame(a = 1:30)\nhead(df, 25)")
    assert done.displays[0]["file"] == "__display__0.arrow"
    assert len(done.displays[0]["preview"]) == 20 and done.displays[0]["rows"] == 25
    assert cell("df <- data.frame(a = 1)\ninvisible(df)").displays == []


@needs_nanoarrow
def test_what_nanoarrow_cannot_read_is_said(cell):
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array(["x", "y"]).dictionary_encode()
    done = cell("1", from_tables(cat=pyarrow.table({"c": column})))
    assert not done.success and "'cat'" in done.error and "categorical" in done.error


def test_without_a_table_package_only_tables_fail_and_the_error_names_both(cell):
    bare = {"R_LIBS": "", "R_LIBS_USER": "/nonexistent"}
    done = cell(
        "x <- 1; df <- data.frame(a = 1); has <- requireNamespace('arrow', quietly = TRUE) ||"
        "requireNamespace('nanoarrow', quietly = TRUE)\ndf",
        env=bare,
    )
    if not done.success or done.json("has"):
        pytest.skip("needs jsonlite, and no package for tables, installed for every user")
    assert done.json("x") == 1 and done.displays == []
    assert "arrow" in done.variables["df"]["error"] and "nanoarrow" in done.variables["df"]["error"]
    assert "not shown" in done.stderr
    done = cell("1", {"t": ("arrow/ipc", "t.arrow", b"\xff\xff\xff\xff")}, env=bare)
    assert not done.success and "arrow or nanoarrow" in done.error


# ---------------------------------------------------------------------------------------
# Relay: the codec by itself, then a worker before relays on the websockets package
# ---------------------------------------------------------------------------------------

MIB = 2**20
SUBPROTOCOL = "strata-worker-connect.v1"


# --- The codec --------------------------------------------------------------------------


def from_server(opcode, payload=b"", fin=True, head=None):
    """A frame as a server sends it: not masked."""
    return Frame(Opcode(opcode), payload, fin).serialize(mask=False)


def messages_of(data, step=None):
    reader, found = FrameReader(), []
    for start in range(0, len(data), step or max(1, len(data))):
        reader.feed(data[start : start + (step or len(data))])
        while (message := reader.next()) is not None:
            found.append(message)
    return found


@pytest.mark.parametrize("step", [1, 2, 7, None])
def test_messages_are_read_whatever_the_pieces_they_come_in(step):
    data = (
        from_server(TEXT, "grüße".encode())
        + from_server(PING, b"now")
        + from_server(BINARY, b"x" * 200)
        + from_server(BINARY, b"y" * 70_000)
        + from_server(TEXT, b"")
        + from_server(CLOSE, b"\x03\xe8bye")
    )
    assert messages_of(data, step) == [
        (TEXT, "grüße"),
        (PING, b"now"),
        (BINARY, b"x" * 200),
        (BINARY, b"y" * 70_000),
        (TEXT, ""),
        (CLOSE, b"\x03\xe8bye"),
    ]


@pytest.mark.parametrize("step", [1, 3, None])
def test_a_ping_in_between_two_fragments_is_seen_before_the_message(step):
    data = (
        from_server(TEXT, b"gr\xc3", fin=False)
        + from_server(PING, b"p")
        + from_server(0, b"\xbc", fin=False)
        + from_server(0, b"n")
    )
    assert messages_of(data, step) == [(PING, b"p"), (TEXT, "grün")]


BROKEN = {
    "a reserved bit": (b"\xc1\x00", 1002),
    "a reserved opcode": (b"\x83\x00", 1002),
    "a reserved control opcode": (b"\x8b\x00", 1002),
    "a masked frame": (b"\x81\x81abcdx", 1002),
    "a long ping": (b"\x89\x7e\x00\x7e" + b"x" * 126, 1002),
    "a fragmented ping": (b"\x09\x01x", 1002),
    "a continuation of nothing": (b"\x80\x01x", 1002),
    "a message within a message": (b"\x01\x01x\x81\x01y", 1002),
    "a 16-bit length below 126": (b"\x82\x7e\x00\x05hello", 1002),
    "a 64-bit length below 65536": (b"\x82\x7f" + (5).to_bytes(8, "big") + b"hello", 1002),
    "a length with its highest bit set": (b"\x82\x7f" + (2**63).to_bytes(8, "big"), 1009),
    "a chunk of 1 MiB and a byte": (b"\x82\x7f" + (MIB + 5).to_bytes(8, "big"), 1009),
    "text that is not UTF-8": (b"\x81\x02\xc3\x28", 1007),
    "text that ends within a character": (b"\x81\x01\xc3", 1007),
    "text with a surrogate": (b"\x81\x03\xed\xa0\x80", 1007),
    "a Close of one byte": (b"\x88\x01\x03", 1002),
    "a Close of a reserved code": (b"\x88\x02\x03\xed", 1002),
    "a Close whose reason is not UTF-8": (b"\x88\x03\x03\xe8\xff", 1007),
}


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize("name", BROKEN)
def test_what_rfc_6455_forbids_is_refused_with_its_code(name, step):
    data, code = BROKEN[name]
    with pytest.raises(FrameError) as caught:
        messages_of(data, step)
    assert caught.value.code == code


def test_fragments_are_counted_together_against_the_bound():
    piece = from_server(BINARY, b"x" * 600_000, fin=False)
    with pytest.raises(FrameError) as caught:
        messages_of(piece + from_server(0, b"x" * 600_000))
    assert caught.value.code == 1009


def test_a_chunk_of_1_mib_and_its_stream_id_are_within_the_bound():
    assert messages_of(from_server(BINARY, bytes(MIB + 4))) == [(BINARY, bytes(MIB + 4))]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=70_000), st.binary(min_size=4, max_size=4), st.sampled_from([4, 8, 64, 16384]))
def test_masking_is_an_xor_with_the_repeated_key(data, key, block):
    assert b"".join(masked(data, key, block)) == bytes(byte ^ key[i % 4] for i, byte in enumerate(data))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just(TEXT), st.text(max_size=300)),
            st.tuples(st.just(BINARY), st.binary(max_size=300)),
            st.tuples(st.sampled_from([PING, PONG]), st.binary(max_size=125)),
        )
    ),
    st.randoms(use_true_random=False),
)
def test_any_messages_come_through_any_fragmentation(messages, random):
    data = b""
    for opcode, content in messages:
        payload = content.encode() if opcode == TEXT else content
        cuts = sorted(random.randrange(len(payload) + 1) for _ in range(random.randrange(3))) if opcode < CLOSE else []
        ends = [*cuts, len(payload)]
        for index, (start, end) in enumerate(zip([0, *cuts], ends)):
            data += from_server(0 if index else opcode, payload[start:end], fin=index == len(cuts))
    assert messages_of(data, random.randrange(1, 100)) == messages


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 50))
def test_junk_is_read_or_refused_but_never_crashes(data, step):
    with contextlib.suppress(FrameError):
        messages_of(data, step)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65535, 65536, MIB + 4])
def test_our_frames_are_what_websockets_reads(size):
    peer, payload = Protocol(SERVER, max_size=None), os.urandom(size)
    peer.receive_data(frame(BINARY, payload))
    (event,) = peer.events_received()
    assert bytes(event.data) == payload and event.opcode == BINARY and event.fin


def test_each_frame_has_a_key_of_its_own():
    assert len({frame(BINARY, b"")[2:6] for _ in range(50)}) == 50


# --- The handshake ----------------------------------------------------------------------


def handshake(answer, url="ws://relay/"):
    shake = Handshake(url, None)
    key = dict(line.split(b": ", 1) for line in shake.request().split(b"\r\n")[1:-2])[b"Sec-WebSocket-Key"]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    return shake, answer.replace(b"ACCEPT", accept)


GOOD = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Accept: ACCEPT\r\nSec-WebSocket-Protocol: strata-worker-connect.v1\r\n\r\n"
)


def test_a_handshake_may_come_one_byte_at_a_time_with_frames_behind_it():
    shake, answer = handshake(GOOD)
    for byte in answer[:-1]:
        assert shake.feed(bytes([byte])) is None
    assert shake.feed(answer[-1:] + b"\x81\x00") == b"\x81\x00"


@pytest.mark.parametrize(
    "old, new, final",
    [
        (b"ACCEPT", b"ACCEPU", False),
        (b"Upgrade: WebSocket", b"Upgrade: h2c", False),
        (b"keep-alive, Upgrade", b"keep-alive", False),
        (b"\r\n\r\n", b"\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n", False),
        (b"strata-worker-connect.v1", b"strata-worker-connect.v2", True),
        (b"Sec-WebSocket-Protocol: strata-worker-connect.v1\r\n", b"", True),
        (GOOD, b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno", True),
        (GOOD, b"HTTP/1.1 408 Slow\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"HTTP/1.1 429 Many\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"SSH-2.0-OpenSSH\r\n\r\n", False),
    ],
)
def test_any_other_answer_to_the_handshake_is_final_or_not(old, new, final):
    shake, answer = handshake(GOOD.replace(old, new))
    with pytest.raises(RelayRefused if final else Disconnected):
        shake.feed(answer)


def test_a_relay_that_hangs_up_in_its_refusal_is_still_believed():
    shake, answer = handshake(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 50\r\n\r\nno")
    with pytest.raises(RelayRefused, match="401 Unauthorized"):
        shake.feed(answer)
        shake.feed(b"")


def test_a_relay_that_hangs_up_unasked_is_dialled_again():
    shake, _ = handshake(b"")
    with pytest.raises(Disconnected):
        shake.feed(b"")


def test_a_refusal_says_what_the_relay_said():
    shake, answer = handshake(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 13\r\n\r\ntoken expired")
    with pytest.raises(RelayRefused, match="401 Unauthorized: 'token expired'"):
        shake.feed(answer)


def test_waits_double_from_1_to_60_seconds_and_their_second_half_is_random():
    for expected, wait in zip([1, 2, 4, 8, 16, 32, 60, 60], strata_worker.dial_waits()):
        assert expected / 2 <= wait <= expected


# --- A relay and its worker -------------------------------------------------------------


class RelayPeer:
    """A relay on `websockets`, whose requests the test makes."""

    __test__ = False

    def __init__(self, port=0, **options):
        self.sockets = queue.Queue()
        self.streams, self.numbers = {}, iter(range(1, 1000))
        self.server = serve(
            self.handle,
            "127.0.0.1",
            port,
            **{"subprotocols": [SUBPROTOCOL], "compression": "deflate", "max_size": MIB + 4, **options},
        )
        self.port = self.server.socket.getsockname()[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handle(self, ws):
        self.ws = ws
        self.sockets.put(ws)
        for message in ws:
            if isinstance(message, bytes):
                assert 4 < len(message) <= MIB + 4
                self.streams[int.from_bytes(message[:4], "big")].put(message[4:])
            else:
                self.streams[json.loads(message)["id"]].put(json.loads(message))

    def send(self, **fields):
        self.ws.send(json.dumps(fields))

    def begin(self, method, path, headers=(), number=None, query=""):
        number = number or next(self.numbers)
        self.streams[number] = queue.Queue(8)
        self.send(
            type="request", id=number, method=method, path=path, query=query, headers=[list(pair) for pair in headers]
        )
        return Exchange(self, number)

    def ask(self, method, path, body=(), headers=()):
        exchange = self.begin(method, path, headers)
        for chunk in body:
            exchange.chunk(chunk)
        exchange.end()
        return exchange

    def close(self):
        self.server.shutdown()


class Exchange:
    def __init__(self, relay, number):
        self.relay, self.number, self.frames = relay, number, relay.streams[number]

    def chunk(self, data):
        self.relay.ws.send(self.number.to_bytes(4, "big") + data)

    def end(self):
        self.relay.send(type="end", id=self.number)

    def abort(self):
        self.relay.send(type="abort", id=self.number)

    def start(self):
        frame = self.frames.get(timeout=20)
        assert frame["type"] == "response", frame
        return frame["status"], dict(frame["headers"])

    def pieces(self):
        """The body's chunks; "end" or "abort" comes last, as ``self.ending``."""
        while True:
            frame = self.frames.get(timeout=20)
            if isinstance(frame, dict):
                self.ending = frame["type"]
                return
            yield frame

    def answer(self):
        status, headers = self.start()
        return status, headers, b"".join(self.pieces())


@pytest.fixture
def tell(monkeypatch):
    """The queue of what a relay's worker was refused with; dialling is fast."""
    monkeypatch.setattr(strata_worker, "dial_waits", lambda: iter(lambda: 0.05, None))
    return queue.Queue()


@pytest.fixture
def relay_serving(tell):
    """Starts relays and workers for an answer function, and stops them."""
    with contextlib.ExitStack() as stack:

        def start(answer, token=None, stall=20, **options):
            relay = RelayPeer(**options)
            stack.callback(relay.close)
            worker = Relay(answer, "ws://127.0.0.1:%d/worker?secret=1" % relay.port, token, stall, tell.put)
            stack.callback(worker.stop)
            worker.start()
            relay.worker = worker
            relay.sockets.get(timeout=10)
            return relay

        yield start


class Closing:
    """Counts the answers that were closed."""

    def __init__(self):
        self.count = threading.Semaphore(0)

    def __call__(self):
        self.count.release()

    def wait(self):
        assert self.count.acquire(timeout=10)


def echo(request):
    return Response(200, list(iter(request.body.read, b"")), [("X-Path", request.path), ("X-Method", request.method)])


def test_a_forwarded_request_is_the_request_and_its_answer_the_answer(relay_serving):
    def answer(request):
        told = [
            request.method,
            request.path,
            request.query,
            request.headers.get("x-a"),
            b"".join(iter(request.body.read, b"")).decode(),
        ]
        return json_response(418, told, [("X-B", "2")])

    relay = relay_serving(answer)
    relay.streams[9] = queue.Queue()
    relay.send(type="request", id=9, method="PUT", path="/a%20b", query="c=d", headers=[["X-A", "1"]])
    exchange = Exchange(relay, 9)
    exchange.chunk(b"he")
    exchange.chunk(b"llo")
    exchange.end()
    status, headers, body = exchange.answer()
    assert (status, headers["X-B"], headers["Content-Length"]) == (418, "2", str(len(body)))
    assert json.loads(body) == ["PUT", "/a%20b", "c=d", "1", "hello"]
    assert exchange.ending == "end"


def test_the_handshake_carries_the_token_and_offers_the_subprotocol_and_no_extension(relay_serving):
    relay = relay_serving(echo, token="s3cret")
    headers = relay.ws.request.headers
    assert headers["Authorization"] == "Bearer s3cret"
    assert headers["Sec-WebSocket-Protocol"] == SUBPROTOCOL
    assert "Sec-WebSocket-Extensions" not in headers
    assert relay.ws.request.path == "/worker?secret=1"


def test_without_a_token_there_is_no_authorization(relay_serving):
    assert "Authorization" not in relay_serving(echo).ws.request.headers


def test_a_head_request_gets_the_headers_alone(relay_serving):
    status, headers, body = relay_serving(lambda request: Response(200, [b"four"])).ask("HEAD", "/").answer()
    assert (status, headers["Content-Length"], body) == (200, "4", b"")


def test_many_streams_at_once_keep_their_bytes_apart(relay_serving):
    relay = relay_serving(echo)
    bodies = [os.urandom(3 * MIB // 2) for _ in range(8)]
    exchanges = [relay.begin("POST", "/%d" % i) for i in range(len(bodies))]
    for start in range(0, len(bodies[0]), 100_000):
        for exchange, body in zip(exchanges, bodies):
            exchange.chunk(body[start : start + 100_000])
    for exchange in exchanges:
        exchange.end()
    answers = [None] * len(bodies)

    def collect(i):
        answers[i] = exchanges[i].answer()

    threads = [threading.Thread(target=collect, args=(i,)) for i in range(len(bodies))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [(headers["X-Path"], body) for _, headers, body in answers] == [
        ("/%d" % i, body) for i, body in enumerate(bodies)
    ]


@pytest.mark.parametrize(
    "junk",
    [
        "not json",
        "[]",
        "1",
        "null",
        '"request"',
        "{}",
        '{"type": "request"}',
        '{"type": "new kind", "id": 1}',
        '{"type": "end", "id": 77}',
        '{"type": "abort", "id": 77}',
        '{"type": ["request"], "id": [1]}',
        '{"type": "request", "id": 0, "method": "GET", "path": "/"}',
        '{"type": "request", "id": 4294967296, "method": "GET", "path": "/"}',
        '{"type": "request", "id": -1, "method": "GET", "path": "/"}',
        '{"type": "request", "id": true, "method": "GET", "path": "/"}',
        '{"type": "request", "id": 1.5, "method": "GET", "path": "/"}',
        '{"type": "request", "id": "7", "method": "GET", "path": "/"}',
        "[" * 100_000,
        b"",
        b"abc",
        b"\0\0\0\x4dlost chunk",
        b"\0\0\0\x4d",
    ],
)
def test_a_junk_frame_is_ignored(relay_serving, junk):
    relay = relay_serving(echo)
    relay.ws.send(junk)
    assert relay.ask("POST", "/", [b"still here"]).answer()[2] == b"still here"


def test_a_request_whose_id_is_in_use_is_ignored(relay_serving):
    relay = relay_serving(echo)
    exchange = relay.begin("POST", "/first")
    relay.send(type="request", id=exchange.number, method="POST", path="/second", query="", headers=[])
    exchange.chunk(b"x")
    exchange.end()
    assert exchange.answer()[1]["X-Path"] == "/first"


def test_an_id_is_free_again_once_its_answer_has_ended(relay_serving):
    relay = relay_serving(echo)
    for turn in range(200):
        exchange = relay.begin("POST", "/%d" % turn, number=5)
        exchange.end()
        assert exchange.answer()[1]["X-Path"] == "/%d" % turn


def test_the_greatest_id_there_is_may_be_used(relay_serving):
    relay = relay_serving(echo)
    exchange = relay.begin("POST", "/", number=2**32 - 1)
    exchange.chunk(b"x")
    exchange.end()
    assert exchange.answer()[2] == b"x"


@pytest.mark.parametrize(
    "fields",
    [
        {"method": 1, "path": "/"},
        {"path": "/"},
        {"method": "GET"},
        {"method": "GET", "path": "/", "headers": [["a"]]},
        {"method": "GET", "path": "/", "headers": [["a", 1]]},
        {"method": "GET", "path": "/", "headers": [["a", "\u20ac"]]},
        {"method": "GET", "path": "/", "headers": 7},
        {"method": "GET", "path": "/", "query": {}, "headers": [7]},
    ],
)
def test_a_malformed_request_frame_is_answered_400(relay_serving, fields):
    relay = relay_serving(echo)
    relay.streams[5] = queue.Queue()
    relay.send(type="request", id=5, **fields)
    assert Exchange(relay, 5).answer()[0] == 400


def test_a_worker_that_fails_before_it_has_answered_sends_a_500(relay_serving):
    assert relay_serving(lambda request: 1 / 0).ask("GET", "/").answer()[0] == 500


def test_an_answer_that_breaks_off_is_aborted_and_closed(relay_serving, tmp_path):
    closed = Closing()
    (tmp_path / "f").write_bytes(b"short")
    body = [b"start", FileSlice(str(tmp_path / "f"), 6)]
    exchange = relay_serving(lambda request: Response(200, body, close=closed)).ask("GET", "/")
    assert exchange.start()[0] == 200
    list(exchange.pieces())
    assert exchange.ending == "abort"
    closed.wait()


def test_an_answer_is_closed_before_its_end_is_sent(relay_serving):
    closed = threading.Event()
    serving_one = relay_serving(lambda request: Response(200, [b"x"], close=closed.set))
    serving_one.ask("GET", "/").answer()
    assert closed.is_set()


def test_after_an_abort_the_body_is_disconnected_and_nothing_more_is_sent(relay_serving):
    ended = queue.Queue()

    def answer(request):
        try:
            return echo(request)
        except Disconnected:
            ended.put(None)
            raise

    relay = relay_serving(answer)
    exchange = relay.begin("POST", "/")
    exchange.chunk(b"x")
    exchange.abort()
    ended.get(timeout=10)
    assert relay.ask("GET", "/").answer()[0] == 200
    assert exchange.frames.empty()


def test_after_an_abort_a_running_request_goes_on_and_its_answer_is_closed_unsent(relay_serving):
    go, closed = threading.Event(), Closing()

    def answer(request):
        if request.path == "/slow":
            list(iter(request.body.read, b""))
            go.wait(10)
        return Response(200, [b"x"], close=closed)

    relay = relay_serving(answer)
    exchange = relay.ask("POST", "/slow", [b"whole"])
    exchange.abort()
    relay.ask("GET", "/").answer()
    closed.wait()
    go.set()
    closed.wait()
    assert exchange.frames.empty()


def test_an_abort_while_the_answer_is_sent_stops_it(relay_serving, tmp_path):
    closed = Closing()
    with open(tmp_path / "big", "wb") as file:
        file.truncate(256 * MIB)

    def answer(request):
        return Response(
            200, [FileSlice(str(tmp_path / "big"), 256 * MIB)] if request.path == "/big" else [], close=closed
        )

    relay = relay_serving(answer)
    exchange = relay.ask("GET", "/big")
    exchange.start()
    next(exchange.pieces())
    exchange.abort()
    sent = sum(map(len, drain_until_quiet(exchange.frames)))
    closed.wait()
    assert sent < 200 * MIB
    assert relay.ask("GET", "/").answer()[0] == 200


def drain_until_quiet(frames):
    with contextlib.suppress(queue.Empty):
        while True:
            yield frames.get(timeout=0.5)


def test_an_unread_body_does_not_hold_up_the_socket(relay_serving):
    relay = relay_serving(lambda request: error_response(WorkerError(401, "no")))
    exchange = relay.begin("POST", "/")
    assert exchange.answer()[0] == 401
    for _ in range(64):
        exchange.chunk(bytes(MIB))
    assert relay.ask("GET", "/").answer()[0] == 401


def test_a_reader_that_falls_behind_stops_the_socket_and_not_for_good(relay_serving):
    go = threading.Event()

    def answer(request):
        if request.path == "/slow":
            go.wait(20)
        return json_response(200, sum(map(len, iter(request.body.read, b""))))

    relay = relay_serving(answer)
    exchange = relay.begin("POST", "/slow")
    sent = []

    def upload():
        for _ in range(128):
            exchange.chunk(bytes(MIB))
            sent.append(None)
        exchange.end()

    uploading = threading.Thread(target=upload)
    uploading.start()
    wait_until(lambda: stands_still(sent))
    assert len(sent) < 64  # the rest waits in the relay, for the sockets' buffers are full
    go.set()
    uploading.join(20)
    assert json.loads(exchange.answer()[2]) == 128 * MIB


def stands_still(things, seconds=0.3):
    before = len(things)
    time.sleep(seconds)
    return 0 < before == len(things)


def wait_until(true, seconds=15):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_body_that_stops_is_answered_408_as_over_http(relay_serving):
    exchange = relay_serving(strata_answering(echo), stall=0.3).begin("POST", "/")
    exchange.chunk(b"x")
    assert exchange.answer()[0] == 408


def strata_answering(answer):
    def wrapped(request):
        try:
            return answer(request)
        except WorkerError as error:
            return error_response(error)

    return wrapped


def test_a_slow_reader_of_a_big_answer_does_not_delay_small_ones_for_long(relay_serving, tmp_path):
    with open(tmp_path / "big", "wb") as file:
        file.truncate(64 * MIB)
    relay = relay_serving(
        lambda request: Response(
            200, [FileSlice(str(tmp_path / "big"), 64 * MIB)] if request.path == "/big" else [b"x"]
        )
    )
    big = relay.ask("GET", "/big")
    big.start()
    size = 0
    small = relay.ask("GET", "/small")
    reading = threading.Thread(target=lambda: answers.append(small.answer()))
    answers = []
    reading.start()
    for piece in big.pieces():
        size += len(piece)
        if answers:
            break
    assert answers and size < 48 * MIB  # interleaved, not after it
    list(big.pieces())


class Memory:
    """The most this process grew by while the block ran."""

    def __enter__(self):
        self.process, self.over = psutil.Process(), threading.Event()
        self.before = self.peak = self.process.memory_info().rss
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.wait(0.02):
            self.peak = max(self.peak, self.process.memory_info().rss)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.grown = self.peak - self.before


SIZE = 1024  # MiB


def test_a_great_body_comes_in_in_flat_memory(relay_serving):
    def answer(request):
        return json_response(200, sum(map(len, iter(request.body.read, b""))))

    relay = relay_serving(answer)
    chunk = bytes(MIB)
    with Memory() as memory:
        started = time.monotonic()
        exchange = relay.ask("POST", "/", (chunk for _ in range(SIZE)))
        assert json.loads(exchange.answer()[2]) == SIZE * MIB
        print("in: %.0f MB/s" % (SIZE * MIB / 1e6 / (time.monotonic() - started)))
    assert memory.grown < 100 * MIB
    print("grown %.0f MiB" % (memory.grown / MIB))


def test_a_great_answer_goes_out_in_flat_memory(relay_serving, tmp_path):
    with open(tmp_path / "big", "wb") as file:
        file.truncate(SIZE * MIB)
    relay = relay_serving(lambda request: Response(200, [b"head", FileSlice(str(tmp_path / "big"), SIZE * MIB)]))
    with Memory() as memory:
        started = time.monotonic()
        exchange = relay.ask("GET", "/")
        exchange.start()
        assert sum(map(len, exchange.pieces())) == SIZE * MIB + 4
        print("out: %.0f MB/s" % (SIZE * MIB / 1e6 / (time.monotonic() - started)))
    assert exchange.ending == "end" and memory.grown < 100 * MIB
    print("grown %.0f MiB" % (memory.grown / MIB))


def test_small_pieces_travel_together(relay_serving):
    exchange = relay_serving(lambda request: Response(200, [b"ab"] * 1000)).ask("GET", "/")
    exchange.start()
    assert list(exchange.pieces()) == [b"ab" * 1000]


# --- Relays that come and go ------------------------------------------------------------


def test_the_relay_dies_and_comes_back(relay_serving):
    go, outcomes = threading.Event(), queue.Queue()

    def answer(request):
        if request.path != "/slow":
            return echo(request)
        outcomes.put(len(b"".join(iter(request.body.read, b""))))
        go.wait(10)
        outcomes.put("ran to its end")
        return Response(200, [b"x"], close=lambda: outcomes.put("closed"))

    relay = relay_serving(answer)
    relay.ask("POST", "/slow", [b"whole"])
    assert outcomes.get(timeout=10) == 5
    relay.ws.socket.shutdown(socket.SHUT_RDWR)
    relay.sockets.get(timeout=10)  # a new one
    assert (
        relay.ask(
            "POST",
            "/",
            [b"again"],
        ).answer()[2]
        == b"again"
    )
    go.set()
    assert [outcomes.get(timeout=10) for _ in range(2)] == ["ran to its end", "closed"]
    assert relay.ask("POST", "/", [b"again"]).answer()[2] == b"again"


def test_a_body_that_was_not_all_there_when_the_relay_died_is_disconnected(relay_serving):
    outcomes = queue.Queue()

    def answer(request):
        try:
            return echo(request)
        except Disconnected:
            outcomes.put("disconnected")
            raise

    relay = relay_serving(answer)
    relay.begin("POST", "/").chunk(b"half")
    relay.ws.socket.shutdown(socket.SHUT_RDWR)
    assert outcomes.get(timeout=10) == "disconnected"


def test_a_relay_that_says_goodbye_is_dialled_again(relay_serving):
    relay = relay_serving(echo)
    relay.ws.close(1012)
    relay.sockets.get(timeout=10)
    assert relay.ask("POST", "/", [b"again"]).answer()[2] == b"again"


def test_a_relay_that_is_not_there_yet_is_waited_for(tell):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = Relay(echo, "ws://127.0.0.1:%d/" % port, None, 20, tell.put)
    worker.start()
    time.sleep(0.2)
    relay = RelayPeer(port)
    try:
        relay.sockets.get(timeout=10)
        assert relay.ask("POST", "/", [b"x"]).answer()[2] == b"x"
    finally:
        worker.stop()
        relay.close()
    assert tell.empty()


@pytest.mark.parametrize(
    "status, final", [(401, True), (403, True), (404, True), (408, False), (429, False), (500, False), (503, False)]
)
def test_a_handshake_answered_4xx_is_final_and_anything_else_is_tried_again(tell, status, final):
    asked = queue.Queue()

    def refuse(ws, request):
        asked.put(None)
        return ws.respond(status, "because\n")

    relay = RelayPeer(process_request=refuse)
    worker = Relay(echo, "ws://127.0.0.1:%d/?secret=1" % relay.port, None, 20, tell.put)
    worker.start()
    try:
        asked.get(timeout=10)
        if final:
            reason = tell.get(timeout=10)
            assert str(status) in reason and "because" in reason and "secret" not in reason
            worker.thread.join(5)
            assert not worker.thread.is_alive() and asked.empty()
        else:
            asked.get(timeout=10)
            assert tell.empty()
    finally:
        worker.stop()
        relay.close()


def test_a_relay_that_does_not_select_the_subprotocol_is_refused(tell):
    relay = RelayPeer(subprotocols=None)
    worker = Relay(echo, "ws://127.0.0.1:%d/" % relay.port, None, 20, tell.put)
    worker.start()
    assert SUBPROTOCOL in tell.get(timeout=10)
    worker.stop()
    relay.close()


def test_stopping_says_goodbye_and_refuses_what_comes_meanwhile(relay_serving):
    go = threading.Event()

    def answer(request):
        go.wait(10)
        return echo(request)

    relay = relay_serving(answer)
    running = relay.ask("POST", "/", [b"x"])
    relay.ask("POST", "/").frames  # noqa: B018 - has a thread before we stop
    wait_until(lambda: relay.worker.busy == 2)
    relay.worker.stop_accepting()
    assert relay.ask("GET", "/").answer()[0] == 503
    go.set()
    assert running.answer()[2] == b"x"
    relay.worker.stop()
    wait_until(lambda: relay.ws.close_code is not None)
    assert relay.ws.close_code == 1001
    assert not relay.worker.thread.is_alive()


def test_without_a_thread_to_be_had_a_request_is_refused(relay_serving, monkeypatch):
    relay, start = relay_serving(echo), threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("strata-request"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert relay.ask("GET", "/").answer()[0] == 503
    monkeypatch.undo()
    assert relay.ask("GET", "/").answer()[0] == 200
    wait_until(lambda: relay.worker.busy == 0)


def test_more_requests_than_threads_are_refused_but_not_health_and_cancel(relay_serving, monkeypatch):
    monkeypatch.setattr(strata_worker, "MAX_REQUESTS", 2)
    go = threading.Event()

    def answer(request):
        if request.path == "/slow":
            go.wait(10)
        return echo(request)

    relay = relay_serving(answer)
    slow = [relay.ask("POST", "/slow") for _ in range(2)]
    wait_until(lambda: relay.worker.busy == 2)
    assert relay.ask("POST", "/slow").answer()[0] == 503
    assert relay.ask("GET", "/health").answer()[0] == 200
    assert relay.ask("POST", "/v1/executions/b/cancel").answer()[0] == 200
    go.set()
    assert [exchange.answer()[0] for exchange in slow] == [200, 200]
    wait_until(lambda: relay.worker.busy == 0)


# --- Frames on the wire -----------------------------------------------------------------


class RawRelay:
    """A relay that sends whatever bytes a test wants, and sees what comes back frame by frame."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        self.port = self.listener.getsockname()[1]

    def accept(self, extra=b""):
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(10)
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.sock.recv(4096)
        key = next(line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key"))
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        self.sock.sendall(GOOD.replace(b"ACCEPT", accept) + extra)
        self.peer = Protocol(SERVER, max_size=None)

    def frames(self):
        while True:
            data = self.sock.recv(MIB)
            if not data:
                return
            self.peer.receive_data(data)
            yield from self.peer.events_received()

    def close(self):
        self.listener.close()
        self.sock.close()


@pytest.fixture
def raw(tell):
    relay = RawRelay()
    worker = Relay(echo, "ws://127.0.0.1:%d" % relay.port, None, 20, tell.put)
    worker.start()
    yield relay
    relay.close()
    worker.stop()


REQUEST = from_server(
    TEXT, json.dumps({"type": "request", "id": 1, "method": "POST", "path": "/", "query": "", "headers": []}).encode()
)


def test_frames_right_behind_the_handshake_are_not_lost(raw):
    raw.accept(REQUEST + from_server(TEXT, b'{"type": "end", "id": 1}'))
    frames = raw.frames()
    assert json.loads(bytes(next(frames).data))["status"] == 200


def test_fragmented_and_dribbled_frames_are_answered(raw):
    raw.accept()
    head = REQUEST[4:] if REQUEST[1] == 126 else REQUEST[2:]
    data = (
        from_server(TEXT, head[:10], fin=False)
        + from_server(PING, b"?")
        + from_server(0, head[10:])
        + from_server(BINARY, b"\0\0", fin=False)
        + from_server(0, b"\0\x01he", fin=False)
        + from_server(0, b"llo")
        + from_server(TEXT, b'{"type": "end", "id": 1}')
    )
    for byte in data:
        raw.sock.sendall(bytes([byte]))
    frames = raw.frames()
    pong, response, body, end = (next(frames) for _ in range(4))
    assert (pong.opcode, bytes(pong.data)) == (PONG, b"?")
    assert json.loads(bytes(response.data))["status"] == 200
    assert bytes(body.data) == b"\0\0\0\x01hello"
    assert json.loads(bytes(end.data)) == {"type": "end", "id": 1}


@pytest.mark.parametrize("name", BROKEN)
def test_a_relay_that_breaks_the_rfc_gets_a_close_and_is_dialled_again(raw, name):
    data, code = BROKEN[name]
    raw.accept(data)
    (close,) = raw.frames()
    assert (close.opcode, int.from_bytes(bytes(close.data)[:2], "big")) == (CLOSE, code)
    raw.accept(REQUEST + from_server(TEXT, b'{"type": "end", "id": 1}'))
    assert json.loads(bytes(next(raw.frames()).data))["status"] == 200


def test_a_silent_relay_is_pinged_and_given_up(raw, monkeypatch):
    monkeypatch.setattr(strata_worker, "PING_SECONDS", 0.3)
    raw.accept()
    assert [event.opcode for event in raw.frames()] == [PING]
    raw.accept()


def test_a_relay_that_answers_pings_is_kept(raw, monkeypatch):
    monkeypatch.setattr(strata_worker, "PING_SECONDS", 0.2)
    raw.accept()
    frames = raw.frames()
    for _ in range(4):
        assert next(frames).opcode == PING
        raw.sock.sendall(from_server(PONG, b""))


def test_a_ping_is_answered_while_an_answer_is_stuck(tell, tmp_path):
    """The reader never waits for the writers: it leaves the pong to them."""
    with open(tmp_path / "big", "wb") as file:
        file.truncate(64 * MIB)
    raw = RawRelay()
    worker = Relay(
        lambda request: Response(200, [FileSlice(str(tmp_path / "big"), 64 * MIB)]),
        "ws://127.0.0.1:%d" % raw.port,
        None,
        20,
        tell.put,
    )
    worker.start()
    raw.accept(REQUEST)
    time.sleep(0.5)  # its frames fill the sockets' buffers
    raw.sock.sendall(
        from_server(PING, b"1") + from_server(PING, b"2") + from_server(TEXT, b'{"type": "abort", "id": 1}')
    )
    pongs = [bytes(event.data) for event in first_after(raw.frames(), PONG)]
    assert pongs[-1] == b"2"
    raw.close()
    worker.stop()


def first_after(frames, opcode):
    for event in frames:
        if event.opcode == opcode:
            yield event
            if bytes(event.data) == b"2":
                return


def test_a_relay_that_takes_nothing_is_given_up(tell, tmp_path):
    closed = Closing()
    with open(tmp_path / "big", "wb") as file:
        file.truncate(64 * MIB)
    raw = RawRelay()
    answer = lambda request: Response(200, [FileSlice(str(tmp_path / "big"), 64 * MIB)], close=closed)
    worker = Relay(answer, "ws://127.0.0.1:%d" % raw.port, None, 0.5, tell.put)
    worker.start()
    raw.accept(REQUEST)
    closed.wait()
    raw.accept()  # dialled again
    raw.close()
    worker.stop()


# --- wss --------------------------------------------------------------------------------


@pytest.fixture
def authority(monkeypatch):
    import trustme

    authority = trustme.CA()
    strata_worker.tls_context.cache_clear()
    with authority.cert_pem.tempfile() as path:
        monkeypatch.setenv("SSL_CERT_FILE", path)
        strata_worker.tls_context()
    yield authority
    strata_worker.tls_context.cache_clear()


def test_wss_carries_great_bodies_both_ways_at_once(tell, authority, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    relay = RelayPeer(ssl=context)
    with open(tmp_path / "big", "wb") as file:
        file.truncate(64 * MIB)

    def answer(request):
        if request.method == "GET":
            return Response(200, [FileSlice(str(tmp_path / "big"), 64 * MIB)])
        return json_response(200, sum(map(len, iter(request.body.read, b""))))

    worker = Relay(answer, "wss://127.0.0.1:%d/" % relay.port, None, 20, tell.put)
    worker.start()
    try:
        relay.sockets.get(timeout=10)
        down, up = relay.ask("GET", "/"), relay.begin("POST", "/")
        down.start()
        sizes = []
        reading = threading.Thread(target=lambda: sizes.append(sum(map(len, down.pieces()))))
        reading.start()
        for _ in range(64):
            up.chunk(bytes(MIB))
        up.end()
        assert json.loads(up.answer()[2]) == 64 * MIB
        reading.join(20)
        assert sizes == [64 * MIB]
    finally:
        worker.stop()
        relay.close()


def test_wss_with_a_certificate_of_another_host_is_not_used(tell, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("other.example").configure_cert(context)
    relay = RelayPeer(ssl=context)
    worker = Relay(echo, "wss://127.0.0.1:%d/" % relay.port, "token", 20, tell.put)
    worker.start()
    time.sleep(0.4)
    worker.stop()
    relay.close()
    assert relay.sockets.empty() and tell.empty()


class Front:
    """``with Front(relay) as url:`` - each HTTP request is forwarded over the relay's socket."""

    def __init__(self, relay):
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                path, _, query = self.path.partition("?")
                with lock:
                    number = next(relay.numbers)
                exchange = relay.begin(self.command, path, self.headers.items(), number, query)
                for chunk in self.body():
                    exchange.chunk(chunk)
                exchange.end()
                status, headers = exchange.start()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in exchange.pieces():
                    self.wfile.write(piece)
                self.close_connection = self.close_connection or exchange.ending == "abort"

            def body(self):
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    while size := int(self.rfile.readline(), 16):
                        for start in range(0, size, 2**20):
                            yield self.rfile.read(min(2**20, size - start))
                        self.rfile.readline()
                    self.rfile.readline()
                left = int(self.headers.get("Content-Length", 0))
                while left:
                    piece = self.rfile.read(min(left, 2**20))
                    left -= len(piece)
                    yield piece

            do_GET = do_POST = do_HEAD = do_PUT = forward

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return "http://127.0.0.1:%d" % self.server.server_port

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


# ---------------------------------------------------------------------------------------
# Listening: the other ways in, each on a real worker
# ---------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent / "strata_worker.py"


class ListeningWorker:
    """A worker started as people start it; its log, line by line."""

    def __init__(self, *flags, **variables):
        environ = {k: v for k, v in os.environ.items() if not k.startswith("STRATA")}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, "STRATA_WORKER_PRELOAD": "", **variables},
        )
        self.lines = []
        self.reader = threading.Thread(
            target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")), daemon=True
        )
        self.reader.start()

    def said(self, pattern):
        wait_until(lambda: re.search(pattern, "".join(self.lines)) or self.process.poll() is not None)
        wait_until(lambda: re.search(pattern, "".join(self.lines)) or not self.reader.is_alive())
        found = re.search(pattern, "".join(self.lines))
        assert found, "".join(self.lines)
        return found

    @property
    def port(self):
        return int(self.said(r"listening on https?://[^\s]*:(\d+)").group(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
        self.code = self.process.wait(20)
        self.reader.join()
        self.process.stderr.close()


def push(source, build_id="b", inputs=(), timeout=30):
    """Headers and body of a push of one cell."""
    metadata = {
        "protocol_version": "v1",
        "build_id": build_id,
        "inputs": [{"name": n, "format": "json/object"} for n, _ in inputs],
        "transform": {"ref": "notebook_cell@v1", "params": {"source": source, "timeout_seconds": timeout}},
    }
    body = b""
    for name, value in [("metadata", json.dumps(metadata).encode()), *inputs]:
        body += b'--B\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n%s\r\n' % (name.encode(), value)
    return {"Content-Type": "multipart/form-data; boundary=B"}, body + b"--B--\r\n"


def manifest_of(tar):
    with tarfile.open(fileobj=io.BytesIO(tar)) as bundle:
        return json.load(bundle.extractfile("manifest.json"))


def ask(connection, method, path, body=None, headers=()):
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return response.status, response.read()


# --- --connect --------------------------------------------------------------------------


@pytest.fixture
def relay():
    relay = RelayPeer()
    yield relay
    relay.close()


def connected(relay, **variables):
    return ListeningWorker("--connect", "ws://127.0.0.1:%d/w?key=hidden" % relay.port, **variables)


def test_a_real_worker_runs_cells_through_a_relay(relay):
    with connected(relay) as worker:
        relay.sockets.get(timeout=20)
        status, headers, body = relay.ask("GET", "/health").answer()
        assert (status, json.loads(body)["status"]) == (200, "healthy")
        headers, body = push("y = x + 1", inputs=[("x", b"41")])
        status, _, tar = relay.ask("POST", "/v1/execute", [body[:50], body[50:]], headers.items()).answer()
        assert status == 200 and manifest_of(tar)["success"], manifest_of(tar)
        assert manifest_of(tar)["variables"]["y"]["content_type"] == "json/object"
    assert worker.code == 0
    assert not re.search("listening|hidden", "".join(worker.lines))
    assert relay.ws.close_code == 1001


def test_a_plain_http_client_sees_the_worker_behind_a_relay(relay):
    with connected(relay), Front(relay) as url:
        relay.sockets.get(timeout=20)
        with contextlib.closing(http.client.HTTPConnection(url[7:], timeout=30)) as connection:
            headers, body = push("y = x + 1; big = 'a' * (3 << 20)", inputs=[("x", b"41")])
            connection.request("POST", "/v1/execute", iter([body[:99], body[99:]]), headers, encode_chunked=True)
            response = connection.getresponse()
            assert response.status == 200 and manifest_of(response.read())["success"]
            assert ask(connection, "GET", "/nothing?at=all")[0] == 404


def test_the_cancel_route_stops_a_cell_through_the_relay_and_an_abort_does_not(relay):
    with connected(relay):
        relay.sockets.get(timeout=20)
        headers, body = push("import time; time.sleep(60)", "long")
        running = relay.ask("POST", "/v1/execute", [body], headers.items())
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 1)
        running.abort()
        time.sleep(0.3)
        assert json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 1
        status, _, answer = relay.ask("POST", "/v1/executions/long/cancel").answer()
        assert json.loads(answer)["cancelled"] is True
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 0)


def test_a_cell_outlives_the_socket_its_request_came_by(relay, tmp_path):
    with connected(relay):
        relay.sockets.get(timeout=20)
        headers, body = push("import time; time.sleep(1); open(%r, 'w').close()" % str(tmp_path / "done"))
        relay.ask("POST", "/v1/execute", [body], headers.items())
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 1)
        relay.ws.socket.shutdown(socket.SHUT_RDWR)
        relay.sockets.get(timeout=20)
        wait_until((tmp_path / "done").exists)
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 0)


def test_a_cancel_ends_an_upload_that_has_not_ended(relay):
    with connected(relay):
        relay.sockets.get(timeout=20)
        headers, body = push("x = 1", "half")
        exchange = relay.begin("POST", "/v1/execute", [*headers.items()])
        exchange.chunk(body[:200])
        time.sleep(0.3)
        exchange.abort()
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 0)


def test_both_tokens_are_asked_for_and_neither_reaches_a_cell(relay):
    with connected(relay, STRATA_WORKER_CONNECT_TOKEN="of-relay\n", STRATA_WORKER_TOKEN="of-worker"):
        assert relay.sockets.get(timeout=20).request.headers["Authorization"] == "Bearer of-relay"
        headers, body = push("import os; seen = sorted(k for k in os.environ if k.endswith('TOKEN'))")
        assert relay.ask("POST", "/v1/execute", [body], headers.items()).answer()[0] == 401
        headers["authorization"] = "Bearer of-worker"
        status, _, tar = relay.ask("POST", "/v1/execute", [body], headers.items()).answer()
        with tarfile.open(fileobj=io.BytesIO(tar)) as bundle:
            assert json.load(bundle.extractfile("files/seen.json")) == []


def test_a_relay_that_refuses_the_worker_ends_it_with_exit_code_1():
    relay = RelayPeer(process_request=lambda ws, request: ws.respond(403, "not yours\n"))
    with connected(relay) as worker:
        assert worker.process.wait(20) == 1
        worker.said("refused this worker: it answered 403 Forbidden: 'not yours'")
    relay.close()
    assert "hidden" not in "".join(worker.lines)


@pytest.mark.parametrize(
    "url",
    ["http://relay/", "relay:9000", "ws://", "ws://u:p@relay/", "ws://relay/#x", "ws://relay/ x", "ws://relay:99999/"],
)
def test_any_other_url_than_of_a_websocket_is_refused_at_start(url):
    with ListeningWorker("--connect", url) as worker:
        assert worker.process.wait(20) == 1
        worker.said("--connect is .*must be a ws:// or wss:// URL")


def test_a_connect_token_that_no_header_can_carry_is_refused_at_start_unshown():
    with ListeningWorker("--connect", "ws://127.0.0.1:1/", STRATA_WORKER_CONNECT_TOKEN="gehe\u00efm x") as worker:
        assert worker.process.wait(20) == 1
        worker.said(r"STRATA_WORKER_CONNECT_TOKEN is \(hidden\)")


def test_sigterm_ends_a_worker_whose_relay_is_not_there():
    with ListeningWorker("--connect", "ws://127.0.0.1:1/") as worker:
        worker.said("is not there")
    assert worker.code == 0


# --- TLS --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls_authority():
    return trustme.CA()


@pytest.fixture
def files(tls_authority, tmp_path):
    def write(*names):
        certificate = tls_authority.issue_cert(*names)
        (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        (tmp_path / "key.pem").write_bytes(certificate.private_key_pem.bytes())
        return "--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")

    return write


@pytest.fixture
def trusting(tls_authority):
    context = ssl.create_default_context()
    tls_authority.configure_trust(context)
    return context


@contextlib.contextmanager
def https(port, context):
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)) as connection:
        yield connection


def test_https_serves_cells_and_keeps_its_connections(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        with https(worker.port, trusting) as connection:
            for n in range(3):
                headers, body = push("y = x * 2", inputs=[("x", b'"%s"' % (b"a" * MIB))])
                status, tar = ask(connection, "POST", "/v1/execute", body, headers)
                assert status == 200 and manifest_of(tar)["success"]
                assert ask(connection, "GET", "/health")[0] == 200
    assert worker.code == 0


def test_a_great_answer_is_whole_over_https(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        with https(worker.port, trusting) as connection:
            headers, body = push("x = 'a' * (64 << 20)")
            status, tar = ask(connection, "POST", "/v1/execute", body, headers)
            started = time.monotonic()
            assert status == 200 and manifest_of(tar)["success"] and len(tar) > 64 * MIB
            print(time.monotonic() - started)


def test_a_handshake_that_dawdles_or_is_none_holds_up_nobody(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        with contextlib.ExitStack() as stack:
            for junk in [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", os.urandom(500)] * 5:
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", worker.port)))
                sock.sendall(junk)
            started = time.monotonic()
            with https(worker.port, trusting) as connection:
                assert ask(connection, "GET", "/health")[0] == 200
            assert time.monotonic() - started < 2


def test_a_handshake_one_byte_at_a_time_is_made(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", worker.port)) as sock:
            sock.settimeout(10)

            def flush():
                for byte in outgoing.read():
                    sock.sendall(bytes([byte]))

            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    flush()
                    incoming.write(sock.recv(65536))
            tls.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            flush()
            answer = b""
            while b'"healthy"' not in answer:
                incoming.write(sock.recv(65536))
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer += tls.read(65536)


def test_tls_1_1_is_refused(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trusting.minimum_version = ssl.TLSVersion.TLSv1
            trusting.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError), https(worker.port, trusting) as connection:
            connection.connect()


def test_a_refusal_and_a_cancelled_upload_are_answered_under_tls_too(files, trusting):
    """What shuts down one direction of the socket must not go on in the clear."""
    with ListeningWorker("--port", "0", *files("127.0.0.1"), STRATA_WORKER_STALL_SECONDS="20") as worker:
        with https(worker.port, trusting) as connection:
            assert ask(connection, "POST", "/v1/execute", b"x" * MIB, {"Content-Type": "text/plain"})[0] == 400
        with https(worker.port, trusting) as connection:
            connection.connect()
            connection.sock.sendall(b"GET / HTTP/1.1\n\n")
            assert connection.sock.recv(100).startswith(b"HTTP/1.1 400")


def test_sighup_reads_the_certificate_again_and_a_bad_one_leaves_the_old(files, trusting, tmp_path):
    flags = files("127.0.0.1", "old.example")
    with ListeningWorker("--port", "0", *flags) as worker:

        def names():
            with https(worker.port, trusting) as connection:
                connection.connect()
                return {value for _, value in connection.sock.getpeercert()["subjectAltName"]}

        assert "old.example" in names()
        with https(worker.port, trusting) as kept:
            assert ask(kept, "GET", "/health")[0] == 200
            files("127.0.0.1", "new.example")
            worker.process.send_signal(signal.SIGHUP)
            worker.said("read .* again")
            assert "new.example" in names()
            assert ask(kept, "GET", "/health")[0] == 200
        (tmp_path / "key.pem").write_text("nonsense")
        worker.process.send_signal(signal.SIGHUP)
        worker.said("the old certificate stays")
        assert "new.example" in names()


def test_a_certificate_that_is_not_to_be_used_is_one_clear_line_at_start(files, tmp_path):
    flags = files("127.0.0.1")
    for broken in (flags[:2], (*flags[:3], str(tmp_path / "absent")), (*flags[:3], flags[1])):
        with ListeningWorker("--port", "0", *broken) as worker:
            assert worker.process.wait(20) == 1
        assert re.fullmatch("strata-worker: --tls-cert .*\n", worker.lines[-1]) and "Traceback" not in "".join(
            worker.lines
        )


def test_a_token_on_an_open_address_without_tls_is_warned_of(files):
    with ListeningWorker("--port", "0", STRATA_WORKER_TOKEN="t") as worker:
        worker.said("anyone on the way can read the token")
    with ListeningWorker("--port", "0", *files("127.0.0.1"), STRATA_WORKER_TOKEN="t") as worker:
        worker.said("listening on https://127.0.0.1")
    assert "anyone" not in "".join(worker.lines)


# --- --uds ------------------------------------------------------------------------------


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(self.path)


def test_a_unix_socket_serves_cells_to_its_owner_and_is_gone_at_the_end(tmp_path):
    path = str(tmp_path / "w.sock")
    with ListeningWorker("--uds", path) as worker:
        worker.said("listening on unix:" + path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with contextlib.closing(UnixConnection(path)) as connection:
            headers, body = push("x = 'a' * (1 << 20)")
            status, tar = ask(connection, "POST", "/v1/execute", body, headers)
            assert status == 200 and manifest_of(tar)["success"]
            assert ask(connection, "GET", "/health")[0] == 200
    assert worker.code == 0 and not os.path.exists(path)
    assert "anyone" not in "".join(worker.lines)


def test_a_socket_left_by_a_killed_worker_is_replaced_and_a_living_one_is_not(tmp_path):
    path = str(tmp_path / "w.sock")
    with ListeningWorker("--uds", path) as killed:
        killed.said("listening")
        killed.process.kill()
        killed.process.wait()
    assert os.path.exists(path)
    with ListeningWorker("--uds", path) as worker:
        worker.said("listening")
        with ListeningWorker("--uds", path) as second:
            assert second.process.wait(20) == 1
        second.said("strata-worker: .*--uds .*w.sock: .*in use")
        with contextlib.closing(UnixConnection(path)) as connection:
            assert ask(connection, "GET", "/health")[0] == 200


def test_a_file_in_the_sockets_place_is_left_alone(tmp_path):
    (tmp_path / "w.sock").write_text("precious")
    with ListeningWorker("--uds", str(tmp_path / "w.sock")) as worker:
        assert worker.process.wait(20) == 1
    assert (tmp_path / "w.sock").read_text() == "precious"


# --- --exit-when-idle -------------------------------------------------------------------


def test_a_worker_without_runs_ends_with_exit_code_0():
    started = time.monotonic()
    with ListeningWorker("--port", "0", "--exit-when-idle", "1") as worker:
        assert worker.process.wait(20) == 0
        assert time.monotonic() - started >= 1
        worker.said("no run for 1 seconds")


def test_a_run_puts_the_end_off_and_questions_do_not():
    with ListeningWorker("--port", "0", "--exit-when-idle", "1") as worker:
        started = time.monotonic()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)) as connection:
            headers, body = push("import time; time.sleep(2.5)")
            assert ask(connection, "POST", "/v1/execute", body, headers)[0] == 200
        ended = time.monotonic()
        assert worker.process.wait(20) == 0
        assert ended - started >= 2.5 and 0.9 <= time.monotonic() - ended < 4


# --- WSGI -------------------------------------------------------------------------------

WAITRESS = """
import logging, sys, waitress, strata_worker
logging.basicConfig(level="INFO")
app = strata_worker.wsgi_app(token="t")
server = waitress.create_server(app, host="127.0.0.1", port=0, threads=8)
print("listening on http://127.0.0.1:%s" % server.effective_port, file=sys.stderr, flush=True)
server.run()
"""


class UnderWaitress(ListeningWorker):
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WAITRESS],
            cwd=SCRIPT.parent,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STRATA_WORKER_PRELOAD": ""},
        )
        self.lines = []
        self.reader = threading.Thread(
            target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")), daemon=True
        )
        self.reader.start()

    def __exit__(self, *exc_info):
        self.process.send_signal(signal.SIGINT)
        super().__exit__(*exc_info)


@pytest.fixture(scope="module")
def platform():
    with UnderWaitress() as worker:
        yield worker.port


TOKEN = {"Authorization": "Bearer t"}


def test_waitress_serves_the_worker(platform):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", platform, timeout=30)) as connection:
        assert ask(connection, "GET", "/health")[0] == 200
        headers, body = push("y = x * 2; z = 'a' * (8 << 20)", inputs=[("x", b'"%s"' % (b"a" * MIB))])
        assert ask(connection, "POST", "/v1/execute", body, headers)[0] == 401
        status, tar = ask(connection, "POST", "/v1/execute", body, {**headers, **TOKEN})
        assert status == 200 and manifest_of(tar)["success"] and len(tar) > 10 * MIB
        status, answer = ask(connection, "GET", "/nothing", headers=TOKEN)
        assert status == 404 and json.loads(answer)["detail"]
        connection.request("HEAD", "/health")
        response = connection.getresponse()
        assert response.status == 200 and int(response.headers["Content-Length"]) > 0 and response.read() == b""


def test_a_chunked_body_is_read_to_its_end_under_waitress(platform):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", platform, timeout=30)) as connection:
        headers, body = push("y = x", inputs=[("x", b"1")])
        connection.request(
            "POST", "/v1/execute", iter([body[:100], body[100:]]), {**headers, **TOKEN}, encode_chunked=True
        )
        response = connection.getresponse()
        assert response.status == 200 and manifest_of(response.read())["success"]


def test_the_cancel_route_works_under_waitress(platform):
    outcome = queue.Queue()

    def run():
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", platform, timeout=30)) as connection:
            headers, body = push("import time; time.sleep(60)", "a b")
            outcome.put(ask(connection, "POST", "/v1/execute", body, {**headers, **TOKEN})[0])

    threading.Thread(target=run).start()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", platform, timeout=30)) as connection:
        cancel = lambda: json.loads(ask(connection, "POST", "/v1/executions/a%20b/cancel", headers=TOKEN)[1])[
            "cancelled"
        ]
        wait_until(cancel)
    assert outcome.get(timeout=20) in (409, 500)


def test_a_body_that_ends_early_is_no_run_for_wsgi():
    import strata_worker

    environ = {"REQUEST_METHOD": "POST", "wsgi.input": io.BytesIO(b"abc"), "CONTENT_LENGTH": "10"}
    body = strata_worker.wsgi_request(environ).body
    assert body.read() == b"abc"
    with pytest.raises(strata_worker.Disconnected):
        body.read()


def test_a_response_is_closed_when_the_wsgi_server_closes_it():
    import strata_worker

    closed = []
    response = strata_worker.Response(200, [b"a", b"b"], close=lambda: closed.append(1))
    environ = {"REQUEST_METHOD": "GET", "wsgi.input": io.BytesIO()}
    answer = strata_worker.wsgi_call(lambda request: response, environ, lambda status, headers: None)
    assert list(answer) == [b"ab"] and not closed
    answer.close()
    assert closed


def needs_renv():
    if not r_says('requireNamespace("renv", quietly = TRUE)'):
        pytest.skip("needs the R package renv")


def test_a_restore_leaves_the_library_its_lock_and_the_cache_and_copies_every_package(r_worker, r_lock):
    needs_renv()
    r_worker.execute(HELLO, language="r", environment=r_lock, timeout=120).bundle
    root = r_worker.envs / "r"
    library = next(marker.parent for marker in root.glob("*/.strata-complete") if marker.parent.name != "cache")
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [library.name, library.name + ".lock", "cache", "cache.lock"]
    )
    assert [path.name for path in sorted(library.iterdir()) if not path.name.startswith(".")] == ["alphaone", "betaone"]
    assert not any(path.is_symlink() for path in library.rglob("*"))
    assert list(root.glob("cache/**/betaone/DESCRIPTION"))


def test_a_package_that_no_repository_has_fails_the_cell_with_renvs_own_words_and_leaves_no_library(r_worker, r_lock):
    import hashlib

    needs_renv()
    lock = json.loads(r_lock["lockfile"])
    lock["Packages"]["gammaone"] = {
        "Package": "gammaone",
        "Version": "1.0",
        "Source": "Repository",
        "Repository": "LOCAL",
    }
    text = json.dumps(lock)
    block = {"key": hashlib.sha256(text.encode()).hexdigest(), "lockfile": text}
    answer = r_worker.execute(HELLO, language="r", environment=block, timeout=120)
    assert (
        answer.status == 500
        and answer.json["error"].startswith("locked environment: ")
        and "gammaone" in answer.json["error"]
    )
    assert not list((r_worker.envs / "r").glob(block["key"] + "*/"))
    assert r_worker.execute(HELLO, language="r", environment=r_lock, timeout=120).bundle.json("said") == "from alphaone"


# ---------------------------------------------------------------------------------------
# Core: builds of a real server's POST /v1/materialize
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["pushed", "pulled"])
def core(request, strata, interop_worker, tmp_path_factory):
    """A live server whose scripts run on this worker, and how a build gets there: the server pushes it, or
    (its own runner asleep) the worker is handed the build's manifest."""
    folder = tmp_path_factory.mktemp("core")
    entry = '[[tool.strata.transforms.registry]]\nref = "python_script@*"\nexecutor_url = "%s"\n'
    url = interop_worker.worker.url
    (folder / "pyproject.toml").write_text("[tool.strata.transforms]\nenabled = true\n\n" + entry % url)
    period = "50" if request.param == "pushed" else "86400000"
    with strata_server(strata, folder, STRATA_BUILD_RUNNER_POLL_INTERVAL_MS=period) as url:
        yield Core(url, interop_worker if request.param == "pulled" else None)


class Core:
    def __init__(self, url, worker):
        self.url, self.worker = url, worker

    def call(self, method, path, content=None):
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def put(self, data, number):
        spec = {"executor": "manual@v1", "params": {"number": number}}
        return json.loads(self.call("PUT", "/v1/artifacts", {"inputs": [], "transform": spec, "data": data}))

    def materialize(self, inputs, source, **params):
        """The ended build, and the worker's answer where it was handed the manifest."""
        spec = {"executor": "python_script@v1", "params": {"source": source, **params}}
        content = {"inputs": inputs, "transform": spec, "mode": "artifact"}
        build = "/v1/builds/" + json.loads(self.call("POST", "/v1/materialize", content))["build_id"]
        answer = self.worker and self.worker.manifest(json.loads(self.call("GET", build + "/manifest")))

        def ended():
            told = json.loads(self.call("GET", build))
            return (told["state"] in ("ready", "failed") or answer and answer.status != 200) and told

        return eventually(ended, "the build ends", 60), answer

    def table(self, build):
        import pyarrow

        data = self.call("GET", "/v1/artifacts/%(artifact_id)s/v/%(version)d/data" % build)
        return pyarrow.ipc.open_stream(data).read_all().to_pydict()


def test_a_core_build_becomes_an_artifact_and_the_next_ones_input(core):
    one, two = core.put({"x": [1, 2, 3]}, 1), core.put({"x": [10, 20, 30]}, 2)
    source = """
import pyarrow.compute as pc
print("adding")
output = {"sum": pc.add(input0["x"], pc.multiply(input1["x"], params["rate"]))}
"""
    first, _ = core.materialize([one["artifact_uri"], two["artifact_uri"]], source, rate=2)
    assert first["state"] == "ready", first
    assert core.table(first) == {"sum": [21, 42, 63]}
    second, _ = core.materialize([first["artifact_uri"]], "output = input0.slice(1)")
    assert core.table(second) == {"sum": [42, 63]}


def test_a_core_build_that_raises_fails_with_what_it_raised(core):
    build, answer = core.materialize([], "raise ValueError('no such thing')")
    if answer is None:
        assert build["state"] == "failed" and "ValueError: no such thing" in build["error_message"]
    else:  # the server hears nothing of it: the build's lease runs out
        assert answer.status == 500 and answer.json["error_code"] == "ValueError"


# ---------------------------------------------------------------------------------------
# Jobs: a real server that polls
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def polled_worker(strata):
    """A worker with one slot that answers 202."""
    python = Path(os.path.realpath(strata / "bin" / "python")).parent
    path = os.pathsep.join([str(python), str(Path(uv()).parent), os.environ["PATH"]])
    flags = ("--jobs", "--max-concurrent", "1")
    with WorkerProcess(*flags, PATH=path, STRATA_WORKER_ALLOW_LOCAL_HOSTS="1") as client:
        yield client


JOB_CELLS = {
    "numbers": "numbers = list(range(5))\nprint('counted')",
    "total": "total = sum(numbers)\nprint(total)",
    "slow": "# @timeout 2\nimport time\ntime.sleep(60)",
    "endless": "import time\ntime.sleep(60)",
}


@pytest.mark.parametrize("transport", ["direct", "signed"])
def test_the_server_polls_jobs_through_a_queue_a_timeout_and_a_cancel(
    strata, notebooks, server, polled_worker, transport, tmp_path
):
    url = polled_worker.worker.url + ("/v1/execute" if transport == "direct" else "")
    folder = make_notebook(notebooks / ("jobs-" + transport), JOB_CELLS, url, transport)
    session = open_notebook(server, folder)
    go = str(tmp_path / "go")
    hold = polled_worker.execute(
        "import os, time\nwhile not os.path.exists(%r): time.sleep(0.02)" % go, timeout_seconds=300
    )
    assert hold.status == 202
    with in_background(lambda: run_cell(strata, server, session, "total")) as total:
        queued = lambda: b"strata_worker_queued 1\n" in polled_worker.request("GET", "/metrics").body  # noqa: E731
        eventually(queued, "the cell waits behind the other", 60)
        (tmp_path / "go").touch()
        answer = total(120)
    assert polled_worker.request("GET", hold.json["job_url"]).status == 200
    assert answer["status"] == "ok" and answer["stdout"] == "10\n", answer
    slow = run_cell(strata, server, session, "slow")
    assert slow["status"] == "error" and "2" in slow["error"], slow
    with in_background(lambda: run_cell(strata, server, session, "endless")) as endless:
        eventually(lambda: polled_worker.health()["active_executions"] == 1, "the cell runs", 60)
        command = [strata / "bin" / "strata", "cell", "cancel", "--server", server, "--session", session, "endless"]
        run(*command, env=server_environment(strata))
        assert endless(60)["status"] != "ok"
    eventually(lambda: polled_worker.health()["active_executions"] == 0, "its slot is free")


# ---------------------------------------------------------------------------------------
# Folders: a notebook with mounts and output folders, by every way that a server has
# ---------------------------------------------------------------------------------------

FOLDER_CELLS = {
    "reads": "# @mount data s3://bucket/{prefix}/in\nseen_reads = {{p.name: p.read_text() for p in sorted(data.iterdir())}}",
    "writes": "# @mount out s3://bucket/{prefix}/out rw\n"
    "(out / 'made.txt').write_text('made of ' + seen_reads['one.txt'])\n"
    "seen_writes = sorted(path.name for path in out.iterdir())",
    "fills": "# @output_dir plots\n(plots / 'a.txt').write_text('aye')\n"
    "(plots / 'sub').mkdir()\n(plots / 'sub' / 'b.bin').write_bytes(bytes(70_000))\nseen_fills = len(seen_writes)",
    "uses": "seen_uses = {{str(path.relative_to(plots)): path.stat().st_size for path in plots.rglob('*') if path.is_file()}}\n"
    "print((plots / 'a.txt').read_text(), seen_fills)",
}


class Folders:
    """The notebook, where its mounts are, and the variables that server and worker need for them."""

    def __init__(self, s3, url, prefix):
        self.s3, self.prefix = s3, prefix
        credential = {"key": "k", "secret": "s", "endpoint_url": url}
        self.env = {
            "STRATA_NOTEBOOK_CREDENTIALS": json.dumps({"lab": credential}),
            "STRATA_NOTEBOOK_MOUNT_CREDENTIALS": json.dumps({"s3": "lab"}),
        }
        self.cells = {name: source.format(prefix=prefix) for name, source in FOLDER_CELLS.items()}
        s3.input(prefix + "/in/one.txt", b"one")
        s3.input(prefix + "/in/two.txt", b"two")
        s3.input(prefix + "/out/old.txt", b"old")

    def check(self, values):
        assert values["seen_reads"] == {"one.txt": "one", "two.txt": "two"}
        assert values["seen_writes"] == ["made.txt", "old.txt"]
        assert values["seen_fills"] == 2
        assert values["seen_uses"] == {"a.txt": 3, "sub/b.bin": 70_000}
        assert self.s3.read(self.prefix + "/out/made.txt") == b"made of one"
        assert self.s3.read(self.prefix + "/out/old.txt") == b"old"


@pytest.fixture
def folders(s3, prefix):
    return Folders(s3, s3.client.meta.endpoint_url, prefix)


@contextlib.contextmanager
def folder_worker(strata, notebooks, folders, tmp_path):
    env = {"PATH": server_environment(strata)["PATH"], "STRATA_WORKER_ENV_ROOT": str(notebooks / "environments")}
    env.update(STRATA_NOTEBOOK_MOUNT_CACHE_DIR=str(tmp_path / "mounts"), STRATA_WORKER_ALLOW_LOCAL_HOSTS="1")
    with WorkerProcess(**env, **folders.env) as client:
        yield client


def test_a_notebook_with_mounts_and_folders_runs_over_the_direct_transport(strata, notebooks, folders, tmp_path):
    with folder_worker(strata, notebooks, folders, tmp_path) as client:
        url = client.worker.url + "/v1/execute"
        folder = make_notebook(tmp_path / "notebook", folders.cells, url)
        cells = run_notebook(strata, folder, **folders.env)
        assert [cell["status"] for cell in cells.values()] == ["ok"] * 4, cells
        assert cells["uses"]["stdout"] == "aye 2\n"
        values = {name: value for cell in cells.values() for name, value in contents(folder, cell).items()}
        folders.check(values)
        assert client.worker.log().count("ok, staging") == 4


@pytest.mark.parametrize("way", ["worker", "pool"])
def test_a_notebook_with_mounts_and_folders_runs_over_signed_urls(strata, notebooks, folders, tmp_path, way):
    """Straight to a worker, and through a pool that starts one."""
    home = tmp_path / "home"
    home.mkdir()
    serve = folder_worker if way == "worker" else folder_pool
    with serve(strata, notebooks, folders, tmp_path) as client:
        notebook = make_notebook(home / "notebook", {**folders.cells, "all": ALL_SEEN}, client.worker.url, "signed")
        with strata_server(strata, home, **folders.env) as url:
            answer = run_cell(strata, url, open_notebook(url, notebook), "all")
    assert answer["status"] == "ok" and answer["execution_method"] == "executor", answer
    folders.check(json.loads(answer["stdout"]))


ALL_SEEN = """import json
print(json.dumps({"seen_reads": seen_reads, "seen_writes": seen_writes, "seen_fills": seen_fills, "seen_uses": seen_uses}))
"""


# What a platform in front of a pool does: a server's manifests become the pool's jobs.
DISPATCHER = (
    BACKEND
    + """
import http.server, threading

async def main(command, store, env):
    backend = LocalBackend(command)
    machine = MachineType(name="local", image="", env=env)
    pool = Pool(store=PoolStore(store), backend=backend, machine_types=[machine])
    await pool.recover()
    loop = asyncio.get_running_loop()

    async def dispatch(body):
        job = await pool.submit(tenant_id="t", machine_type="local", payload=body)
        done = await pool.wait(job.id, timeout=120)
        print(done.state.value, done.error, file=sys.stderr, flush=True)
        return (200, done.result) if done.state.value == "completed" else (502, json.dumps({"detail": done.error}).encode())

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, status, body):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer(200, json.dumps(HEALTH).encode())

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/execute-manifest":
                return self.answer(404, b"{}")
            self.answer(*asyncio.run_coroutine_threadsafe(dispatch(body), loop).result())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("listening on http://127.0.0.1:%d" % server.server_address[1], file=sys.stderr, flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)  # until the test closes it
    finally:
        for backend_id in list(backend.processes):
            await backend.stop(backend_id)
        await pool.aclose()

HEALTH = json.loads(sys.argv[4])
asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
"""
)


class Dispatcher:
    """As much of a worker's client as the tests of folders need."""

    def __init__(self, url):
        self.worker = self
        self.url = url


@contextlib.contextmanager
def folder_pool(strata, notebooks, folders, tmp_path):
    """A dispatcher in front of a real pool whose machines are this worker."""
    with folder_worker(strata, notebooks, folders, tmp_path) as client:
        health = client.health()  # what such a machine says of itself
    env = {"STRATA_WORKER_ENV_ROOT": str(notebooks / "environments"), "STRATA_WORKER_ALLOW_LOCAL_HOSTS": "1"}
    env.update(STRATA_NOTEBOOK_MOUNT_CACHE_DIR=str(tmp_path / "mounts"), **folders.env)
    command = [sys.executable, str(Path(__file__).resolve().parent / "strata_worker.py")]
    command, env, health = map(json.dumps, (command, env, health))
    process = subprocess.Popen(
        [strata / "bin" / "python", "-c", DISPATCHER, command, tmp_path / "pool.sqlite", env, health],
        stdin=subprocess.PIPE,
        stderr=open(tmp_path / "dispatcher.log", "w"),
        env=server_environment(strata),
    )
    try:
        find = lambda: re.search(r"listening on (\S+)", (tmp_path / "dispatcher.log").read_text())  # noqa: E731
        yield Dispatcher(eventually(find, "the dispatcher listens", 30).group(1))
    finally:
        process.stdin.close()
        process.wait(30)
    assert "completed" in (tmp_path / "dispatcher.log").read_text()


# ---------------------------------------------------------------------------------------
# Through a relay: a real server, whose worker nobody can reach
# ---------------------------------------------------------------------------------------


def test_a_real_server_runs_a_notebook_through_a_relay(strata, notebooks, relay, tmp_path):
    env = {"PATH": server_environment(strata)["PATH"], "STRATA_WORKER_ENV_ROOT": str(notebooks / "environments")}
    cells = {name: CELLS[name] for name in ("values", "values_read", "console", "display")}
    with connected(relay, STRATA_WORKER_PRELOAD="pyarrow,numpy,pandas", **env) as worker, Front(relay) as url:
        relay.sockets.get(timeout=20)
        folder = make_notebook(tmp_path / "notebook", cells, url + "/v1/execute")
        told = run_notebook(strata, folder)
        assert {cell["status"] for cell in told.values()} == {"ok"}, told
        assert len(contents(folder, told["values_read"])["seen_values"]) == 29
    assert "".join(worker.lines).count("ok, staging") == len(cells)
