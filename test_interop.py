"""Tests with real peers: the Strata server, strata-pool, object stores. All on loopback.

Peers            where they come from: environments made once, processes ended by pid
Notebook         a real notebook, run by the real server here, there and by turns
Signed           the same over the pull model, from a live server
Pool             strata-pool with a backend that starts this worker
R environments   renv and its libraries
Lock keys        the worker's own computation beside the server's
Stores           presigned URLs of S3, Azure and Google Cloud storage
R                harness.R, run as the worker runs it
Core             builds of a real server's POST /v1/materialize
Jobs             a real server that polls
Folders          a notebook with mounts and output folders, by every way that a server has
Through a relay  a real server, whose worker nobody can reach
"""

import base64
import contextlib
import datetime
import hashlib
import io
import json
import math
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

import strata_worker
from test_relay import Front, connected, relay  # noqa: F401, F811  (relay is a fixture)
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
    MountCache,
    Store,
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
