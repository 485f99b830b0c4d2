#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["pyarrow", "h11", "certifi"]
# ///
"""A Strata executor in one file: run a notebook's cells on this machine, over HTTP.

Start it with ``python strata_worker.py --port 9000``, or from Python::

    import strata_worker
    with strata_worker.Worker(port=0) as worker:
        print(worker.url)

A request travels down this file's sections and its answer comes back up. Each
section uses only those above it; the next feature belongs in the lowest section
that needs to know of it.

    Protocol        the constants and file names that are wire formats
    Settings        every flag and environment variable, in one frozen object
    Errors          one exception that knows its status and its body
    Secrets         taking the worker's own out of a cell's reach
    Parsing         bytes to requests, forms and cells; no I/O
    HTTP            sockets, one thread for each request under way, early refusals
    Fetching        URLs from elsewhere, judged, pinned and followed no further
    Processes       fork servers, the cells they start, and the console of a cell
    Environments    the locked ones that cells bring, built once and kept
    Machine         what this machine has, probed once
    Output folders  what a cell fills, and the folders that cells are given
    Mounts          folders of object stores, copied here for a cell, and its changes back
    Bundle          a run's folder as a tar, streamed
    Metrics         what happened, counted, in Prometheus' text format
    Execution       slots, and a run's life from admission to answer
    Jobs            executions whose callers come back for the result
    Routes          which request is whose
    Relay           the same requests, over a WebSocket that the worker opens
    Worker          all of the above, started and stopped together
    Tools           a check of this machine, one file run as a cell, one file to copy
    Command line    flags, signals, the log

A server thread never runs a cell itself: ``harness.py --fork-server`` forks them,
reaps them and ends whatever they leave behind.
"""

import sys

if sys.version_info < (3, 10):
    sys.exit("strata-worker needs Python 3.10 or newer; this is %s" % sys.version.split()[0])

import argparse
import atexit
import base64
import bisect
import codecs
import collections
import contextlib
import dataclasses
import datetime
import errno
import functools
import gzip
import hashlib
import hmac
import http
import http.client
import importlib.machinery
import importlib.util
import ipaddress
import itertools
import json
import logging
import math
import os
import queue
import random
import re
import selectors
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import tarfile
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import weakref
import zlib
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    try:
        import tomli as tomllib
    except ImportError:
        tomllib = None

try:
    import h11
except ImportError:
    sys.exit(
        "strata-worker needs h11, which %s does not have: %s -m pip install h11 certifi pyarrow"
        % (sys.executable, sys.executable)
    )

__version__ = "0.1.0"

log = logging.getLogger("strata_worker")


# ---------------------------------------------------------------------------------------
# Protocol: the constants and file names that are wire formats
# ---------------------------------------------------------------------------------------

PROTOCOL = "v1"
NOTEBOOK_PROTOCOL = "notebook-cell-v1"
TRANSFORM_REF = "notebook_cell@v1"
PYTHON_SCRIPT = "python_script@v1"  # the Core transform that needs no code of the operator's
CORE_FORMAT = "arrow_ipc_stream"  # of a Core transform's inputs
MANIFEST_FORMAT = "notebook-build-manifest@v1"
BUNDLE_FORMAT = "notebook-output-bundle@v1"

PROTOCOL_HEADERS = (
    ("X-Strata-Executor-Protocol", PROTOCOL),
    ("X-Strata-Notebook-Executor-Protocol", NOTEBOOK_PROTOCOL),
)

EXTENSIONS = {
    "arrow/ipc": ".arrow",
    "json/object": ".json",
    "pickle/object": ".pickle",
    "image/png": ".png",
    "text/markdown": ".md",
    "module/import": ".module.json",
    "module/cell": ".cell_module.json",
    "module/cell-instance": ".cell_instance.pickle",
    "dir/tar": ".dir.tar",
    "application/x-r-rds": ".rds",
}

LANGUAGES = ("python", "r")


SCHEMES = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az"}  # of mounts
VARIABLE = re.compile(r"\$\{(?!file:)([^{}\"]+)\}")  # in a credential


def last_component(name):
    """The last path component of a file name that a request sent; ValueError if it has none."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    if last in ("", ".", "..") or "\0" in last or len(os.fsencode(last)) > 255:
        raise ValueError("%r is not the name of a file" % name)
    return last


# ---------------------------------------------------------------------------------------
# Settings: every flag and environment variable, in one frozen object
# ---------------------------------------------------------------------------------------


def whole_number(least):
    def parse(text):
        number = int(text)
        if number < least:
            raise ValueError("must be a whole number from %d" % least)
        return number

    return parse


def seconds(text):
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError("must be a number, 0 or more")
    return number


def port_number(text):
    number = int(text)
    if not 0 <= number <= 65535:
        raise ValueError("must be a port from 0 to 65535")
    return number


def switch(text):
    if str(text).lower() in ("1", "true", "yes", "on"):
        return True
    if str(text).lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("must be 1 or 0")


def relay_url(text):
    """A ws:// or wss:// URL. One with a password would show it: that is what the token is for."""
    try:
        url = urllib.parse.urlsplit(text)
        plain = re.fullmatch(r"[\x21-\x7e]+", text) and url.hostname and url.port != 0
    except ValueError:
        plain = False
    if not plain or url.scheme not in ("ws", "wss") or "@" in url.netloc or "#" in text:
        raise ValueError("must be a ws:// or wss:// URL, without a user name, password or fragment")
    return text


def header_word(text):
    """A secret as a header can carry it; a file that it was read from may end in a line break."""
    if not re.fullmatch(r"[\x21-\x7e]+", text.strip()):
        raise ValueError("must be printable ASCII without spaces")
    return text.strip()


def one_of(*choices):
    def parse(text):
        if text.lower() not in choices:
            raise ValueError("must be one of " + ", ".join(choices))
        return text.lower()

    return parse


def name_list(text):
    """``A,B*`` or ``["A", "B*"]`` as a tuple of names."""
    if not text.lstrip().startswith("["):
        return tuple(filter(None, (part.strip() for part in text.split(","))))
    names = json.loads(text)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("must be a comma list or a JSON array of strings")
    return tuple(names)


def credential_table(text):
    """``{name: {option: value}}`` from JSON."""
    table = json.loads(text)
    if not isinstance(table, dict) or not all(isinstance(fields, dict) for fields in table.values()):
        raise ValueError("must be a JSON object of objects")
    return table


def transform_table(text):
    """``ref=module:function,…`` as pairs."""
    pairs = [tuple(part.strip().split("=", 1)) for part in text.split(",") if part.strip()]
    for pair in pairs:
        if len(pair) != 2 or not re.fullmatch(r"[\w.]+:[\w.]+", pair[1]) or pair[0] in ("", TRANSFORM_REF):
            raise ValueError("%r must be REF=MODULE:FUNCTION, such as pandas_script@v1=mymodule:run" % "=".join(pair))
    return tuple(pairs)


def scheme_table(text):
    """``{scheme: name}`` from JSON, by the schemes' first names."""
    table = json.loads(text)
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise ValueError("must be a JSON object of strings")
    unknown = set(table) - set(SCHEMES)
    if unknown:
        raise ValueError("has schemes other than %s" % ", ".join(SCHEMES))
    return {SCHEMES[scheme]: name for scheme, name in table.items()}


def with_variables(value, environ):
    """The value with each string ``${NAME}`` replaced by that variable, where it is set."""
    if isinstance(value, dict):
        return {name: with_variables(inner, environ) for name, inner in value.items()}
    found = VARIABLE.fullmatch(value) if isinstance(value, str) else None
    return environ.get(found.group(1), value) if found else value


def setting(env, parse, default, doc, flag=None, secret=False):
    """A field of Settings: where it is read from, how, and what it is for."""
    return dataclasses.field(
        default=default,
        metadata={"env": env, "parse": parse, "doc": doc, "flag": flag, "secret": secret},
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that can be set, read once at start: flags, then variables, then defaults."""

    host: str = setting(
        "STRATA_WORKER_HOST",
        str,
        None,
        "address to listen on; default 127.0.0.1, or 0.0.0.0 when a token is set",
        "--host",
    )
    port: int = setting("STRATA_WORKER_PORT", port_number, 9000, "port; 0 picks a free one", "--port")
    uds: str = setting(
        "STRATA_WORKER_UDS",
        str,
        None,
        "path of a Unix socket to listen on instead; only this user may connect",
        "--uds",
    )
    connect: str = setting(
        "STRATA_WORKER_CONNECT",
        relay_url,
        None,
        "ws:// or wss:// URL of a relay to serve through; no port is bound then",
        "--connect",
    )
    token: str = setting(
        "STRATA_WORKER_TOKEN",
        str,
        None,
        "bearer token that /v1/* and /execute require",
        secret=True,
    )
    tls_cert: str = setting(
        "STRATA_WORKER_TLS_CERT",
        str,
        None,
        "PEM file of the certificate and its chain: serve https. Read again on SIGHUP",
        "--tls-cert",
    )
    tls_key: str = setting("STRATA_WORKER_TLS_KEY", str, None, "PEM file of its key", "--tls-key")
    max_concurrent: int = setting(
        "STRATA_WORKER_MAX_CONCURRENT",
        whole_number(1),
        None,
        "cells at once; more are refused with 503. Default: no limit",
        "--max-concurrent",
    )
    gpu_slots: int = setting(
        "STRATA_WORKER_GPU_SLOTS",
        whole_number(1),
        None,
        "GPUs to hand out, one a cell, through CUDA_VISIBLE_DEVICES. Default: not managed",
        "--gpu-slots",
    )
    jobs: bool = setting(
        "STRATA_WORKER_JOBS",
        switch,
        False,
        "1: answer /v1/execute and /v1/execute-manifest with 202 and a job to poll; a full worker queues cells",
        "--jobs",
    )
    max_jobs: int = setting(
        "STRATA_WORKER_MAX_JOBS",
        whole_number(1),
        100,
        "jobs that are kept, waiting, running and done; more are refused with 503",
    )
    job_seconds: float = setting(
        "STRATA_WORKER_JOB_SECONDS",
        seconds,
        600.0,
        "how long a job waits for a slot, and how long its result waits to be fetched",
    )
    transforms: tuple = setting(
        "STRATA_WORKER_TRANSFORMS",
        transform_table,
        (),
        "Core transforms to serve, as REF=MODULE:FUNCTION; the flag may be given again and again",
        "--transform",
    )
    transform_seconds: float = setting(
        "STRATA_WORKER_TRANSFORM_SECONDS",
        seconds,
        300.0,
        "how long a Core transform may take",
    )
    log_level: str = setting(
        "STRATA_WORKER_LOG_LEVEL",
        one_of("debug", "info", "warning", "error"),
        "info",
        "debug, info, warning or error",
        "--log-level",
    )
    log_format: str = setting(
        "STRATA_WORKER_LOG_FORMAT",
        one_of("text", "json"),
        "text",
        "text, or json for one object a line",
        "--log-format",
    )
    drain_seconds: float = setting(
        "STRATA_WORKER_DRAIN_SECONDS",
        seconds,
        10.0,
        "how long running cells may go on after SIGTERM",
    )
    exit_when_idle: float = setting(
        "STRATA_WORKER_EXIT_WHEN_IDLE",
        seconds,
        0.0,
        "end, with exit code 0, after so many seconds without a run; 0 for never",
        "--exit-when-idle",
    )
    launch_id: str = setting(
        "STRATA_WORKER_LAUNCH_ID",
        str,
        None,
        "echoed by /health as launch_id",
    )
    preload: tuple = setting(
        "STRATA_WORKER_PRELOAD",
        name_list,
        ("pyarrow", "numpy", "pandas"),
        "modules the fork server imports once for all cells; empty for none, off for no fork server",
    )
    cell_memory_mb: int = setting(
        "STRATA_WORKER_CELL_MEMORY_MB",
        whole_number(16),
        None,
        "memory that each process of a cell may use, in MiB. Default: no limit",
    )
    console_max_bytes: int = setting(
        "STRATA_WORKER_CONSOLE_MAX_BYTES",
        whole_number(4096),
        64 * 2**20,
        "how much of a cell's stdout, and of its stderr, is kept: the start and the end",
    )
    env_root: str = setting(
        "STRATA_WORKER_ENV_ROOT",
        str,
        "~/.strata/worker-envs",
        "where locked environments are kept",
    )
    env_registry_url: str = setting(
        "STRATA_WORKER_ENV_REGISTRY_URL",
        str,
        None,
        "where built environments are fetched from: URL/<key>/<interpreter>/<platform>, a .tar.gz",
    )
    env_build_seconds: float = setting(
        "STRATA_WORKER_ENV_BUILD_SECONDS",
        seconds,
        900.0,
        "how long the build of an environment may take",
    )
    env_max_bytes: int = setting(
        "STRATA_WORKER_ENV_MAX_BYTES",
        whole_number(1),
        20 * 2**30,
        "how large an environment from the registry may be, packed and unpacked",
    )
    env_max_idle_days: float = setting(
        "STRATA_WORKER_ENV_MAX_IDLE_DAYS",
        seconds,
        30.0,
        "after how long without use an environment is removed",
    )
    run_root: str = setting(
        "STRATA_WORKER_RUN_ROOT",
        str,
        None,
        "where the folders of running cells are made. Default: the system's temporary folder",
    )
    stall_seconds: float = setting(
        "STRATA_WORKER_STALL_SECONDS",
        seconds,
        60.0,
        "how long a peer may go without moving a byte, in either direction",
    )
    heartbeat_seconds: float = setting(
        "STRATA_WORKER_HEARTBEAT_SECONDS",
        seconds,
        0.0,
        "how long /execute may stay silent before it answers with spaces and its status in the body; 0 for ever",
    )
    max_input_bytes: int = setting(
        "STRATA_WORKER_MAX_INPUT_BYTES",
        whole_number(0),
        2 * 2**30,
        "the largest input that is downloaded (pull model)",
    )
    allowed_hosts: tuple = setting(
        "STRATA_WORKER_ALLOWED_HOSTS",
        name_list,
        (),
        "hosts that a manifest's URLs may name though their address is private; .suffix allowed",
    )
    allow_local_hosts: bool = setting(
        "STRATA_WORKER_ALLOW_LOCAL_HOSTS",
        switch,
        False,
        "1: fetch from any address, through the proxy variables (tests and local development only)",
    )
    env_allowlist: tuple = setting(
        "STRATA_NOTEBOOK_HARNESS_ENV_ALLOWLIST",
        name_list,
        (),
        "variables of the worker that a cell may see besides what any process needs; "
        "PREFIX* allowed. Default: all but the worker's secrets",
    )
    connect_token: str = setting(
        "STRATA_WORKER_CONNECT_TOKEN",
        header_word,
        None,
        "bearer token for the relay",
        secret=True,
    )
    credentials: dict = setting(
        "STRATA_NOTEBOOK_CREDENTIALS",
        credential_table,
        None,
        "storage credentials, as JSON: {name: {option: value}}; a value may be ${VARIABLE} or ${file:/path}",
        secret=True,
    )
    mount_credentials: dict = setting(
        "STRATA_NOTEBOOK_MOUNT_CREDENTIALS",
        scheme_table,
        None,
        'the credential that each storage scheme uses, as JSON: {"s3": name}',
        secret=True,
    )
    mount_cache_dir: str = setting(
        "STRATA_NOTEBOOK_MOUNT_CACHE_DIR",
        str,
        "~/.strata/mount_cache",
        "where read-only mounts are kept from run to run",
    )
    mount_cache_max_bytes: int = setting(
        "STRATA_NOTEBOOK_MOUNT_CACHE_MAX_BYTES",
        whole_number(0),
        20 * 2**30,
        "how much of them is kept; 0 for no limit",
    )
    mount_cache_max_idle_days: float = setting(
        "STRATA_NOTEBOOK_MOUNT_CACHE_MAX_IDLE_DAYS",
        seconds,
        30.0,
        "for how many days without use they are kept; 0 for no limit",
    )
    output_dir_poll_seconds: float = setting(
        "STRATA_WORKER_OUTPUT_DIR_POLL_SECONDS",
        seconds,
        5.0,
        "how often a running cell's output folders are looked at for files to send",
    )

    @classmethod
    def load(cls, environ, given=()):
        """Settings from keyword values or flags (``given``) over variables over defaults.

        Raises ValueError naming the flag or variable that holds a bad value.
        """
        given = dict(given)
        values = {}
        for field in dataclasses.fields(cls):
            source, text = field.metadata["env"], environ.get(field.metadata["env"])
            if given.get(field.name) is not None:
                source, text = field.metadata["flag"] or field.name, given[field.name]
            if text is not None:
                values[field.name] = parse_setting(field, source, text)
        if values.get("credentials"):
            values["credentials"] = with_variables(values["credentials"], environ)
        return cls(**values)

    @property
    def bind_host(self):
        return self.host or ("0.0.0.0" if self.token else "127.0.0.1")


def parse_setting(field, source, text):
    if not isinstance(text, str):
        text = ",".join(text) if isinstance(text, (tuple, list)) else str(text)
    if field.metadata["env"].endswith("_TOKEN") and not text.strip():
        return None  # an empty token is no token; it must not open the door with "Bearer "
    try:
        return field.metadata["parse"](text)
    except ValueError as problem:
        shown = "(hidden)" if field.metadata["secret"] else repr(text)
        raise ValueError("%s is %s: %s" % (source, shown, problem)) from None


SECRET_NAMES = tuple(f.metadata["env"] for f in dataclasses.fields(Settings) if f.metadata["secret"])


def secret_names(environ):
    """The variables no cell may see: the worker's secrets, and those its credentials are made of."""
    return {*SECRET_NAMES, *VARIABLE.findall(environ.get("STRATA_NOTEBOOK_CREDENTIALS", ""))}


# Limits that guard the worker against its peers. Not settings: nobody tunes them, and
# each is far from what an honest client does.
MAX_HEAD = 64 * 1024  # request line and headers; nginx allows 32 KiB, h11 16 KiB
MAX_CONNECTIONS = 1000  # open sockets; past that the longest idle one is closed
MAX_REQUESTS = 128  # threads serving requests; more wait for one
RESERVE = 16  # threads kept for /health and cancels when all of those are busy
HEAD_SECONDS = 10  # from a head's first byte to its last
IDLE_SECONDS = 75  # a kept-alive connection with nothing to say; as nginx
LINGER_SECONDS = 2  # a refused client's time to notice the answer
LINGER_BYTES = 512 * 1024  # read and thrown away meanwhile
NEGLIGIBLE = 64 * 1024  # of an unread body: one packet of a large loopback
MAX_PARTS = 10_000  # multipart parts; Starlette allows 1,000 files
MAX_PART_HEAD = 16 * 1024
MAX_METADATA = 32 * 1024 * 1024  # the source and two lock files; a real one is 100 kB
FULL_DISK = 64 * 1024  # free bytes under which a lost result is the disk's fault
MAX_RESULT = 256 * 1024 * 1024  # result.json of 100,000 variables is 20 MB
CHUNK = 1024 * 1024  # read and written at a time


# ---------------------------------------------------------------------------------------
# Errors: one exception that knows its status and its body
# ---------------------------------------------------------------------------------------


class WorkerError(Exception):
    """A request that ends in an HTTP error (page: "Error envelope").

    ``failed`` picks the body: a run that could not be made to work answers
    ``{"success": false, "error": ...}``, everything else ``{"detail": ...}``.
    """

    def __init__(self, status, message, failed=False, headers=()):
        super().__init__(message)
        self.status = status
        self.message = message
        self.failed = failed
        self.headers = tuple(headers)

    def body(self):
        if self.failed:
            return {"success": False, "error": self.message}
        return {"detail": self.message}


def bad_request(message):
    return WorkerError(400, message)


def unavailable(message):
    """Not now: the same request may be served in a moment (page: 503)."""
    return WorkerError(503, message, headers=[("Retry-After", "1")])


class TransformError(WorkerError):
    """What a Core transform's request ends in, with Core's own body (page: "Core transform executors")."""

    CODES = {400: "INVALID_REQUEST", 408: "TIMEOUT", 409: "CANCELLED", 502: "TRANSFER_FAILED", 503: "BUSY"}

    def __init__(self, status, message, code=None, headers=()):
        super().__init__(status, message, headers=headers)
        self.code = code or self.CODES.get(status, "EXECUTION_FAILED")

    def body(self):
        return {"success": False, "error_code": self.code, "error_message": self.message}


class TransformRaised(TransformError):
    """The transform's own code did."""


class EnvironmentFailure(Exception):
    """A locked environment that cannot be had, and why."""


def run_failed(message, status=500):
    return WorkerError(status, message, failed=True)


# ---------------------------------------------------------------------------------------
# Secrets: taking the worker's own out of a cell's reach
# ---------------------------------------------------------------------------------------

# What any process needs to start and to find its programs, temporary folder and locale.
ESSENTIAL_NAMES = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP LD_LIBRARY_PATH "
    "DYLD_LIBRARY_PATH SSL_CERT_FILE SSL_CERT_DIR VIRTUAL_ENV R_HOME R_LIBS R_LIBS_SITE R_LIBS_USER "
    "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES".split()
)
ESSENTIAL_PREFIXES = ("LC_", "PYTHON")


# Where logins of package indexes are kept, in a name of their own or inside a URL. They
# are for uv, when it builds an environment.
INDEX_CREDENTIALS = re.compile(
    r"UV_(INDEX|DEFAULT_INDEX|INDEX_.*|EXTRA_INDEX_URL|FIND_LINKS|PUBLISH_.*|KEYRING_PROVIDER|API_KEY|AUTH_TOKEN|PYX_.*)"
    r"|PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS)"
)


def cell_environment(environ, allowlist):
    """The worker's environment as a cell may see it: no secrets, and only what is listed."""
    hidden = secret_names(environ)
    return {
        name: value
        for name, value in environ.items()
        if name not in hidden
        and (name in allowlist or not INDEX_CREDENTIALS.fullmatch(name))
        and (not allowlist or is_allowed(name, allowlist))
    }


def is_allowed(name, allowlist):
    if name in ESSENTIAL_NAMES or name.startswith(ESSENTIAL_PREFIXES):
        return True
    return any(
        # A prefix never reaches STRATA_*: it could catch a credential by accident.
        name.startswith(entry[:-1]) and not name.startswith("STRATA_") if entry.endswith("*") else name == entry
        for entry in allowlist
    )


def hide_secrets(environ):
    """Take the worker's secrets out of this process, where a cell of the same user could look.

    ``del os.environ[...]`` leaves them in the block that /proc/<pid>/environ shows, so that
    is overwritten; and the process is made undumpable, which closes its /proc/<pid>/mem
    and ptrace to everybody without CAP_SYS_PTRACE.
    """
    names = [name for name in secret_names(environ) if environ.pop(name, None) is not None]
    if not sys.platform.startswith("linux"):
        return
    make_undumpable()
    if names:
        erase_from_block(names)
        warn_of_parent(names)


def make_undumpable():
    import ctypes

    PR_SET_DUMPABLE = 4
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        log.warning("could not make the worker undumpable: a cell may read its memory")


def erase_from_block(names):
    """Zero the values of these variables in the environment block the kernel gave us."""
    import ctypes

    with open("/proc/self/stat", "rb") as stat_file:
        fields = stat_file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end: proc(5), 50 and 51
    if not 0 < start < end:
        log.warning("the environment block cannot be found: /proc/<pid>/environ may show secrets")
        return
    block = ctypes.string_at(start, end - start)
    for name in names:
        for found in re.finditer(rb"(?:^|\0)" + name.encode() + rb"=([^\0]*)", block):
            ctypes.memset(start + found.start(1), 0, len(found.group(1)))


def warn_of_parent(names):
    """``uv run`` and some supervisors stay around with the environment they handed on."""
    try:
        with open("/proc/%d/environ" % os.getppid(), "rb") as block:
            held = {entry.split(b"=", 1)[0].decode(errors="replace") for entry in block.read().split(b"\0")}
    except OSError:
        return  # another user's process: then a cell cannot read it either
    for name in sorted(held.intersection(names)):
        log.warning(
            "%s is also in the environment of the parent process (pid %d), where a cell can read it; "
            "start the worker so that its parent does not hold it",
            name,
            os.getppid(),
        )


# ---------------------------------------------------------------------------------------
# Parsing: bytes to requests, forms and cells; no I/O
# ---------------------------------------------------------------------------------------
#
# Each parser is fed what has arrived and gives back what it can make of it, or None for
# "more, please". None of them knows a socket or a file.


TRACE_FIELDS = ("traceparent", "tracestate")


class Headers:
    """Header fields: names in lower case, values as text (Latin-1, as on the wire)."""

    def __init__(self, pairs=()):
        self.pairs = [(name.lower(), value) for name, value in pairs]

    def get(self, name, default=None):
        return next((value for key, value in self.pairs if key == name), default)

    def tokens(self, name):
        """A comma-separated field's members, in lower case."""
        values = ",".join(value for key, value in self.pairs if key == name)
        return [token.strip().lower() for token in values.split(",") if token.strip()]


@dataclasses.dataclass
class Head:
    """The start of a request: everything before its body."""

    method: str
    target: str
    headers: Headers
    length: int  # of the body; None when it is chunked
    keep_alive: bool
    expects_continue: bool
    protocol: object = dataclasses.field(repr=False, default=None)  # its h11.Connection

    @property
    def path(self):
        path = self.target.partition("?")[0]
        if "://" in path:  # absolute form, as sent to a proxy
            path = "/" + path.split("://", 1)[1].partition("/")[2]
        return path

    @property
    def query(self):
        return self.target.partition("?")[2]


def take_head(buffer):
    """Take one request's head off the front of ``buffer`` (a bytearray); None if it is not all there.

    h11 reads it, after two things that h11 lets pass and that other servers on the way may
    read differently, which is how requests are smuggled: bare line feeds and folded lines.
    """
    while buffer.startswith(b"\r\n"):  # after an old client's POST: RFC 9112, 2.2
        del buffer[:2]
    end = buffer.find(b"\r\n\r\n")
    if end > MAX_HEAD or end < 0 and len(buffer) > MAX_HEAD:
        raise WorkerError(431, "The request's head is larger than %d bytes" % MAX_HEAD)
    head = bytes(buffer[: end + 4]) if end >= 0 else b""
    if b"\n\n" in buffer[:MAX_HEAD] and end < 0 or re.search(rb"(?<!\r)\n|\r\n[ \t]", head):
        raise bad_request("The request's head has a bare line feed or a folded header line")
    if end < 0:
        return None
    del buffer[: end + 4]
    return parse_head(head)


def parse_head(head):
    protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    try:
        protocol.receive_data(head)
        request = protocol.next_event()
    except h11.RemoteProtocolError as problem:
        raise WorkerError(problem.error_status_hint, "Malformed request: %s" % problem) from None
    if not isinstance(request, h11.Request):
        raise bad_request("Malformed request: no request line")
    headers = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers)
    return Head(
        method=request.method.decode("latin-1"),
        target=request.target.decode("latin-1"),
        headers=headers,
        length=body_length(headers),
        keep_alive=request.http_version == b"1.1" and "close" not in headers.tokens("connection"),
        expects_continue="100-continue" in headers.tokens("expect"),
        protocol=protocol,
    )


def body_length(headers):
    codings, lengths = headers.tokens("transfer-encoding"), headers.tokens("content-length")
    if codings and lengths:
        raise bad_request("The request has both a Content-Length and a Transfer-Encoding")
    if codings:
        return None
    return int(lengths[0]) if lengths else 0


HEADER_PARAMETER = re.compile(r';\s*([^\s=;"]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;]*))', re.DOTALL)


def header_parameters(value):
    """``form-data; name="df"`` as ``("form-data", {"name": "df"})``; RFC 2045, 8187.

    A backslash escapes only a quote or itself, for the sake of old Windows paths. A
    ``name*`` with a charset wins over its plain ``name``.
    """
    parameters = {}
    for name, quoted, token in HEADER_PARAMETER.findall(value):
        parameters[name.lower()] = re.sub(r'\\(["\\])', r"\1", quoted) or token.strip()
    for name in [name for name in parameters if name.endswith("*")]:
        charset, _, rest = parameters.pop(name).partition("'")
        if charset.lower() in ("", "utf-8", "us-ascii", "iso-8859-1"):  # any other leaves the plain one
            parameters[name[:-1]] = urllib.parse.unquote(rest.partition("'")[2], charset or "utf-8")
    return value.partition(";")[0].strip().lower(), parameters


def form_boundary(content_type):
    kind, parameters = header_parameters(content_type or "")
    if kind != "multipart/form-data":
        raise bad_request("Content-Type must be multipart/form-data, not %r" % (content_type or "absent"))
    boundary = parameters.get("boundary", "")
    if not re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]{0,68}[\x21-\x7e])?", boundary):
        raise bad_request("multipart/form-data needs a boundary of 1 to 70 printable characters")
    return boundary.encode()


@dataclasses.dataclass(frozen=True)
class Part:
    """The head of one part of a form."""

    name: str
    filename: str = None


class MultipartParser:
    """RFC 2046 and 7578, fed in pieces of any size.

    ``feed`` gives a list of events: a ``Part`` when one starts, then its bytes, piece by
    piece. A part ends where the next begins, and the form when ``finished`` turns true.
    What follows the last boundary is an epilogue, and ignored.

    Only the delimiter's own length is ever held back, so memory stays flat. The buffer
    starts with a line break, since the first delimiter needs none before it.
    """

    def __init__(self, boundary):
        self.delimiter = b"\r\n--" + boundary
        self.buffer = b"\r\n"
        self.step = self.in_body
        self.discarding = True  # the preamble is a body that nobody wants
        self.after_head = False  # the buffer starts with the line break that ends a part's head
        self.parts = 0
        self.finished = False

    def feed(self, data):
        self.buffer = self.buffer + data if self.buffer else bytes(data)
        events = []
        while not self.finished and self.step(events):
            pass
        if self.finished:
            self.buffer = b""
        return events

    def close(self):
        if not self.finished:
            raise bad_request("The multipart form ends before its final boundary")

    def in_body(self, events):
        found = self.buffer.find(self.delimiter)
        if found < 0:
            self.emit(events, self.possible_delimiter())
            return False
        self.emit(events, found)
        self.step = self.at_delimiter
        return True

    def possible_delimiter(self):
        """How much of the buffer cannot be the start of a delimiter."""
        start = max(0, len(self.buffer) - len(self.delimiter) + 1)
        found = self.buffer.find(b"\r", start)
        while found >= 0 and not self.delimiter.startswith(self.buffer[found:]):
            found = self.buffer.find(b"\r", found + 1)
        return len(self.buffer) if found < 0 else found

    def emit(self, events, size):
        """The buffer's first bytes are content. Right after a head it is always more than two."""
        start = 2 if self.after_head and size else 0
        self.after_head = self.after_head and not size
        if size > start and not self.discarding:
            events.append(self.buffer[start:size] if size - start < len(self.buffer) else self.buffer)
        self.buffer = self.buffer[size:]

    def at_delimiter(self, events):
        """The buffer starts with a delimiter: is it the last, the next, or a line of the body?"""
        rest = self.buffer[len(self.delimiter) : len(self.delimiter) + 1026]
        if rest.startswith(b"--"):
            self.finished = True
            return True
        line = rest.lstrip(b" \t")  # transport padding
        if line.startswith(b"\r\n"):
            self.buffer = self.buffer[len(self.delimiter) + len(rest) - len(line) :]
            self.step = self.in_head
            return True
        if line in (b"", b"\r") and len(rest) < 1026 or rest == b"-":
            return False
        self.emit(events, len(self.delimiter))  # a longer line that only starts like a delimiter
        self.step = self.in_body
        return True

    def in_head(self, events):
        """The buffer starts with the line break that ends the delimiter's line."""
        end = self.buffer.find(b"\r\n\r\n")
        if max(end, len(self.buffer) if end < 0 else 0) > MAX_PART_HEAD:
            raise bad_request("A part's headers are larger than %d bytes" % MAX_PART_HEAD)
        if end < 0:
            return False
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise bad_request("The form has more than %d parts" % MAX_PARTS)
        events.append(parse_part(self.buffer[2:end]))
        # Keep the last line break: the delimiter of a part without a body starts with it.
        self.buffer = self.buffer[end + 2 :]
        self.discarding, self.after_head, self.step = False, True, self.in_body
        return True


def parse_part(head):
    try:
        lines = head.decode("utf-8").split("\r\n")
    except UnicodeDecodeError:
        raise bad_request("A part's headers are not UTF-8: %r" % head[:200]) from None
    fields = Headers(line.partition(":")[::2] for line in lines)
    kind, parameters = header_parameters((fields.get("content-disposition") or "").strip())
    if kind != "form-data" or not parameters.get("name"):
        raise bad_request(
            "A part needs Content-Disposition: form-data with a name, not %r" % head[:200].decode(errors="replace")
        )
    return Part(parameters["name"], parameters.get("filename"))


@dataclasses.dataclass
class InputSpec:
    """One input of a cell: its name, its format, and where its bytes are to be found."""

    name: str
    content_type: str
    file: str  # the recorded file name, or <name><extension>
    uri: str = None  # pull model
    injected: dict = dataclasses.field(default_factory=dict)  # name -> InputSpec


@dataclasses.dataclass(frozen=True)
class Mount:
    """A folder of an object store that a cell sees as a local one."""

    name: str
    uri: str
    scheme: str  # s3, gs or az
    path: str  # bucket/prefix
    writable: bool = False
    options: dict = dataclasses.field(default_factory=dict)  # as fsspec names them
    credential: str = None


@dataclasses.dataclass
class Cell:
    """What a request asks to be run, whichever envelope it came in."""

    source: str
    language: str = "python"
    build_id: str = None
    timeout: float = 30.0  # seconds
    env: dict = dataclasses.field(default_factory=dict)
    inputs: list = dataclasses.field(default_factory=list)
    mounts: list = dataclasses.field(default_factory=list)
    tables: dict = dataclasses.field(default_factory=dict)
    mutation_defines: list = dataclasses.field(default_factory=list)
    environment: dict = None


@dataclasses.dataclass
class Transform(Cell):
    """A Core transform (page: "Core transform executors"): tables in, one table out."""

    ref: str = None
    params: dict = None
    function: str = None  # module:function; without it, params["source"] is run


def parse_json_object(data, what):
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise bad_request("%s is not JSON: %s" % (what, problem)) from None
    return expect(dict, value, what)


KINDS = {dict: "an object", list: "a list", str: "a string"}


def expect(kind, value, what):
    if not isinstance(value, kind):
        raise bad_request("%s must be %s, not %s" % (what, KINDS[kind], json.dumps(value)[:100]))
    return value


def optional(kind, mapping, key, what=None):
    """``mapping[key]`` checked to be of this kind; an empty one where it is absent or null."""
    value = mapping.get(key)
    return kind() if value is None else expect(kind, value, what or key)


def parse_execute(transforms, metadata):
    """The envelope of ``POST /v1/execute`` (page: "push model"), a cell's or a Core transform's.

    ``transforms`` are the functions of the transforms that are served, by ref.
    """
    check_version("protocol_version", metadata.get("protocol_version"), PROTOCOL)
    transform = optional(dict, metadata, "transform")
    ref = known_ref("transform.ref", transform.get("ref"), transforms)
    if ref != TRANSFORM_REF:
        parsed = parse_transform(ref, transforms[ref], transform.get("params"), metadata.get("build_id"))
        parsed.inputs = [parse_core_input(entry) for entry in optional(list, metadata, "inputs")]
        return unambiguous(parsed)
    cell = parse_cell(optional(dict, transform, "params", "transform.params"), metadata.get("build_id"))
    cell.inputs = [parse_descriptor(entry) for entry in optional(list, metadata, "inputs")]
    return unambiguous(cell)


def parse_notebook_execute(metadata):
    """The flatter envelope of ``POST /v1/notebook-execute``."""
    check_version("protocol_version", metadata.get("protocol_version"), NOTEBOOK_PROTOCOL)
    cell = parse_cell(metadata, metadata.get("build_id"))
    cell.inputs = [
        parse_input(name, expect(dict, spec, "input %r" % name))
        for name, spec in optional(dict, metadata, "inputs").items()
    ]
    return cell


def known_ref(what, ref, transforms):
    """The ref without the scheme that Core lets a caller put before it; 400 for one that is not served."""
    plain = ref.rpartition("://")[2] if isinstance(ref, str) else None
    if plain == TRANSFORM_REF or plain in transforms:
        return plain
    known = ", ".join([TRANSFORM_REF, *transforms])
    raise bad_request("Unsupported %s %s: this worker serves %s" % (what, json.dumps(ref)[:100], known))


def parse_transform(ref, function, params, build_id):
    """What both of Core's envelopes say alike; TransformError 400."""
    with core_errors(True):
        params = expect(dict, {} if params is None else params, "params")
        source = "" if function else expect(str, params.get("source"), "params.source")
        build_id = optional(str, {"build_id": build_id}, "build_id") or None
    return Transform(source=source, build_id=build_id, ref=ref, params=params, function=function)


def parse_core_input(entry):
    with core_errors(True):
        spec = parse_descriptor(entry)
        if spec.content_type != CORE_FORMAT or not spec.name.isidentifier():
            raise bad_request("input %r must be a name and %s, not %r" % (spec.name, CORE_FORMAT, spec.content_type))
        return spec


@contextlib.contextmanager
def core_errors(active):
    """Let a request that is Core's end in Core's own errors."""
    try:
        yield
    except WorkerError as error:
        if not active or isinstance(error, TransformError):
            raise
        raise TransformError(error.status, error.message, headers=error.headers) from None


@dataclasses.dataclass
class Manifest:
    """A pull manifest: a cell, where its inputs are and where its bundle goes."""

    cell: Cell
    urls: dict  # artifact URI -> signed URL
    output_url: str
    finalize_url: str
    max_bytes: int = None
    put: bool = False  # a raw PUT, as Azure takes it
    fields: dict = None  # of a presigned form
    headers: dict = dataclasses.field(default_factory=dict)
    log_url: str = None
    output_file_url: str = None
    trace: dict = dataclasses.field(default_factory=dict)

    def all_urls(self):
        """Every URL that the worker would go to, with what it is called in an error."""
        yield from (("the URL of input %s" % uri, url) for uri, url in self.urls.items())
        yield "output.url", self.output_url
        yield "finalize_url", self.finalize_url
        if self.log_url:
            yield "log_url", self.log_url
        if self.output_file_url:
            yield "output_file_url", self.output_file_url


def parse_manifest(transforms, manifest):
    """The body of ``POST /v1/execute-manifest`` (page: "pull model"), a cell's or a Core transform's."""
    metadata = optional(dict, manifest, "metadata")
    ref = known_ref("executor_ref", metadata.get("executor_ref"), transforms)
    build_id = manifest.get("build_id") or metadata.get("build_id")
    signed = [parse_signed(entry) for entry in optional(list, manifest, "inputs")]
    if ref == TRANSFORM_REF:
        params = optional(dict, metadata, "params", "metadata.params")
        cell = parse_cell(params, build_id)
        cell.inputs = parse_all_pulled(params, dict(signed))
    else:
        cell = parse_transform(ref, transforms[ref], metadata.get("params"), build_id)
        cell.inputs = [
            InputSpec("input%d" % number, CORE_FORMAT, "input%d" % number, uri)
            for number, (uri, _) in enumerate(signed)
        ]
    output = optional(dict, manifest, "output")
    max_bytes = output.get("max_bytes")
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
        raise bad_request("output.max_bytes must be a whole number, not %s" % json.dumps(max_bytes)[:100])
    return Manifest(
        cell=cell,
        urls=dict(signed),
        output_url=expect(str, output.get("url"), "output.url"),
        finalize_url=expect(str, manifest.get("finalize_url"), "finalize_url"),
        max_bytes=max_bytes,
        put=output.get("method") == "PUT",
        fields=None if output.get("fields") is None else expect(dict, output["fields"], "output.fields"),
        headers=parse_upload_headers(optional(dict, output, "headers", "output.headers")),
        log_url=optional(str, manifest, "log_url") or None,
        output_file_url=optional(str, manifest, "output_file_url") or None,
        trace={name: metadata[name] for name in TRACE_FIELDS if isinstance(metadata.get(name), str)},
    )


def parse_signed(entry):
    """An entry of a manifest's ``inputs``: its URI and the URL to get it from."""
    artifact = expect(str, expect(dict, entry, "an entry of inputs").get("artifact_id"), "artifact_id")
    version = entry.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise bad_request("The version of input %r must be a whole number" % artifact)
    return "strata://artifact/%s@v=%d" % (artifact, version), expect(
        str, entry.get("url"), "the url of input %r" % artifact
    )


def parse_all_pulled(params, urls):
    return [
        parse_pulled(name, expect(dict, spec, "input %r" % name), urls)
        for name, spec in optional(dict, params, "input_specs").items()
    ]


def parse_pulled(name, spec, urls):
    """An entry of ``input_specs``; the worker names its file, but for a ``file/path``."""
    spec = {"content_type": "arrow/ipc", **spec}
    parsed = parse_input(name, spec)
    for needed in (parsed, *parsed.injected.values()):
        if needed.uri not in urls:
            raise bad_request(
                "input %r: the manifest has no signed URL for %s" % (needed.name, json.dumps(needed.uri)[:300])
            )
    return parsed


def parse_upload_headers(headers):
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(
            r"[\x20-\x7e]*", expect(str, value, name)
        ):
            raise bad_request("output.headers: %r is not a header" % name)
    return headers


def check_version(what, value, expected):
    if value != expected:
        raise bad_request("Unsupported %s %s: this worker speaks %r" % (what, json.dumps(value)[:100], expected))


def parse_cell(params, build_id):
    if build_id is not None:
        expect(str, build_id, "build_id")
    language = params.get("language", "python")
    if language not in LANGUAGES:
        raise run_failed(
            "unsupported cell language %s: this worker runs %s" % (json.dumps(language)[:100], ", ".join(LANGUAGES)),
            400,
        )
    return Cell(
        source=expect(str, params.get("source"), "source"),
        language=language,
        build_id=build_id or None,
        timeout=parse_timeout(params.get("timeout_seconds")),
        env=parse_env(optional(dict, params, "env")),
        mounts=parse_mounts(optional(list, params, "mounts")),
        tables=optional(dict, params, "tables"),
        mutation_defines=[expect(str, name, "mutation_defines") for name in optional(list, params, "mutation_defines")],
        environment=None if params.get("environment") is None else expect(dict, params["environment"], "environment"),
    )


def parse_timeout(value):
    if value is None:
        return 30.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise bad_request("timeout_seconds must be a positive number, not %s" % json.dumps(value)[:100])
    return min(float(value), 1e9)


def parse_env(env):
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise bad_request("env: %r is not the name of a variable" % name)
        if "\0" in expect(str, value, "env %s" % name):
            raise bad_request("env %s: the value holds a NUL" % name)
    return env


def parse_mounts(entries):
    mounts = [parse_mount(entry) for entry in entries]
    if len({mount.name for mount in mounts}) < len(mounts):
        raise bad_request("mounts has two of the same name")
    return mounts


def parse_mount(entry):
    """An entry of ``mounts`` (page: "MountSpec")."""
    name = expect(str, expect(dict, entry, "a mount").get("name"), "a mount's name")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", name):
        raise bad_request("Mount %r: its name must be a variable's" % name[:200])
    uri = expect(str, entry.get("uri"), "mount %r: uri" % name)
    scheme, _, path = uri.rpartition("://")
    if scheme.lower() in ("", "file") or uri.lower().startswith("file:"):
        raise bad_request("Mount %r is file:// (%s): a remote worker cannot reach the notebook's disk" % (name, uri))
    if scheme.lower() not in SCHEMES:
        raise bad_request(
            "Mount %r: this worker knows the schemes %s, not %r" % (name, ", ".join(SCHEMES), scheme[:20])
        )
    path = path.rstrip("/")
    # A user's name, a query or a fragment would be no part of a path, and may be a secret.
    if re.search(r"[@?#\0\\]", path) or not all(part not in ("", ".", "..") for part in path.split("/")):
        raise bad_request("Mount %r: its uri must be %s://bucket/prefix and nothing more" % (name, scheme))
    mode = entry.get("mode", "ro")
    if mode not in ("ro", "rw"):
        raise bad_request('Mount %r: mode must be "ro" or "rw", not %s' % (name, json.dumps(mode)[:100]))
    # A "pin" spares the server its look at the store; here the store's own version decides.
    return Mount(
        name,
        uri,
        SCHEMES[scheme.lower()],
        path,
        mode == "rw",
        optional(dict, entry, "options"),
        optional(str, entry, "credential") or None,
    )


def parse_descriptor(entry):
    """An entry of ``inputs`` in ``POST /v1/execute``: ``{"name", "format", "file", "injected"}``."""
    entry = expect(dict, entry, "an entry of inputs")
    name = expect(str, entry.get("name"), "an input's name")
    return parse_input(name, dict(entry, content_type=entry.get("format")))


def parse_input(name, spec):
    what = "input %r" % name
    content_type = expect(str, spec.get("content_type"), what + ": format")
    recorded = optional(str, spec, "file", what + ": file") or name + EXTENSIONS.get(content_type, ".bin")
    try:
        if not name:
            raise ValueError("an input needs a name")
        file = last_component(recorded)
    except ValueError as problem:
        raise bad_request("%s: %s" % (what, problem)) from None
    injected = {
        inner: parse_input(inner, expect(dict, entry, "%s: injected %r" % (what, inner)))
        for inner, entry in optional(dict, spec, "injected", what + ": injected").items()
    }
    return InputSpec(name, content_type, file, spec.get("uri"), injected)


def unambiguous(cell):
    twice = [name for name, count in collections.Counter(spec.name for spec in cell.inputs).items() if count > 1]
    if twice:
        raise bad_request("inputs names %r more than once" % twice[0])
    return cell


def uv_lock_key(lockfile):
    """The key of what a ``uv.lock`` installs (page: "The environment block"), as 64 hex digits.

    The notebook's own name and version are left out, so that notebooks with the same
    resolved packages share one environment. EnvironmentFailure if it is no lock.
    """
    try:
        lock = load_toml(lockfile)
        packages = [dict(package) for package in lock.get("package", [])]
        projects = [package for package in packages if is_project(package)]
        names = {package["name"] for package in projects}
        for package in projects:
            for dropped in ("name", "version", "source", "metadata"):
                package.pop(dropped, None)
        lock["package"] = sorted((anonymous(package, names) for package in packages), key=sorted_json)
        manifest = lock.get("manifest", {})
        if isinstance(manifest.get("members"), list):
            manifest["members"] = sorted("<project>" if member in names else member for member in manifest["members"])
        return hashlib.sha256(json.dumps(lock, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as problem:
        raise EnvironmentFailure("environment.lockfile is not a uv.lock: %s" % problem) from None


def load_toml(text):
    if tomllib is None:
        raise EnvironmentFailure("locked environments need tomli on Python 3.10: pip install tomli")
    return tomllib.loads(text)


def is_project(package):
    return package.get("source") in ({"virtual": "."}, {"editable": "."})


def anonymous(value, names):
    """``value`` with every ``name`` that is one of ``names`` replaced."""
    if isinstance(value, list):
        return [anonymous(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "<project>" if key == "name" and isinstance(item, str) and item in names else anonymous(item, names)
        for key, item in value.items()
    }


def sorted_json(value):
    return json.dumps(value, sort_keys=True)


# ---------------------------------------------------------------------------------------
# HTTP: sockets, one thread for each request under way, early refusals
# ---------------------------------------------------------------------------------------
#
# A connection has a thread only while a request of its is being answered. Until a whole
# head has arrived, and again after the answer, it waits in the lobby: one thread with a
# selector, which also lets refused clients down gently. So five hundred idle or
# dawdling clients cost no threads, and a thread is only ever spent on a real request.


class Request:
    """One request, the same whether it came over a socket or another way."""

    def __init__(self, method, path, query="", headers=None, body=None):
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers or Headers()
        self.body = body  # an object whose read() gives the next piece, b"" at the end


@dataclasses.dataclass(frozen=True)
class FileSlice:
    """So many bytes of a file, as a piece of a body; sent without passing through Python."""

    path: str
    size: int

    def open(self):
        """The file, which must still be the regular file of that size that was promised."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        file = os.fdopen(fd, "rb", buffering=0)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self.size:
            file.close()
            raise OSError(errno.ESTALE, "changed while it was being sent", self.path)
        return file


class Response:
    """A status, headers and a body: a list of bytes and FileSlices whose length is known.

    ``close`` is called once it has been sent, or could not be.
    """

    def __init__(self, status, body=(), headers=(), close=None):
        self.status = status
        self.body = list(body)
        self.headers = list(headers)
        self.close = close or (lambda: None)

    @property
    def length(self):
        """The body's bytes; None where nobody knows yet."""
        return body_size(self.body)

    def framing(self):
        """The header that says how long the body is, where it has one of its own."""
        return [] if self.length is None else [("Content-Length", str(self.length))]


class Streamed(Response):
    """A response whose body is still being made: ``pieces`` is an iterator of bytes."""

    length = None

    def __init__(self, status, pieces, headers=()):
        super().__init__(status, (), headers)
        self.body = pieces


def body_size(body):
    return sum(piece.size if isinstance(piece, FileSlice) else len(piece) for piece in body)


def json_response(status, content, headers=(), close=None):
    body = json.dumps(content).encode()
    return Response(status, [body], [("Content-Type", "application/json"), *headers], close)


def error_response(error):
    return json_response(error.status, error.body(), error.headers)


class Disconnected(Exception):
    """The peer went away, or stopped moving for stall_seconds."""


class Connection:
    """A client's socket, what has arrived on it, and until when it may stay as it is."""

    def __init__(self, sock, stall_seconds):
        self.sock = sock
        self.stall_seconds = stall_seconds
        self.buffer = bytearray()
        self.deadline = 0.0
        self.lingering = False
        self.drained = 0
        self.handshaking = isinstance(sock, ssl.SSLSocket)

    def receive(self):
        """The next piece of a body, b"" at the end of the stream; blocking."""
        if self.buffer:
            piece = bytes(self.buffer)
            self.buffer.clear()
            return piece
        try:
            return self.sock.recv(CHUNK)
        except TimeoutError:
            raise WorkerError(408, "The request's body stopped for %g seconds" % self.stall_seconds) from None
        except OSError as problem:
            raise Disconnected(str(problem)) from None

    def send(self, data):
        try:
            self.sock.sendall(data)
        except OSError as problem:
            raise Disconnected(str(problem)) from None

    def send_file(self, piece):
        with piece.open() as file:
            try:
                self.sock.sendfile(file, 0, piece.size)
            except OSError as problem:
                raise Disconnected(str(problem)) from None

    def interrupt(self):
        """Make a receive() that waits in another thread see the end of the stream."""
        self.shutdown(socket.SHUT_RD)

    def shutdown(self, how):
        """SSLSocket's own would go on in the clear. No answer needs the alert that TLS ends
        with: its length says whether it is whole."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, how)

    def close(self):
        self.sock.close()


class SizedBody:
    """A body of known length: it goes past h11, straight from the socket."""

    def __init__(self, connection, head):
        self.connection = connection
        self.remaining = head.length
        self.expects_continue = head.expects_continue and head.length > 0

    @property
    def consumed(self):
        return self.remaining == 0

    @property
    def negligible(self):
        """Is what a handler left unread so little that reading it beats closing the connection?"""
        return self.remaining <= NEGLIGIBLE and not self.expects_continue

    def interrupt(self):
        self.connection.interrupt()

    def read(self):
        if self.remaining == 0:
            return b""
        if self.expects_continue:
            self.expects_continue = False
            self.connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        piece = self.connection.receive()
        if not piece:
            raise Disconnected("the body ends %d bytes early" % self.remaining)
        if len(piece) > self.remaining:  # the start of a pipelined request
            self.connection.buffer[:0] = piece[self.remaining :]
            piece = piece[: self.remaining]
        self.remaining -= len(piece)
        return piece


class ChunkedBody:
    """A chunked body, taken apart by h11."""

    def __init__(self, connection, head):
        self.connection = connection
        self.protocol = head.protocol
        self.expects_continue = head.expects_continue
        self.consumed = False

    @property
    def negligible(self):
        return self.consumed

    def interrupt(self):
        self.connection.interrupt()

    def read(self):
        while not self.consumed:
            try:
                event = self.protocol.next_event()
            except h11.RemoteProtocolError as problem:
                raise bad_request("Malformed chunked body: %s" % problem) from None
            if isinstance(event, h11.Data):
                if event.data:
                    return bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self.consumed = True
                self.connection.buffer[:0] = self.protocol.trailing_data[0]
            else:
                self.receive()
        return b""

    def receive(self):
        if self.expects_continue:
            self.expects_continue = False
            self.connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        piece = self.connection.receive()
        if not piece:
            raise Disconnected("the chunked body ends early")
        self.protocol.receive_data(piece)


def send_response(connection, head, response, keep_alive):
    """Write a response: the head and small pieces together, files by sendfile."""
    headers = [("Date", http_date()), *response.framing(), *response.headers]
    if not keep_alive:
        headers.append(("Connection", "close"))
    if response.length is None:
        send_stream(connection, head.protocol, response, headers)
        return
    pending = bytearray(response_head(head.protocol, response.status, headers))
    for piece in response.body if head.method != "HEAD" else ():
        if isinstance(piece, FileSlice) and piece.size > CHUNK // 16:
            connection.send(pending)
            pending.clear()
            connection.send_file(piece)
        elif isinstance(piece, FileSlice):
            with piece.open() as file:
                pending += file.read(piece.size)
        else:
            pending += piece
        if len(pending) > CHUNK:
            connection.send(pending)
            pending.clear()
    connection.send(pending)


def send_stream(connection, protocol, response, headers):
    """Write a response of unknown length as it comes; h11 frames it: chunked, or to the end for HTTP/1.0."""
    connection.send(response_head(protocol, response.status, headers))
    for piece in response.body:
        connection.send(protocol.send(h11.Data(data=piece)))
    connection.send(protocol.send(h11.EndOfMessage()))


def response_head(protocol, status, headers):
    """h11 writes the head. One that could not read the request gets a fresh h11."""
    if protocol is None or protocol.our_state is not h11.SEND_RESPONSE:
        protocol = h11.Connection(h11.SERVER)
    return protocol.send(h11.Response(status_code=status, headers=headers, reason=reason(status)))


def reason(status):
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return ""


def http_date():
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())


class Server:
    """Listens, keeps the lobby, and answers each request in a thread of its own.

    ``answer`` takes a Request and gives a Response; it is never called in the lobby.
    """

    def __init__(self, answer, listener, stall_seconds, tls=None):
        self.answer = answer
        self.stall_seconds = stall_seconds
        self.listener = listener
        self.tls = tls  # an SSLContext; another one is for the connections to come
        self.selector = selectors.DefaultSelector()
        self.waker, self.woken = socket.socketpair()
        self.woken.setblocking(False)
        self.returned = collections.deque()  # connections whose request is answered
        self.ready = collections.deque()  # (connection, head) that wait for a thread
        self.waiting = set()  # connections in the selector
        self.busy = 0  # requests with a thread; only the lobby adds, so it needs no lock
        self.finished = collections.deque()
        self.stopping = False
        self.lobby = threading.Thread(target=self.run, name="strata-lobby", daemon=True)

    @property
    def address(self):
        return self.listener.getsockname()[:2]

    def start(self):
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(self.woken, selectors.EVENT_READ, self.wake_up)
        self.lobby.start()

    def stop_accepting(self):
        """Close the listener and every connection without a request; answers go on."""
        self.stopping = True
        self.wake()

    def stop(self):
        """End the lobby; call once nothing is being answered any more."""
        self.stop_accepting()
        self.lobby.join(LINGER_SECONDS + 1)

    def wake(self):
        with contextlib.suppress(OSError):  # full, so it wakes anyway; or closed at the end
            self.waker.send(b"\0")

    def wake_up(self):
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)

    # What follows runs in the lobby's thread.

    def run(self):
        while not (self.stopping and self.busy == 0 and not self.waiting):
            for key, _ in self.selector.select(self.patience()):
                try:
                    key.data()
                except Exception:
                    log.exception("the lobby met a fault")
            self.settle()
            if self.stopping:
                self.close_up()
        for leftover in (self.selector, self.waker, self.woken):
            leftover.close()

    def patience(self):
        if any(connection.lingering for connection in self.waiting):
            return 0.005
        return 0.05 if self.stopping else 1.0

    def close_up(self):
        if self.listener.fileno() >= 0:
            self.selector.unregister(self.listener)
            self.listener.close()
        for connection in [c for c in self.waiting if not c.lingering]:
            self.drop(connection)

    def settle(self):
        """Take back answered connections, hand out threads, enforce deadlines."""
        while self.finished:
            self.finished.popleft()
            self.busy -= 1
        while self.returned:
            self.admit(self.returned.popleft())
        self.dispatch()
        now = time.monotonic()
        for connection in list(self.waiting):
            if connection.lingering and told(connection) or now > connection.deadline:
                self.expire(connection)

    def expire(self, connection):
        if connection.buffer and not connection.lingering:
            self.refuse(connection, WorkerError(408, "The request's head took more than %d seconds" % HEAD_SECONDS))
        else:
            self.drop(connection)

    def accept(self):
        try:
            sock, _ = self.listener.accept()
        except OSError as problem:
            if problem.errno in (errno.EMFILE, errno.ENFILE):
                self.evict()
            return
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        if self.tls is not None:
            try:
                sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError:  # gone already
                sock.close()
                return
        if len(self.waiting) + self.busy >= MAX_CONNECTIONS:
            self.evict()
        self.admit(Connection(sock, self.stall_seconds))

    def evict(self):
        """Make room: close the connection that has waited longest."""
        if self.waiting:
            self.drop(min(self.waiting, key=lambda connection: connection.deadline))
        else:
            time.sleep(0.01)  # no descriptor to be had: let a request end, do not spin

    def admit(self, connection):
        connection.sock.setblocking(False)
        patience = LINGER_SECONDS if connection.lingering else HEAD_SECONDS if connection.handshaking else IDLE_SECONDS
        connection.deadline = time.monotonic() + patience
        self.selector.register(connection.sock, selectors.EVENT_READ, functools.partial(self.readable, connection))
        self.waiting.add(connection)
        if connection.buffer and not connection.lingering:
            self.look(connection)

    def leave(self, connection):
        self.waiting.discard(connection)
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection.sock)

    def drop(self, connection):
        self.leave(connection)
        connection.close()

    def readable(self, connection):
        if connection.handshaking and not self.shake_hands(connection):
            return
        try:
            data = connection.sock.recv(CHUNK // 16)  # more than a TLS record: nothing stays behind
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            data = b""
        if not data:
            self.drop(connection)
        elif connection.lingering:
            self.drain(connection, len(data))
        else:
            if not connection.buffer:
                connection.deadline = time.monotonic() + HEAD_SECONDS
            connection.buffer += data
            self.look(connection)

    def shake_hands(self, connection):
        """One step of the TLS handshake; True once it is made."""
        event = selectors.EVENT_READ
        try:
            connection.sock.do_handshake()
            connection.handshaking = False
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            event = selectors.EVENT_WRITE
        except OSError as problem:
            log.debug("a TLS handshake failed: %s", problem)
            self.drop(connection)
            return False
        self.selector.modify(connection.sock, event, functools.partial(self.readable, connection))
        return not connection.handshaking

    def drain(self, connection, size):
        connection.drained += size
        if connection.drained >= LINGER_BYTES:
            self.selector.unregister(connection.sock)  # read no more; told() closes it

    def look(self, connection):
        """Is a whole head there?"""
        try:
            head = take_head(connection.buffer)
        except WorkerError as error:
            self.refuse(connection, error)
            return
        if head is not None:
            self.leave(connection)
            self.ready.append((connection, head))

    def refuse(self, connection, error):
        """Answer what is no request. It is small, so it goes into the socket's buffer whole."""
        response = error_response(error)
        with contextlib.suppress(Disconnected):
            send_response(connection, Head("GET", "", Headers(), 0, False, False), response, keep_alive=False)
        self.leave(connection)
        self.linger(connection)
        self.admit(connection)

    @staticmethod
    def linger(connection):
        connection.lingering = True
        connection.buffer.clear()
        connection.shutdown(socket.SHUT_WR)

    def dispatch(self):
        """Give threads to the requests that wait; /health and a cancel never wait behind the others."""
        for connection, head in [self.ready.popleft() for _ in range(len(self.ready))]:
            urgent = head.path == "/health" or head.path.endswith("/cancel")
            limit = MAX_REQUESTS + (RESERVE if urgent else 0)
            if self.busy >= limit or not self.spawn(connection, head):
                self.ready.append((connection, head))

    def spawn(self, connection, head):
        thread = threading.Thread(target=self.serve, args=(connection, head), name="strata-request", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            return False
        self.busy += 1
        return True

    # What follows runs in the request's own thread.

    def serve(self, connection, head):
        try:
            connection.sock.settimeout(self.stall_seconds)
            if self.respond(connection, head):
                self.returned.append(connection)
            else:
                connection.close()
        except Exception:
            log.exception("a request's thread met a fault")
            connection.close()
        finally:
            self.finished.append(None)
            self.wake()

    def respond(self, connection, head):
        """Answer one request; True if the connection goes back to the lobby."""
        body = (ChunkedBody if head.length is None else SizedBody)(connection, head)
        request = Request(head.method, head.path, head.query, head.headers, body)
        try:
            response = self.answer(request)
        except Disconnected as gone:
            log.debug("a client left: %s", gone)
            return False
        try:
            keep_alive = head.keep_alive and body.negligible and not self.stopping
            send_response(connection, head, response, keep_alive)
            while keep_alive and body.read():
                pass
        except (Disconnected, OSError) as problem:
            log.warning("%s %s: the answer was not read to its end: %s", head.method, head.path, problem)
            return False
        finally:
            response.close()
        if not keep_alive:
            self.linger(connection)
        return True


def listen(host, port):
    """A listening socket; OSError if the address is not to be had."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(512)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def listen_unix(path):
    """A listening Unix socket that only its owner may connect to, gone at the end.

    Until listen() every connection is refused, so nobody is quicker than the chmod.
    """
    remove_dead_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(path)
        except OSError as problem:
            raise OSError(problem.errno, "--uds %s: %s" % (path, problem)) from None
        os.chmod(path, 0o600)
        ours = os.lstat(path)
        listener.listen(512)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(ours, os.lstat(path)):  # not a later worker's
                    os.unlink(path)


def remove_dead_socket(path):
    """A worker that was killed leaves its socket file; one that lives answers on it."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def server_tls(cert, key):
    """The SSLContext of these PEM files. ValueError where they are not to be used."""

    def no_passphrase():
        raise ValueError("the key has a passphrase, and nobody is here to type it")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, no_passphrase)
    except (OSError, ValueError) as problem:
        raise ValueError("--tls-cert %s, --tls-key %s: %s" % (cert, key, problem)) from None
    return context


SIOCOUTQ = 0x5411


def told(connection):
    """Has a refused client that keeps sending got our answer?

    Closing a socket with unread data resets the connection, and a reset can overtake the
    answer. Once the peer's system has acknowledged every byte the answer is in its hands,
    and reading on would only pay for an upload that nobody wants.
    """
    if connection.drained < LINGER_BYTES or not sys.platform.startswith("linux"):
        return False
    import fcntl

    unacknowledged = fcntl.ioctl(connection.sock, SIOCOUTQ, b"\0\0\0\0")
    return int.from_bytes(unacknowledged, sys.byteorder) == 0


# ---------------------------------------------------------------------------------------
# Fetching: URLs from elsewhere, judged, pinned and followed no further
# ---------------------------------------------------------------------------------------
#
# A manifest's URLs come from whoever wrote it, and are fetched from where this machine
# stands: beside a metadata service, inside a private network. So each is judged when it
# arrives and again, by the same rule, at the one look-up whose addresses are connected to;
# a name cannot change its answer in between. No redirect is followed.


CONNECT_SECONDS = 10
RETRY_WAITS = (0.2, 0.4, 0.8, 1.6)  # seconds; then it is given up
RESUMES = 5  # for each download that breaks off and makes progress in between
LONGEST_WAIT = 30  # seconds of a Retry-After that are honoured
WIDTH = 8  # downloads of a run at once; a browser makes six
RETRIED = (429, 502, 503, 504)  # "not now"; every other answer is final

# What ipaddress calls global in one version of Python or another, and is not.
NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in (
        "100.64.0.0/10",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "2001::/23",
        "2002::/16",
        "64:ff9b:1::/48",
        "3fff::/20",
    )
]
NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address):
    """May a fetch go to this ipaddress object (page: "SSRF defenses on signed URLs")?

    An IPv6 address that only carries an IPv4 one is judged by that. The other embedding
    forms (compatible, 6to4, Teredo) are no longer in use and never public.
    """
    if address.version == 6:
        if getattr(address, "scope_id", None):
            return False
        if address.ipv4_mapped:
            return is_public(address.ipv4_mapped)
        if address in NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.is_site_local:
            return False
    if address.is_multicast or address.is_reserved or address.is_unspecified or address.is_loopback:
        return False
    return (
        address.is_global
        and not address.is_link_local
        and not any(address in network for network in NOT_PUBLIC if network.version == address.version)
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """A URL taken apart, after every check that needs no look-up."""

    scheme: str
    host: str
    port: int


def parse_url(url, what):
    """The Target of a URL, or WorkerError 400. What parsers disagree about is refused."""

    def refused(why):
        return bad_request("%s is refused: %s" % (what, why))

    if not isinstance(url, str) or not re.fullmatch(r"[\x21-\x5b\x5d-\x7e]+", url):
        raise refused("a URL is printable ASCII without spaces or backslashes")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise refused(problem) from None
    if parts.scheme not in ("http", "https"):
        raise refused("its scheme is %r, not http or https" % parts.scheme)
    if "@" in parts.netloc:
        raise refused("it holds a user name or password")
    if port == 0 or parts.netloc.endswith(":"):
        raise refused("its port is no port")
    host = (parts.hostname or "").lower()
    if not is_plain_host(host, bracketed=parts.netloc.startswith("[")):
        raise refused("%r is not a plain host name or address" % host)
    return Target(parts.scheme, host, port or {"http": 80, "https": 443}[parts.scheme])


def is_plain_host(host, bracketed):
    """A DNS name, a dotted IPv4 address, or IPv6 in brackets without a zone.

    getaddrinfo also takes ``0x7f.1``, ``017700000001`` and ``127.1``: a name whose last
    label is a number has to be a dotted quad (WHATWG URL, "ends in a number").
    """
    if bracketed:
        return "%" not in host and is_address(host)
    name = host[:-1] if host.endswith(".") else host
    labels = name.split(".")
    if not all(re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", label) for label in labels):
        return False
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        return is_address(host)
    return len(name) <= 253


def is_address(host):
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Halt:
    """Stops the transfers that share it: shuts their sockets and refuses their next step."""

    def __init__(self):
        self.event = threading.Event()
        self.lock = threading.Lock()
        self.sockets = weakref.WeakSet()

    def __call__(self):
        with self.lock:
            self.event.set()
            for sock in self.sockets:
                with contextlib.suppress(OSError):  # not connected, or closed already
                    sock.shutdown(socket.SHUT_RDWR)

    def check(self):
        if self.event.is_set():
            raise Halted("the transfer was stopped")

    def wait(self, seconds):
        self.event.wait(seconds)
        self.check()

    def attach(self, sock):
        with self.lock:
            self.check()
            self.sockets.add(sock)


class Halted(Exception):
    """A transfer ended because its run did."""


class FetchError(Exception):
    """A transfer that failed, in words that never show a URL's query: it is a signature.

    ``unanswered``: the connection failed before an answer, so that trying again is right.
    A peer that stalled had its time and is not tried again.
    """

    def __init__(self, reason, unanswered=False):
        super().__init__(reason)
        self.unanswered = unanswered


class Unsafe(OSError):
    """A host that may not be connected to."""


class PinnedConnection(http.client.HTTPConnection):
    """Connects only to addresses that the Fetcher judged, at the very look-up it judged."""

    def __init__(self, host, *, fetcher, halt, **options):
        super().__init__(host, **options)
        self.fetcher, self.halt = fetcher, halt

    def connect(self):
        self.halt.check()
        self.sock = connect_to(self.fetcher.addresses(self.host, self.port))
        self.sock.settimeout(self.timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.halt.attach(self.sock)
        if self._tunnel_host:
            self._tunnel()

    def send(self, data):
        """A peer that refuses a body closes while we send: what it answered is what matters."""
        try:
            super().send(data)
        except (BrokenPipeError, ConnectionResetError):
            if isinstance(data, (bytes, bytearray)):  # the head: nobody can have read that
                raise


class PinnedTLSConnection(PinnedConnection):
    """The same under TLS, which verifies the certificate against the URL's host."""

    default_port = 443

    def connect(self):
        super().connect()
        self.sock = tls_context().wrap_socket(self.sock, server_hostname=self._tunnel_host or self.host)
        self.halt.attach(self.sock)


class PinnedHandler(urllib.request.AbstractHTTPHandler):
    """urllib's way in to both."""

    def __init__(self, fetcher, halt):
        super().__init__()
        self.options = {"fetcher": fetcher, "halt": halt}
        self.http_request = self.https_request = self.do_request_

    def http_open(self, request):
        return self.do_open(PinnedConnection, request, **self.options)

    def https_open(self, request):
        return self.do_open(PinnedTLSConnection, request, **self.options)


@functools.lru_cache(maxsize=None)
def tls_context():
    """certifi's roots, and those of SSL_CERT_FILE, for a server with a private authority."""
    import certifi

    context = ssl.create_default_context(cafile=certifi.where())
    if os.environ.get("SSL_CERT_FILE"):
        context.load_verify_locations(cafile=os.environ["SSL_CERT_FILE"])
    return context


def connect_to(addresses):
    """A socket connected to the first address that takes it. OSError of the last that did not."""
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(CONNECT_SECONDS)
        try:
            sock.connect(address)
            return sock
        except OSError as failure:
            sock.close()
            problem = failure
    raise ConnectionError("no connection to port %d: %s" % (address[1], problem))


class Fetcher:
    """Makes the worker's requests to other hosts, by the rules of one Settings."""

    def __init__(self, settings):
        self.settings = settings

    def judge(self, url, what):
        """Check a URL on arrival, its addresses included. WorkerError 400."""
        target = parse_url(url, what)
        try:
            self.addresses(target.host, target.port)
        except Unsafe as problem:
            raise bad_request("%s is refused: %s" % (what, problem)) from None

    def addresses(self, host, port):
        """Where a connection may go: every address of the host, all of them judged. Unsafe."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Unsafe("the host %r does not resolve" % host) from None
        for *_, address in found if not self.is_exempt(host) else ():
            if not is_public(ipaddress.ip_address(address[0])):
                raise Unsafe(
                    "%s is at %s, which is not a public address (STRATA_WORKER_ALLOWED_HOSTS "
                    "names hosts that may be there)" % (host, address[0])
                )
        return found

    def is_exempt(self, host):
        if self.settings.allow_local_hosts:
            return True
        host = host.rstrip(".")
        return any(
            host.endswith(entry) if entry.startswith(".") else host == entry
            for entry in (name.lower().rstrip(".") for name in self.settings.allowed_hosts)
        )

    @contextlib.contextmanager
    def request(self, halt, method, url, headers=(), body=(), timeout=None):
        """One request; gives its http.client.HTTPResponse, whatever its status.

        ``body`` is a list of bytes and FileSlices. Raises FetchError before an answer.
        """
        headers = {"User-Agent": "strata-worker/" + __version__, "Accept-Encoding": "identity", **dict(headers)}
        if method != "GET":
            headers["Content-Length"] = str(body_size(body))
        data = read_pieces(body, halt) if method != "GET" else None
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            response = self.opener(halt).open(request, timeout=timeout or self.settings.stall_seconds)
        except (OSError, ValueError, http.client.HTTPException) as problem:
            halt.check()  # then it was we who broke it off
            raise fetch_error(problem) from None
        with response:
            yield response

    def opener(self, halt):
        """An opener that knows http and https, pinned, and nothing else: no redirect, no file."""
        opener = urllib.request.OpenerDirector()
        opener.add_handler(PinnedHandler(self, halt))
        if self.settings.allow_local_hosts:
            opener.add_handler(urllib.request.ProxyHandler())
        return opener

    def persist(self, halt, attempt):
        """Call ``attempt`` until its Answer is no "not now" and no FetchError is ``unanswered``."""
        for wait in (*RETRY_WAITS, None):
            try:
                answer = attempt()
                if answer.status not in RETRIED or wait is None:
                    return answer
                wait = max(wait, retry_after(answer.headers))
            except FetchError as problem:
                if wait is None or not problem.unanswered:
                    raise
            halt.wait(wait)

    def send(self, halt, method, url, headers, body):
        """Send a body, with retries; the Answer."""

        def attempt():
            with self.request(halt, method, url, headers, body) as response:
                return Answer(response.status, response.headers, read_answer(response, halt))

        return self.persist(halt, attempt)

    def download(self, halt, what, url, path, limit, count=lambda size: None):
        """GET a URL into a new file, resuming where it breaks off; its Answer, saved if it is a 200.

        WorkerError 413 past ``limit`` bytes, whether they were declared or not.
        """
        return Download(self, halt, what, url, path, limit, count).run()


@dataclasses.dataclass
class Answer:
    """What a peer answered: its status, headers and the first MiB of its body."""

    status: int
    headers: object
    body: bytes = b""

    def detail(self):
        """Why it said no, when it is a Strata server that says so in JSON; never a store's XML,
        which quotes signatures."""
        try:
            content = json.loads(self.body)
            return ": %s" % str(content.get("detail") or content.get("error"))[:500]
        except (ValueError, AttributeError, RecursionError):
            return ""


class Download:
    """One input on its way to its file."""

    def __init__(self, fetcher, halt, what, url, path, limit, count):
        self.fetcher, self.halt, self.what, self.url = fetcher, halt, what, url
        self.path, self.limit, self.count = path, limit, count
        self.size = 0  # bytes that have arrived
        self.etag = None
        self.resumable = False

    def run(self):
        with open(self.path, "wb", buffering=0) as self.file:
            for _ in range(RESUMES + 1):
                before = self.size
                answer = self.fetcher.persist(self.halt, self.attempt)
                if answer is not BROKEN:
                    return answer
                if not self.resumable or self.size == before:
                    break
        raise FetchError("it broke off after %d bytes" % self.size)

    def attempt(self):
        headers = {}
        if self.size:
            headers = {"Range": "bytes=%d-" % self.size, **({"If-Range": self.etag} if self.etag else {})}
        with self.fetcher.request(self.halt, "GET", self.url, headers) as response:
            if response.status == 206 and self.size and self.continues(response):
                return self.save(response)
            if response.status == 200:
                self.start_over(response)
                return self.save(response)
            return Answer(response.status, response.headers)

    def continues(self, response):
        return (response.headers.get("Content-Range") or "").startswith("bytes %d-" % self.size)

    def start_over(self, response):
        self.file.seek(0)
        self.file.truncate()
        self.size = 0
        etag = response.headers.get("ETag") or ""
        self.etag = etag if etag.startswith('"') else None  # a weak one is no proof of the same bytes
        self.resumable = response.headers.get("Accept-Ranges", "").lower() == "bytes"

    def save(self, response):
        """Write the body; an Answer 200 when it is whole, BROKEN when it ends early."""
        declared = response.length
        if declared is not None:
            self.check_limit(self.size + declared)
        end = None if declared is None else self.size + declared
        try:
            self.copy(response)
        except TimeoutError as problem:
            raise fetch_error(problem) from None
        except (ConnectionError, http.client.HTTPException, ssl.SSLError):
            self.halt.check()
            return BROKEN
        return Answer(200, response.headers) if end is None or self.size == end else BROKEN

    def copy(self, response):
        buffer = memoryview(bytearray(CHUNK))
        while True:
            size = response.readinto(buffer)
            if not size:
                return
            self.halt.check()
            self.size += size
            self.check_limit(self.size)
            write_all(self.file, buffer[:size])
            self.count(size)

    def check_limit(self, size):
        if size > self.limit:
            raise WorkerError(
                413, "%s is larger than STRATA_WORKER_MAX_INPUT_BYTES (%d bytes)" % (self.what, self.limit)
            )


BROKEN = Answer(0, {})


def write_all(file, view):
    """A raw file writes what it can; a full disk may take a part before it says no."""
    while view:
        view = view[file.write(view) :]


def read_pieces(body, halt):
    for piece in body:
        if not isinstance(piece, FileSlice):
            yield piece
            continue
        with piece.open() as file:
            for data in iter(functools.partial(file.read, CHUNK), b""):
                halt.check()
                yield data


def read_answer(response, halt):
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as problem:
        halt.check()
        raise fetch_error(problem) from None


def fetch_error(problem):
    reason = getattr(problem, "reason", problem)  # urllib wraps what happened in a URLError
    if isinstance(reason, TimeoutError):
        return FetchError("the peer stopped moving")
    final = isinstance(reason, (Unsafe, ssl.SSLError, ValueError)) or not isinstance(
        reason, (OSError, http.client.HTTPException)
    )
    return FetchError(str(reason) or type(reason).__name__, unanswered=not final)


def retry_after(headers):
    text = headers.get("Retry-After") or ""
    return min(float(text), LONGEST_WAIT) if text.isdigit() else 0.0


def in_parallel(run, jobs, width=WIDTH):
    """Call each of ``jobs`` with a Halt they share, some at once; returns when all are done.

    The first fault stops the rest and is raised, and so does a cancel, at once: threads
    that hang in a look-up are left to find out by themselves.
    """
    halt, outcomes, waiting = Halt(), queue.SimpleQueue(), queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def work():
        with contextlib.suppress(queue.Empty):
            while not halt.event.is_set():
                outcomes.put(outcome_of_call(waiting.get_nowait(), halt))

    try:
        with run.interruptible(lambda: outcomes.put(Halted())):
            for _ in range(min(width, len(jobs))):
                threading.Thread(target=work, name="strata-transfer", daemon=True).start()
            for _ in jobs:
                problem = outcomes.get()
                if isinstance(problem, Halted):
                    raise run.cancellation()
                if problem is not None:
                    raise problem
    finally:
        halt()


def outcome_of_call(job, halt):
    try:
        job(halt)
    except BaseException as problem:
        return problem
    return None


class Pacer:
    """Spaces requests out, over all runs: a Strata server allows 100 a second and answers
    429 to the rest, uploads included."""

    def __init__(self, per_second):
        self.interval = 1 / per_second
        self.next = 0.0
        self.lock = threading.Lock()

    def wait(self, halt):
        with self.lock:
            self.next = turn = max(time.monotonic(), self.next + self.interval)
        halt.wait(max(0.0, turn - time.monotonic()))


LOG_PACER = Pacer(per_second=40)
LOG_SECONDS = 5  # for one post
POLL_SECONDS = 0.05


class LiveConsole:
    """Posts a running cell's console to its ``log_url`` (page: "Worker behavior", 2).

    It runs beside the cell and is never waited for. A chunk that is not taken is posted
    again with the same ``seq``, and what the cell prints meanwhile joins the next one: the
    notebook shows nothing after a gap, so there is none.
    """

    def __init__(self, fetcher, url, console):
        self.fetcher, self.url = fetcher, url
        self.halt = Halt()
        self.over = threading.Event()
        self.posting_since = None
        self.streams = [LiveStream(name, os.dup(fd), console.half) for name, fd in console.fds.items()]
        self.thread = threading.Thread(target=self.run, name="strata-live-console", daemon=True)
        self.thread.start()

    def run(self):
        with contextlib.suppress(Halted), contextlib.ExitStack() as stack:
            for stream in self.streams:
                stack.callback(os.close, stream.fd)
            while True:
                last = self.over.is_set()  # asked before reading: then nothing comes after
                moved = [self.move(stream, last) for stream in self.streams]
                if last and not any(moved):
                    return
                self.over.wait(0 if last else POLL_SECONDS)

    def move(self, stream, last):
        """Post what is new; False when nothing is."""
        if not stream.pending() and not last:
            return False
        LOG_PACER.wait(self.halt)
        chunk = stream.take(last)
        if chunk:
            self.post(stream, chunk)
        return bool(chunk)

    def post(self, stream, chunk):
        url = "%s%sstream=%s&seq=%d" % (self.url, "&" if "?" in self.url else "?", stream.name, stream.seq)
        self.posting_since = time.monotonic()
        wait = POLL_SECONDS
        while not self.taken(url, chunk):
            self.halt.wait(wait)
            wait = min(2 * wait, LOG_SECONDS)
        self.posting_since = None
        stream.seq += 1

    def taken(self, url, chunk):
        try:
            headers = {"Content-Type": "text/plain; charset=utf-8"}
            with self.fetcher.request(self.halt, "POST", url, headers, [chunk], timeout=LOG_SECONDS) as response:
                if 400 <= response.status < 500 and response.status not in (408, 429):
                    raise Halted("the log route answers %d" % response.status)  # it always will
                self.halt.wait(retry_after(response.headers))
                return response.status < 300
        except FetchError as problem:
            log.debug("live console: %s", problem)
            return False

    def end(self):
        """The cell is over: post the rest, soon."""
        self.over.set()

    def close(self):
        """Stop. A log server that answers gets a moment for the last chunk; another gets none."""
        self.over.set()
        since = self.posting_since
        if since is None or time.monotonic() - since < 0.1:
            self.thread.join(0.1)
        self.halt()


class LiveStream:
    """One stream of a live console: where it is read up to, and its next ``seq``.

    It ends at ``limit``: what comes after that a long console may not keep.
    """

    SIZE = 256 * 1024

    def __init__(self, name, fd, limit):
        self.name, self.fd, self.limit = name, fd, limit
        self.position = self.seq = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pending(self):
        return min(os.fstat(self.fd).st_size, self.limit) > self.position

    def take(self, last):
        """The next chunk as UTF-8, whole characters only."""
        data = os.pread(self.fd, min(self.SIZE, self.limit - self.position), self.position)
        self.position += len(data)
        return self.decoder.decode(data, final=last and not data and self.position < self.limit).encode()


# ---------------------------------------------------------------------------------------
# Processes: fork servers, the cells they start, and the console of a cell
# ---------------------------------------------------------------------------------------
#
# This process has threads and holds secrets, so it never forks a cell. Fork servers do
# (the last section of harness.py): small single-threaded processes that are asked over a
# socket, fork or execute, reap, and end everything a cell leaves behind. Each cell has a
# lifeline, a socket of its own: the server reports on it, and the worker closing it is
# the order to kill. When the worker dies, however it dies, every lifeline closes.


class RunRoot:
    """The folder that holds the folders of this worker's runs.

    It is locked while the worker lives, so that the next one to start can tell, and sweep,
    what a worker left that was killed.
    """

    PREFIX = "strata-worker-"

    def __init__(self, parent):
        self.parent = Path(parent or tempfile.gettempdir())
        self.sweep()
        # Named only once it is locked: another worker that starts now would sweep it.
        unnamed = Path(tempfile.mkdtemp(prefix="." + self.PREFIX, dir=self.parent))
        self.lock = self.locked(unnamed)
        self.path = unnamed.rename(unnamed.with_name(unnamed.name[1:]))
        self.numbers = iter(range(1, sys.maxsize))

    @staticmethod
    def locked(path):
        """A descriptor that holds the folder's lock, or None if another process has it."""
        import fcntl

        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def sweep(self):
        for left in self.parent.glob(self.PREFIX + "*"):
            with contextlib.suppress(OSError):  # another user's, or gone meanwhile
                if left.lstat().st_uid != os.getuid():
                    continue
                fd = self.locked(left)
                if fd is not None:
                    log.info("removing %s, left by a worker that was killed", left)
                    remove_tree(left)
                    os.close(fd)

    def new_folder(self):
        folder = self.path / ("run-%d" % next(self.numbers))
        folder.mkdir(mode=0o700)
        return folder

    def close(self):
        remove_tree(self.path)
        os.close(self.lock)


HARNESSES = ("harness.py", "harness.R")


@functools.lru_cache(maxsize=None)
def sibling(name):
    """The path of ``harness.py`` or ``harness.R``, beside this file; an install renames them."""
    here = Path(__file__).resolve().parent
    if here.is_file():
        return str(unpacked_harnesses(here) / name)
    for candidate in (here / name, here / ("strata_worker_" + name)):
        if candidate.is_file():
            return str(candidate)
    raise FileNotFoundError("strata-worker needs %s beside %s" % (name, Path(__file__).name))


@functools.lru_cache(maxsize=None)
def unpacked_harnesses(archive):
    """A folder with the harnesses of a zipapp, for the programs that run them; gone at the end."""
    import zipfile

    root = RunRoot(None)
    atexit.register(root.close)
    with zipfile.ZipFile(archive) as bundle:
        for name in HARNESSES:
            bundle.extract(name, root.path)
    return root.path


def own_command():
    """How this program is started again: as a script or as a zipapp."""
    here = Path(__file__).resolve()
    return [sys.executable, str(here.parent if here.parent.is_file() else here)]


LAUNCH_SECONDS = 5  # for a fork server to say that it has forked; it takes milliseconds
KILL_SECONDS = 5  # for a fork server to end a cell's processes; it takes milliseconds


class ForkServerLost(Exception):
    """The fork server died, or does not answer; the cell has not started."""


@dataclasses.dataclass
class Launch:
    """A process to be started. ``argv`` None: a fork of the server runs the manifest."""

    argv: list
    manifest: str
    cwd: str
    env: dict
    console: list  # the file descriptors of stdout and stderr
    memory_mb: int = None

    def message(self):
        fields = {name: getattr(self, name) for name in ("argv", "manifest", "cwd", "env", "memory_mb")}
        body = json.dumps(fields).encode()
        return len(body).to_bytes(4, "big") + body


class CellProcess:
    """A cell's process, seen through its lifeline."""

    def __init__(self, lifeline, server):
        self.lifeline = lifeline
        self.server = server
        self.buffer = b""
        self.killing = False
        report = self.report(LAUNCH_SECONDS)
        if report is None or "pid" not in report:
            lifeline.close()
            raise ForkServerLost((report or {}).get("error", "no answer"))
        self.pid = report["pid"]
        server.cells.add(self)

    def report(self, timeout):
        """The next report as a dict, ``{}`` when the server is gone, None when time is up."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.lifeline.settimeout(min(left, 3600))  # a socket's timeout has a limit
            try:
                data = self.lifeline.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                return {}
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def wait(self, timeout):
        """The exit code (negative: a signal), once all of its processes are gone; None when time is up."""
        report = self.report(timeout)
        if report is None:
            return None
        return report["exit"] if "exit" in report else self.outlive(timeout)

    def outlive(self, timeout):
        """The fork server died but its cell goes on: wait for that, so that no run is lost."""
        deadline = time.monotonic() + timeout
        while is_running(self.pid):
            if self.killing or time.monotonic() > deadline:
                subprocess.run([sys.executable, sibling("harness.py"), "--kill-tree", str(self.pid)], check=False)
                return None
            time.sleep(0.05)
        return 0

    def kill(self):
        """End the cell and everything it started. Any thread may call it, at any time."""
        self.killing = True
        with contextlib.suppress(OSError):  # it is over already
            self.lifeline.shutdown(socket.SHUT_WR)

    def close(self):
        """Kill what is left and wait until it is gone."""
        if self.lifeline.fileno() >= 0:
            self.kill()
            if self.wait(KILL_SECONDS) is None:
                log.error("the processes of pid %d could not be ended", self.pid)
            self.lifeline.close()
            self.server.cells.discard(self)


def is_running(pid):
    try:
        with open("/proc/%d/stat" % pid, "rb") as stat_file:
            return stat_file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return sys.platform == "darwin" and answers_signals(pid)


def answers_signals(pid):
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


class ForkServer:
    """A ``harness.py --fork-server`` and the socket it is asked on.

    ``python`` is the interpreter, ``preload`` the modules it imports for all its cells.
    """

    def __init__(self, python, preload, env):
        self.env = env
        self.cells = set()  # that run
        self.used = time.monotonic()
        self.control, theirs = socket.socketpair()
        self.lock = threading.Lock()
        self.ready = threading.Event()  # set for good once it has imported everything, or died
        with theirs:
            self.process = subprocess.Popen(
                [python, sibling("harness.py"), "--fork-server", str(theirs.fileno()), "--preload", ",".join(preload)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        threading.Thread(target=self.greet, name="strata-fork-server", daemon=True).start()

    def greet(self):
        with contextlib.suppress(OSError, ValueError):
            with self.control.makefile("rb") as lines:
                greeting = json.loads(lines.readline())
            log.debug("fork server %d: %s", self.process.pid, greeting)
        self.ready.set()

    @property
    def alive(self):
        return self.process.poll() is None

    def launch(self, launch):
        """Start a cell; ForkServerLost when that is not to be had here."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with self.lock:
                    message = launch.message()
                    sent = socket.send_fds(self.control, [message], [*launch.console, theirs.fileno()])
                    self.control.sendall(message[sent:])
            except OSError as problem:
                ours.close()
                raise ForkServerLost(str(problem)) from None
        return CellProcess(ours, self)

    def stop(self):
        """Close its socket, which ends it and all its cells."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# Variables that a module or the interpreter reads once, when it starts. A process that
# has imported already cannot honour them, so such a cell gets one that has not.
READ_AT_IMPORT = re.compile(
    r"(?:OMP|OPENBLAS|GOTO|MKL|KMP|BLIS|VECLIB|NUMEXPR|NPY|ARROW|MIMALLOC|MALLOC|LD|DYLD|GLIBC)_[A-Z0-9_]+"
    r"|PYTHON[A-Z0-9]+"
)


class Launcher:
    """Where cells come from: a bare fork server for cold starts, and preloaded ones for warm,
    for the worker's own Python and for the locked environments that were used last."""

    LOCKED_SERVERS = 4  # each holds what it has imported: 100 MB with pandas
    LOCKED_SECONDS = 600  # without a cell

    def __init__(self, settings, env):
        self.env = env
        self.lock = threading.Lock()
        self.forking = settings.preload != ("off",) and sys.platform != "darwin"
        self.preload = settings.preload if self.forking else ()
        self.servers = collections.OrderedDict()  # (python, preload) -> ForkServer, last used last
        self.bare = (sys.executable, ())
        self.warm = (sys.executable, self.preload)
        self.server(self.bare, env)
        self.server(self.warm, env)

    def server(self, key, env):
        """The running fork server of this Python and preload, started anew if the last one died."""
        with self.lock:
            server = self.servers.get(key)
            if server is None or not server.alive:
                if server is not None:
                    log.warning(
                        "fork server %d ended with %s; starting another", server.process.pid, server.process.returncode
                    )
                    server.stop()
                server = self.servers[key] = ForkServer(*key, env)
            self.servers.move_to_end(key)
            server.used = time.monotonic()
            self.end_unused()
            return server

    def cells(self):
        """How many processes of cells there are."""
        with self.lock:
            return sum(len(server.cells) for server in self.servers.values())

    def end_unused(self):
        locked = [key for key in self.servers if key not in (self.bare, self.warm)]
        for number, key in enumerate(reversed(locked)):
            server = self.servers[key]
            old = number >= self.LOCKED_SERVERS or time.monotonic() - server.used > self.LOCKED_SECONDS
            if old and not server.cells:
                self.servers.pop(key).stop()

    def python(self, launch, source, python=sys.executable):
        """Start a Python cell: forked from imported modules where that can be, else cold."""
        cold = dataclasses.replace(launch, argv=[python, sibling("harness.py"), launch.manifest])
        if not self.forking:
            return self.exec(cold)
        server = self.server((python, self.preload), server_environment(self.env, launch.env))
        if not server.ready.is_set() or needs_fresh_process(server.env, launch.env, source):
            return self.exec(cold)
        try:
            return server.launch(launch)
        except ForkServerLost as problem:
            log.warning("fork server %d is lost (%s): the cell starts cold", server.process.pid, problem)
            server.process.kill()
            return self.exec(cold)

    def exec(self, launch):
        """Start ``launch.argv`` in a process of its own."""
        for _ in range(2):
            server = self.server(self.bare, self.env)
            try:
                return server.launch(launch)
            except ForkServerLost as problem:
                log.warning("fork server %d is lost: %s", server.process.pid, problem)
                server.process.kill()
                reason = problem
        raise run_failed("the worker could not start a process for the cell: %s" % reason)

    def stop(self):
        with self.lock:
            for server in self.servers.values():
                server.stop()


def server_environment(own, cell):
    """A fork server's environment: the worker's, with the locked environment that its cells have."""
    activation = {name: cell[name] for name in ("VIRTUAL_ENV", "PATH") if name in cell}
    return {name: value for name, value in {**own, **activation}.items() if name in cell}


def needs_fresh_process(own, cell, source):
    changed = (name for name, value in cell.items() if own.get(name) != value)
    return any(map(READ_AT_IMPORT.fullmatch, changed)) or READ_AT_IMPORT.search(source) is not None


class Console:
    """A cell's stdout and stderr: files, so that nobody who holds them open can hang a run.

    The worker keeps them open too, so that a cell which deletes its folder keeps its console.
    Of each, ``limit`` bytes are kept, one half from the start and one from the end: a
    ConsoleKeeper gives the disk between them back while the cell still prints.
    """

    STREAMS = ("stdout", "stderr")

    def __init__(self, folder, limit=64 * 2**20):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self.paths = {stream: str(folder / stream) for stream in self.STREAMS}
        self.fds = {stream: os.open(path, flags, 0o600) for stream, path in self.paths.items()}
        self.half = limit // 2
        self.trimmed = dict.fromkeys(self.STREAMS, self.half)  # up to where the middle is gone
        self.lock = threading.Lock()  # a keeper shall not trim a descriptor that is closed

    def close(self):
        with self.lock:
            while self.fds:
                os.close(self.fds.popitem()[1])

    def trim(self):
        """Free the disk between the start and the end that are kept."""
        with self.lock:
            for stream, fd in self.fds.items():
                start, end = self.trimmed[stream], os.fstat(fd).st_size - self.half
                if end - start > self.half:
                    punch_hole(fd, start, end - start)
                    self.trimmed[stream] = end

    def text(self, stream):
        """A FileSlice of valid UTF-8: the file as it is, or a copy with U+FFFD for what is not
        and a line for what is missing."""
        path, fd = self.paths[stream], self.fds[stream]
        size = os.fstat(fd).st_size
        if size > 2 * self.half or not is_at(path, fd) or not is_utf8(fd):
            path += ".txt"
            self.copy(fd, size, path)
        return FileSlice(path, os.stat(path).st_size)

    def copy(self, fd, size, path):
        missing = size - 2 * self.half
        with open(path, "x", encoding="utf-8", newline="") as copy:
            if missing <= 0:
                copy_text(fd, 0, size, copy)
                return
            copy_text(fd, 0, self.half, copy)
            copy.write(
                "\n... %d bytes are missing here: STRATA_WORKER_CONSOLE_MAX_BYTES is %d ...\n"
                % (missing, 2 * self.half)
            )
            copy_text(fd, size - self.half, size, copy)

    def tail(self, stream, size=2000):
        """The last characters written, for an error message."""
        fd = self.fds[stream]
        start = max(0, os.fstat(fd).st_size - size)
        return os.pread(fd, size, start).decode("utf-8", "replace").strip()


class ConsoleKeeper:
    """Trims the consoles of running cells, all from one thread."""

    PERIOD = 0.1

    def __init__(self):
        self.consoles = set()
        self.changed = threading.Condition()
        self.stopped = False
        threading.Thread(target=self.run, name="strata-console-keeper", daemon=True).start()

    @contextlib.contextmanager
    def keeping(self, console):
        with self.changed:
            self.consoles.add(console)
            self.changed.notify()
        try:
            yield
        finally:
            with self.changed:
                self.consoles.discard(console)

    def run(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.consoles or self.stopped)
                if self.stopped:
                    return
                self.changed.wait(self.PERIOD)  # a cell that is over by then needs no keeping
                consoles = list(self.consoles)
            for console in consoles:
                console.trim()

    def stop(self):
        with self.changed:
            self.stopped = True
            self.changed.notify()


def punch_hole(fd, start, length):
    """Give a file's bytes back to the disk and keep its size; where that is not to be had, keep both."""
    import ctypes

    KEEP_SIZE, PUNCH_HOLE = 1, 2
    if sys.platform.startswith("linux"):
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if fallocate(fd, KEEP_SIZE | PUNCH_HOLE, start, length) == 0:
            return
    log.warning("this disk cannot give back the middle of a long console")


def is_at(path, fd):
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def pieces(fd, start, end):
    """Bytes of a file, whatever its descriptor's position."""
    while start < end:
        piece = os.pread(fd, min(CHUNK, end - start), start)
        if not piece:
            return
        start += len(piece)
        yield piece


def is_utf8(fd):
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in pieces(fd, 0, os.fstat(fd).st_size):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def copy_text(fd, start, end, copy):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces(fd, start, end):
        copy.write(decoder.decode(piece))
    copy.write(decoder.decode(b"", final=True))


# ---------------------------------------------------------------------------------------
# Environments: the locked ones that cells bring, built once and kept
# ---------------------------------------------------------------------------------------
#
# An environment is a folder that is whole when its marker is there; the marker is written
# last and removed first. Beside it lies a lock file: whoever builds or removes it holds
# that exclusively, whoever uses it holds it shared. The kernel drops the locks of a process
# that dies, so this also holds between worker processes on one root, however they end. A
# build holds the lock as well as its worker: while anything of it writes, nobody else does.


MARKER = ".strata-complete"
POLL_LOCK_SECONDS = 0.1
SWEEP_SECONDS = 3600
MAX_ARCHIVE_MEMBERS = 1_000_000  # torch with CUDA has 30,000
LONGEST_LINE = 8192  # of a build's output: a program may print without end

# What the worker's own environment says of its own Python and R, and would mislead others.
FOREIGN = re.compile(
    r"VIRTUAL_ENV.*|_?PYTHON.*|__PYVENV_LAUNCHER__|CONDA_.*|PIP_(TARGET|PREFIX|USER|PYTHON)|RENV_(?!CONFIG_|DOWNLOAD).*"
)
# Of uv's variables only those that say where things come from and lie. The rest may change
# what is installed (UV_NO_DEV), under a key that does not say so.
KEPT_OF_UV = re.compile(
    r"UV_(INDEX(_.*)?|DEFAULT_INDEX|EXTRA_INDEX_URL|FIND_LINKS|KEYRING_PROVIDER|CREDENTIALS_DIR|API_KEY|AUTH_TOKEN|PYX_.*"
    r"|CACHE_DIR|NO_CACHE|CONFIG_FILE|LINK_MODE|PYTHON_INSTALL_DIR|PYTHON_PREFERENCE"
    r"|HTTP_.*|REQUEST_TIMEOUT|NATIVE_TLS|SYSTEM_CERTS|INSECURE_HOST|OFFLINE|CONCURRENT_.*)"
)
# What a build gets though STRATA_NOTEBOOK_HARNESS_ENV_ALLOWLIST keeps it from cells.
FOR_BUILDS = re.compile(r"UV_.*|RENV_.*|NETRC|XDG_.*|(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)


def is_foreign(name):
    return FOREIGN.fullmatch(name) or name.startswith("UV_") and not KEPT_OF_UV.fullmatch(name)


def build_environment(allowlist=()):
    """What uv, R and what they start may see: index logins, but no secret of the worker, and
    of the rest no more than a cell. A lock may bring code that runs when it is built."""
    secrets = secret_names(os.environ)
    return {
        name: value
        for name, value in os.environ.items()
        if name not in secrets
        and not is_foreign(name)
        and (not allowlist or is_allowed(name, allowlist) or FOR_BUILDS.fullmatch(name))
    }


def activated(own, asked, lease, language):
    """A cell's environment as if its locked one were activated, and no other: the worker's
    part of it (``own``) under the notebook's (``asked``)."""
    env = {**{name: value for name, value in own.items() if not is_foreign(name)}, **asked}
    if language == "r":  # first, so that the image serves only what the lock does not list
        return {**env, "R_LIBS": os.pathsep.join(filter(None, [str(lease.path), env.get("R_LIBS")]))}
    return {**env, "VIRTUAL_ENV": str(lease.path), "PATH": "%s:%s" % (lease.path / "bin", env.get("PATH", os.defpath))}


@contextlib.contextmanager
def failing_as_environment():
    """Page: a lock that cannot be installed fails the cell with the reason (500)."""
    try:
        yield
    except (EnvironmentFailure, FetchError, OSError) as problem:
        raise run_failed("locked environment: %s" % problem) from None


# What a cell brings.


def check_python_block(block):
    """The block's texts and the Python to look for; EnvironmentFailure says what is wrong with it."""
    lock = {name: text_of(block, name) for name in ("key", "lockfile", "pyproject")}
    if uv_lock_key(lock["lockfile"]) != lock["key"]:
        raise EnvironmentFailure("environment.key is not the key of environment.lockfile")
    lock["python"] = block.get("python") or required_python(lock["pyproject"])
    if not isinstance(lock["python"], str):
        raise EnvironmentFailure('environment.python must be a version, such as "3.13", not %r' % (lock["python"],))
    return lock


def required_python(pyproject):
    """What a notebook asks for that names no version: a server may send an empty one."""
    try:
        return load_toml(pyproject).get("project", {}).get("requires-python", ">=3.9")
    except (ValueError, AttributeError, RecursionError) as problem:
        raise EnvironmentFailure("environment.pyproject is not a pyproject.toml: %s" % problem) from None


def check_r_block(block):
    """The block's texts and the packages of its lock; EnvironmentFailure says what is wrong with it."""
    lock = {name: text_of(block, name) for name in ("key", "lockfile")}
    try:
        packages = json.loads(lock["lockfile"]).get("Packages") or {}
        names = list(packages.keys())
    except (ValueError, RecursionError) as problem:
        raise EnvironmentFailure("environment.lockfile is not JSON: %s" % problem) from None
    except AttributeError:
        raise EnvironmentFailure("environment.lockfile is not an renv.lock") from None
    if hashlib.sha256(lock["lockfile"].encode()).hexdigest() != lock["key"]:
        raise EnvironmentFailure("environment.key is not the key of environment.lockfile")
    for name in names:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9.]*", name):
            raise EnvironmentFailure("%r in environment.lockfile is not the name of a package" % name)
    return {**lock, "packages": names}


def text_of(block, name):
    if not isinstance(block.get(name), str) or not block[name]:
        raise EnvironmentFailure("environment.%s is missing" % name)
    try:
        block[name].encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        raise EnvironmentFailure("environment.%s is no text that a file can hold" % name) from None
    return block[name]


# Who may do what with a folder, and when.


class FileLock:
    """A lock on a file, waited for in a way that a cancelled run does not.

    Changing it between shared and exclusive gives it up in between, so that two who want
    it exclusively do not wait for each other; look again at what it guards.
    """

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_acquire(self, shared):
        import fcntl

        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def acquire(self, run, shared):
        while not self.try_acquire(shared):
            run.check()
            time.sleep(POLL_LOCK_SECONDS)

    def close(self):
        os.close(self.fd)


def lock_of(path):
    return path.with_name(path.name + ".lock")


def scratch_of(path):
    return path.with_name(path.name + ".building")


def is_whole(path):
    """Whether a build came to its end here, and what its marker names is still there: an
    environment's Python goes when the image is replaced and the root's volume is not."""
    try:
        return (path / (path / MARKER).read_text()).exists()
    except FileNotFoundError:
        return False


def last_used(path):
    """When a folder was last used; long ago for what a build left that was killed."""
    try:
        return (path / MARKER).stat().st_mtime
    except FileNotFoundError:
        return -math.inf if path.exists() or scratch_of(path).exists() else math.inf


def discard(path):
    """Remove an environment or what is left of one: the marker first, half of one is none."""
    with contextlib.suppress(FileNotFoundError):
        (path / MARKER).unlink()
    if os.path.lexists(path):
        remove_tree(path)


@dataclasses.dataclass(frozen=True)
class Lease:
    """An environment that is held for a run: it is not removed meanwhile."""

    path: Path
    key: str
    installed: bool  # by this very run

    @property
    def python(self):
        return str(self.path / "bin" / "python")

    def told(self):
        """What the bundle's manifest says of it."""
        return {"key": self.key, "installed": self.installed}


@dataclasses.dataclass(frozen=True)
class Site:
    """Where an environment is built, and a folder for what is needed only meanwhile."""

    path: Path
    scratch: Path
    lock: FileLock


@contextlib.contextmanager
def building_site(path, lock):
    """A Site without anything of an earlier build; what a failed one leaves goes at once."""
    site = Site(path, scratch_of(path), lock)
    for folder in (path, site.scratch):
        discard(folder)
    site.scratch.mkdir(mode=0o700)
    try:
        yield site
    except BaseException:
        discard(path)
        raise
    finally:
        discard(site.scratch)


class Environments:
    """The environments under STRATA_WORKER_ENV_ROOT, Python's and R's."""

    def __init__(self, settings, machine, launcher):
        self.settings = settings
        self.machine = machine
        self.launcher = launcher
        self.root = Path(settings.env_root).expanduser().absolute()
        # The registry is the operator's own, so it may be anywhere, and behind a proxy.
        self.fetcher = Fetcher(dataclasses.replace(settings, allow_local_hosts=True))
        self.swept = -math.inf
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def python(self, run, block):
        """A Lease on the environment of a Python cell's ``environment`` block."""
        with failing_as_environment():
            lock = check_python_block(block)
            interpreter = self.machine.interpreter(lock["python"])
        build = functools.partial(self.build_python, run, lock, interpreter)
        with self.lease(run, self.root, (lock["key"], interpreter.name, interpreter.platform), build) as held:
            yield held

    @contextlib.contextmanager
    def r_library(self, run, block):
        """A Lease on the library of an R cell's ``environment`` block."""
        with failing_as_environment():
            lock = check_r_block(block)
            version, platform = self.machine.r_build()
        build = functools.partial(self.build_r, run, lock, version, platform)
        with self.lease(run, self.root / "r", (lock["key"], version, platform), build) as held:
            yield held

    @contextlib.contextmanager
    def lease(self, run, root, names, build):
        """Hold an environment, built first if it is not there."""
        path = root / "-".join(names)
        with contextlib.ExitStack() as stack:
            with failing_as_environment():
                root.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(contextlib.closing(FileLock(lock_of(path))))
                installed = self.hold(run, lock, path, build)
                os.utime(path / MARKER)
            self.sweep_sometimes()
            yield Lease(path, names[0], installed)

    def hold(self, run, lock, path, build):
        """Lock a whole environment for use; True if it had to be built."""
        installed = False
        lock.acquire(run, shared=True)
        while not is_whole(path):
            lock.acquire(run, shared=False)
            installed = self.install(run, lock, path, build) or installed
            lock.acquire(run, shared=True)
        return installed

    @staticmethod
    def install(run, lock, path, build):
        """Build an environment unless another has meanwhile; True if it was built."""
        if is_whole(path):
            return False
        began = time.monotonic()
        log.info("run %s: building environment %s", run.build_id or "-", path.name)
        with building_site(path, lock) as site:
            needed = build(site)
            (path / MARKER).write_text(needed)
        log.info("run %s: built environment %s in %.1f s", run.build_id or "-", path.name, time.monotonic() - began)
        return True

    # Python

    def build_python(self, run, lock, interpreter, site):
        where = "%s/%s/%s" % (lock["key"], interpreter.name, interpreter.platform)
        if self.fetch(run, site, where, interpreter.path):
            relocate(site.path, interpreter.path)
        else:
            self.uv_sync(run, lock, interpreter, site)
        if not os.access(site.path / "bin" / "python", os.X_OK):
            raise EnvironmentFailure("the environment has no bin/python")
        return "bin/python"

    def uv_sync(self, run, lock, interpreter, site):
        """Build at the very place where it will be used: console scripts hold that path.

        The project lies under the root: uv reads the settings of every folder above it, and
        above a temporary one they may be anybody's.
        """
        for name, text in (("pyproject.toml", lock["pyproject"]), ("uv.lock", lock["lockfile"])):
            (site.scratch / name).write_text(text, encoding="utf-8")
        command = [
            self.machine.uv,
            "sync",
            "--frozen",
            "--no-install-project",
            "--no-progress",
            "--python",
            interpreter.path,
        ]
        self.build_command(
            run, site, command, {"UV_PROJECT_ENVIRONMENT": str(site.path), "UV_PYTHON_DOWNLOADS": "never"}
        )

    # R

    def build_r(self, run, lock, version, platform, site):
        if not self.fetch(run, site, "r/%s/%s/%s" % (lock["key"], version, platform)):
            self.renv_restore(run, lock, site)
        missing = [
            name for name in lock["packages"] if name != "renv" and not (site.path / name / "DESCRIPTION").is_file()
        ]
        if missing:
            raise EnvironmentFailure("the R library lacks %s" % ", ".join(sorted(missing)))
        return ""

    def renv_restore(self, run, lock, site):
        site.path.mkdir()
        (site.scratch / "renv.lock").write_text(lock["lockfile"], encoding="utf-8")
        with self.renv_cache(run) as cache:
            self.build_command(
                run,
                site,
                [self.machine.rscript, "--no-init-file", "-e", RESTORE],
                {
                    "RENV_PATHS_ROOT": str(site.scratch / "renv"),
                    "RENV_PATHS_CACHE": str(cache),
                    "RENV_CONFIG_CACHE_SYMLINKS": "FALSE",  # the cache is swept; a library is whole by itself
                    "STRATA_LIBRARY": str(site.path),
                },
            )

    @contextlib.contextmanager
    def renv_cache(self, run):
        """renv's package cache, locked for use. It ages from its start, so that it cannot grow for ever."""
        cache = self.root / "r" / "cache"
        with contextlib.closing(FileLock(lock_of(cache))) as lock:
            lock.acquire(run, shared=True)
            cache.mkdir(exist_ok=True)
            if not (cache / MARKER).exists():
                (cache / MARKER).touch()
            yield cache

    # Both

    def fetch(self, run, site, where, interpreter=None):
        """Get an environment from the registry; False when that has none."""
        if not self.settings.env_registry_url:
            return False
        archive, unpacked, limit = site.scratch / "archive", site.scratch / "unpacked", self.settings.env_max_bytes
        status = self.download(run, "%s/%s" % (self.settings.env_registry_url.rstrip("/"), where), archive, limit)
        if status == 404:
            return False
        if status != 200:
            raise EnvironmentFailure("the registry answered %d for %s" % (status, where))
        unpack(archive, unpacked, limit, run.check, interpreter)
        content_of(unpacked).rename(site.path)
        log.info("run %s: fetched %s from the registry", run.build_id or "-", where)
        return True

    def download(self, run, url, archive, limit):
        answers = []

        def get(halt):
            try:
                answers.append(self.fetcher.download(halt, "the registry's archive", url, archive, limit))
            except WorkerError:  # 413, in the words of another setting
                raise too_large(limit) from None

        in_parallel(run, [get])
        return answers[0].status

    def build_command(self, run, site, command, env):
        """Run a build to its end, its output in the log; a cancel or too long a time ends it.

        A fork server starts it, so that all of it ends when this worker dies. That takes a
        moment, so it holds the lock too: as descriptor 2, which the shell makes 3. It says by
        a file that it came to a good end, since a fork server that dies cannot tell.
        """
        good, lines = site.scratch / "good", collections.deque(maxlen=30)
        argv = ["/bin/sh", "-c", 'exec 3>&2 2>&1; "$@" && : > "$0"', str(good), *command]
        env = {**build_environment(self.settings.env_allowlist), **env}
        with contextlib.ExitStack() as stack:
            output, theirs = os.pipe()
            output = stack.enter_context(open(output, "rb"))
            try:
                process = self.launcher.exec(Launch(argv, None, str(site.scratch), env, [theirs, site.lock.fd]))
            finally:
                os.close(theirs)
            reader = threading.Thread(target=log_lines, args=(run, output, lines), name="strata-build-log", daemon=True)
            reader.start()
            stack.callback(reader.join, KILL_SECONDS)
            stack.enter_context(contextlib.closing(process))
            with run.interruptible(process.kill):
                late = process.wait(self.settings.env_build_seconds) is None
        run.check()
        if late:
            raise EnvironmentFailure(
                "the build took more than STRATA_WORKER_ENV_BUILD_SECONDS (%g)" % self.settings.env_build_seconds
            )
        if not good.exists():
            raise EnvironmentFailure(
                "%s failed:\n%s" % (" ".join(map(os.path.basename, command[:2])), "\n".join(lines))
            )

    def sweep_sometimes(self):
        with self.lock:
            if time.monotonic() - self.swept < SWEEP_SECONDS:
                return
            self.swept = time.monotonic()
        threading.Thread(target=self.sweep, name="strata-env-sweep", daemon=True).start()

    def paths(self):
        locks = [*self.root.glob("*.lock"), *self.root.glob("r/*.lock")]
        return [lock.with_suffix("") for lock in locks]

    def count(self):
        """How many there are, ready for use."""
        return sum(map(is_whole, self.paths()))

    def sweep(self):
        """Remove what nobody has used for long, the oldest first, and what killed builds left.

        Only what a lock file of ours stands beside: the root may hold other things.
        """
        deadline = time.time() - self.settings.env_max_idle_days * 86400
        for path in sorted(self.paths(), key=last_used):
            with contextlib.suppress(OSError), contextlib.closing(FileLock(lock_of(path))) as lock:
                if last_used(path) < deadline and lock.try_acquire(shared=False) and last_used(path) < deadline:
                    log.info(
                        "removing environment %s: unused for %g days, or never finished",
                        path.name,
                        self.settings.env_max_idle_days,
                    )
                    for folder in (path, scratch_of(path)):
                        discard(folder)


# renv itself comes from the image: a lock may name a version of it that no repository has.
RESTORE = (
    'renv::restore(project = getwd(), lockfile = "renv.lock", library = Sys.getenv("STRATA_LIBRARY"), '
    'prompt = FALSE, clean = FALSE, exclude = "renv")'
)
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?!\n)")


def log_lines(run, output, lines):
    for line in iter(functools.partial(output.readline, LONGEST_LINE), b""):
        lines.append(TERMINAL_CODES.sub("", line.decode(errors="replace")).rstrip())
        log.info("run %s: %s", run.build_id or "-", lines[-1])


def remove_tree(path):
    """Delete a folder whatever a cell did to its permissions; a fault is logged, not raised."""

    def unlock_and_retry(function, failed, _):
        try:
            os.chmod(os.path.dirname(failed), 0o700, follow_symlinks=True)
            if os.path.isdir(failed) and not os.path.islink(failed):
                os.chmod(failed, 0o700)
                shutil.rmtree(failed)
            else:
                os.unlink(failed)
        except FileNotFoundError:
            return
        except OSError as problem:
            log.error("could not delete %s: %s", failed, problem)

    shutil.rmtree(path, onerror=unlock_and_retry)


# An archive comes from elsewhere. Its members are written only into real folders of the
# environment, so that nothing passes through a link; and a link's target goes up first,
# if it does, and down then, and stays inside. What a chain of such links leads to is
# inside as well, or is the interpreter: nothing is ever written through a link.


def too_large(limit):
    return EnvironmentFailure("the registry's archive is too large (STRATA_WORKER_ENV_MAX_BYTES is %d)" % limit)


class Inflated:
    """The tar in a .tar.gz, read once from its start to its end, as tarfile wants it.

    tarfile reads a header in one piece, however long that says it is, and takes a tar that
    breaks off for one that ends; ``check`` raises when the run was cancelled.
    """

    def __init__(self, archive, limit, check):
        self.file = gzip.open(archive)
        self.limit, self.check = limit, check
        self.at = 0
        self.last = b""

    def read(self, size):
        self.check()
        if size > CHUNK:
            raise EnvironmentFailure("it has a header of %d bytes" % size)
        self.last = self.file.read(size)
        self.at += len(self.last)
        if self.at > self.limit:
            raise too_large(self.limit)
        return self.last

    def tell(self):
        return self.at

    def seek(self, to):
        if to < self.at:
            raise EnvironmentFailure("it has a member of negative size")
        while self.at < to and self.read(min(CHUNK, to - self.at)):
            pass

    def finish(self):
        """Read what is left: the checksum comes last of all."""
        if self.last != bytes(tarfile.BLOCKSIZE):
            raise EnvironmentFailure("it breaks off or is damaged at byte %d" % self.at)
        while self.read(CHUNK):
            pass

    def close(self):
        self.file.close()


def unpack(archive, folder, limit, check, interpreter=None):
    """Unpack a .tar.gz into a new folder. ``interpreter`` is what ``bin/python`` may link to;
    ``check`` raises when the run was cancelled.

    EnvironmentFailure for what could reach outside, is too much, or is not all there.
    """
    folder.mkdir()
    try:
        with contextlib.closing(Inflated(archive, limit, check)) as inflated:
            unpack_members(tarfile.TarFile(fileobj=inflated), folder, interpreter)
            inflated.finish()
    except (
        tarfile.TarError,
        EOFError,
        zlib.error,
        OSError,
        ValueError,
        ArithmeticError,
        EnvironmentFailure,
    ) as problem:
        raise EnvironmentFailure("the registry's archive is refused: %s" % problem) from None


def unpack_members(tar, folder, interpreter):
    for _ in range(MAX_ARCHIVE_MEMBERS):
        member = tar.next()
        if member is None:
            return
        tar.members.clear()  # which would remember them all
        unpack_member(tar, member, folder, interpreter)
    raise EnvironmentFailure("it has more than %d members" % MAX_ARCHIVE_MEMBERS)


def unpack_member(tar, member, folder, interpreter):
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts or "\0" in member.name:
        raise EnvironmentFailure("%r is outside" % member.name)
    path = folder.joinpath(*parts)
    if member.isdir():
        return real_folder(folder, parts)
    real_folder(folder, parts[:-1])
    if os.path.lexists(path):
        raise EnvironmentFailure("%r comes twice" % member.name)
    if member.isreg():
        with open(path, "xb") as file:
            shutil.copyfileobj(tar.extractfile(member), file, CHUNK)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
    elif member.issym():
        os.symlink(safe_target(member, parts, interpreter), path)
    elif member.islnk():
        os.link(real_file(folder, member.linkname), path, follow_symlinks=False)
    else:
        raise EnvironmentFailure("%r is neither a file, a folder nor a link" % member.name)


def real_folder(folder, parts):
    """Make folders below ``folder``, through no link."""
    for part in parts:
        folder = folder / part
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise EnvironmentFailure("%r is used as a folder" % str(folder))


def real_file(folder, name):
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts:
        raise EnvironmentFailure("the link to %r leads outside" % name)
    for part in parts[:-1]:
        folder = folder / part
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise EnvironmentFailure("the link to %r leads through a link" % name)
    if not is_real_file(folder / parts[-1]):
        raise EnvironmentFailure("the link to %r leads to no file" % name)
    return folder / parts[-1]


def is_real_file(path):
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def safe_target(member, parts, interpreter):
    """Where a symbolic link may lead; an environment's own link to its Python to ours."""
    target = member.linkname
    if target.startswith("/"):
        if interpreter and len(parts) >= 2 and parts[-2] == "bin" and re.fullmatch(r"python[0-9.]*t?", parts[-1]):
            return interpreter
        raise EnvironmentFailure("%r is a link to %r" % (member.name, target))
    steps = [part for part in target.split("/") if part not in ("", ".")]
    up = len(list(itertools.takewhile(lambda part: part == "..", steps)))
    if ".." in steps[up:] or up >= len(parts):
        raise EnvironmentFailure("%r is a link to %r, which may lead outside" % (member.name, target))
    return target


def content_of(folder):
    """An archive of ``env/...`` is taken like one of its content."""
    inside = list(folder.iterdir())
    is_wrapped = len(inside) == 1 and not inside[0].is_symlink() and (inside[0] / "pyvenv.cfg").is_file()
    return inside[0] if is_wrapped else folder


SCRIPT_PYTHON = re.compile(rb"\A(#!/bin/sh\n'''exec' )?(#!)?[\"']?(/[^\n\"']*?/bin/python[0-9.]*t?)[\"']?")
SCRIPT_HEAD = 4096  # bytes in which that is


def relocate(path, interpreter):
    """Make an unpacked environment one of this place and this interpreter."""
    config = path / "pyvenv.cfg"
    if not is_real_file(config):  # a link to bin/python would be one to the interpreter
        raise EnvironmentFailure("the registry's archive is refused: it has no pyvenv.cfg")
    # Python looks for its library beside the home and does not follow that one's links.
    home = b"home = %s\n" % os.fsencode(os.path.dirname(os.path.realpath(interpreter)))
    others = [
        line for line in config.read_bytes().splitlines(True) if line.partition(b"=")[0].strip().lower() != b"home"
    ]
    config.write_bytes(home + b"".join(others))
    for script in (path / "bin").iterdir() if (path / "bin").is_dir() else ():
        if is_real_file(script):
            relocate_script(script, str(path / "bin" / "python"))


def relocate_script(script, python):
    with open(script, "rb") as file:
        found = SCRIPT_PYTHON.match(file.read(SCRIPT_HEAD))
    if found and (found.group(1) or found.group(2)):
        # The shell finds any path; the kernel stops at a space and after 127 bytes.
        start = b"#!/bin/sh\n'''exec' \"%s\" \"$0\" \"$@\"\n' '''\n" % os.fsencode(python)
        content = script.read_bytes()
        rest = content.split(b"\n", 3)[3] if found.group(1) else content.partition(b"\n")[2]
        script.write_bytes(start + rest)


# ---------------------------------------------------------------------------------------
# Machine: what this machine has, probed once
# ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python of this machine, and the two segments that name its build in a registry."""

    path: str
    name: str
    platform: str


# The page's two expressions, and where its programs are.
DESCRIBE_PYTHON = (
    "import json, platform, sys, sysconfig; print(json.dumps([sys.executable, "
    "'%s-%s%s' % (sys.implementation.name, platform.python_version(), sys.abiflags), sysconfig.get_platform()]))"
)
DESCRIBE_R = 'cat(paste0("R-", R.version$major, ".", R.version$minor), R.version$platform, sep = "\n")'
HAS_RENV = 'cat(requireNamespace("renv", quietly = TRUE))'


class Machine:
    """What /health says of the machine. Slow questions are asked once, in the background."""

    def __init__(self):
        self.rscript = shutil.which("Rscript")
        self.uv = shutil.which("uv")
        self.hardware = {"cpus": usable_cpus(), **memory()}
        self.has_renv = False
        threading.Thread(target=self.probe, name="strata-probe", daemon=True).start()

    def probe(self):
        if self.rscript:
            self.has_renv = output_of([self.rscript, "-e", HAS_RENV]) == "TRUE"
        self.hardware = {**self.hardware, **gpus(shutil.which("nvidia-smi"))}

    @property
    def languages(self):
        return ["python", "r"] if self.rscript else ["python"]

    @property
    def locks_python(self):
        return self.uv is not None and tomllib is not None

    @functools.lru_cache(maxsize=None)  # noqa: B019
    def interpreter(self, python):
        """The Interpreter that uv finds for a request such as ``3.13``. EnvironmentFailure."""
        if self.uv is None:
            raise EnvironmentFailure("uv is not installed on this worker")
        if not re.fullmatch(r"[0-9A-Za-z<>=~!][0-9A-Za-z.,<>=~!*+@ _-]*", python):
            raise EnvironmentFailure('environment.python must be a version, such as "3.13", not %r' % (python,))
        found = build_output([self.uv, "python", "find", "--system", "--no-project", "--no-python-downloads", python])
        return describe_python(found.strip())

    @functools.lru_cache(maxsize=None)  # noqa: B019
    def r_build(self):
        """The version and platform of R, as a registry's path names them. EnvironmentFailure."""
        if self.rscript is None:
            raise EnvironmentFailure("Rscript is not installed on this worker")
        version, platform = build_output([self.rscript, "--no-init-file", "-e", DESCRIBE_R]).split()
        return version, platform


def describe_python(python):
    return Interpreter(*json.loads(build_output([python, "-I", "-c", DESCRIBE_PYTHON])))


def build_output(command):
    """What a program prints in a build's environment; EnvironmentFailure with its own words.

    It runs in "/": the settings that uv finds where the worker was started are not for this.
    """
    name, how = " ".join(map(os.path.basename, command[:3])), {"text": True, "errors": "replace", "timeout": 60}
    try:
        done = subprocess.run(
            command, env=build_environment(), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, **how
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFailure("%s gave no answer in 60 seconds" % name) from None
    if done.returncode != 0:
        raise EnvironmentFailure("%s failed: %s" % (name, done.stderr.strip()[-1000:]))
    return done.stdout


def usable_cpus():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory():
    try:
        return {"memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20}
    except (OSError, ValueError):
        return {}


def gpus(nvidia_smi):
    """``accelerators`` and ``cuda`` as nvidia-smi reports them; what it cannot say is left out."""
    if nvidia_smi is None:
        return {}
    found = {}
    table = output_of([nvidia_smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (table or "").splitlines() if line.strip()]
    if table is not None and all(len(row) == 3 and row[1].isdigit() for row in rows):
        found["accelerators"] = [{"name": row[0], "memory_mb": int(row[1]), "driver": row[2]} for row in rows]
    version = re.search(r"CUDA Version:\s*([\d.]+)", output_of([nvidia_smi]) or "")
    if version:
        found["cuda"] = version.group(1)
    return found


def output_of(command, timeout=30):
    """A program's stdout, or None when it could not be run to a good end."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError) as problem:
        log.warning("%s: %s", command[0], problem)
        return None
    return done.stdout.decode(errors="replace")


# ---------------------------------------------------------------------------------------
# Output folders: what a cell fills, and the folders that cells are given
# ---------------------------------------------------------------------------------------
#
# A cell owns these folders, so their content is whatever it likes: links to the worker's
# files, pipes that never answer, names that are no text. They are walked from one open
# folder to the next, so that no link is followed even if it is put there meanwhile.


FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
DEEPEST = 100  # folders in folders; each takes a descriptor while it is walked
LONGEST_PATH = 2000  # bytes: half of what a path may have, for the folder it goes to
MAX_NOTICES = 20  # of a folder's files that were left out; the others are counted


def output_dir_names(source):
    """The names of a cell's ``# @output_dir name`` lines, which stand before its first statement."""
    names = []
    for line in map(str.strip, source.splitlines()):
        if line and not line.startswith("#"):
            break
        found = re.fullmatch(r"#\s*@(\w+)\s*(.*?)", line)
        if found and found.group(1).lower() == "output_dir" and found.group(2).isidentifier():
            names.append(found.group(2))
    return list(dict.fromkeys(names))


def open_below(root, path, flags):
    """A descriptor of ``path`` below the folder ``root``; OSError if a name on the way is a link."""
    fd = os.open(root, FOLDER_FLAGS)
    *folders, last = path.split("/")
    for name in folders:
        fd = open_in(fd, name, FOLDER_FLAGS)
    return open_in(fd, last, flags)


def open_in(folder, name, flags):
    try:
        return os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)


def regular_files(root, path, leave_out=lambda name, why: None):
    """The regular files in the folder ``path`` below ``root``: (name in the folder, os.stat_result).

    ``leave_out`` is told of what else is there, and why it is none.
    """
    try:
        fd = open_below(root, path, FOLDER_FLAGS)
    except OSError as problem:
        return leave_out(".", "it is no folder any more: %s" % problem.strerror)
    yield from walk(fd, "", 0, leave_out)


def walk(fd, prefix, depth, leave_out):
    """Walk the open folder ``fd``, and close it."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        for name in sorted(os.listdir(fd)):
            try:
                inner, status = open_entry(fd, name, prefix + name, depth)
            except FileNotFoundError:
                continue  # a running cell renames and removes
            except (OSError, ValueError) as problem:
                leave_out(prefix + name, getattr(problem, "strerror", None) or problem)
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from walk(inner, prefix + name + "/", depth + 1, leave_out)
            else:
                os.close(inner)
                yield prefix + name, status


def open_entry(folder, name, path, depth):
    """An entry's descriptor and status. ValueError says why it is not to be opened."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if os.fsencode(path) != path.encode(errors="replace"):
        raise ValueError("its name is not UTF-8")
    if len(path.encode()) > LONGEST_PATH or depth >= DEEPEST:
        raise ValueError("it is too deep in folders")
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ValueError("it is neither a file nor a folder")
    fd = os.open(name, FOLDER_FLAGS if stat.S_ISDIR(status.st_mode) else FILE_FLAGS, dir_fd=folder)
    opened = os.fstat(fd)
    if stat.S_IFMT(opened.st_mode) != stat.S_IFMT(status.st_mode):
        os.close(fd)
        raise ValueError("it changed while it was looked at")
    return fd, opened


def state_of(status):
    """What differs when a file was written to. A cell can set back its mtime, but not its ctime."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@dataclasses.dataclass(frozen=True)
class TreeFile(FileSlice):
    """A FileSlice whose ``path`` is below ``root`` and passes through no link."""

    root: str = None

    def open(self):
        file = os.fdopen(open_below(self.root, self.path, FILE_FLAGS), "rb", buffering=0)
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != self.size:
            file.close()
            raise OSError(errno.ESTALE, "changed while it was being sent", self.path)
        return file


class OutputFolders:
    """The output folders of one run (``# @output_dir``), in ``dirs/`` of its own folder."""

    def __init__(self, run, names):
        self.run, self.names = run, names
        self.root = str(run.folder)
        self.stream = None  # a FolderStream, if the server takes files while the cell runs
        for name in names:
            (run.folder / "dirs" / name).mkdir(parents=True)

    def told(self):
        """What the harness is told of them."""
        return {name: "dirs/" + name for name in self.names}

    def files(self, leave_out=lambda name, why: None):
        """(folder's name, path in it, TreeFile, state) of each file there is."""
        for folder in self.names:
            for path, status in regular_files(self.root, "dirs/" + folder, functools.partial(leave_out, folder)):
                inside = "dirs/%s/%s" % (folder, path)
                yield folder, path, TreeFile(inside, status.st_size, self.root), state_of(status)

    def collect(self, console):
        """What the bundle's manifest says of them, and its members; what is left out is said on stderr."""
        streamed = {} if self.stream is None else self.stream.finish()
        listed, members = {name: {} for name in self.names}, []
        notices = Notices("output folder")
        for folder, path, file, _ in self.files(notices.add):
            if path not in streamed.get(folder, ()):
                listed[folder][path] = file.size
                members.append((file.path, file))
        notices.print(console)
        said = {"output_dirs": listed}
        if self.stream is not None:
            said["output_dirs_streamed"] = streamed
        return said, members


class Notices:
    """Lines for the end of a cell's stderr: what of its folders did not come back."""

    def __init__(self, what):
        self.what = what
        self.lines = collections.defaultdict(list)

    def add(self, folder, name, why):
        name = name.encode(errors="backslashreplace").decode()
        self.lines[folder].append("strata-worker: %s %s: %r is left out: %s\n" % (self.what, folder, name, why))

    def print(self, console):
        for folder, lines in self.lines.items():
            shown, more = lines[:MAX_NOTICES], len(lines) - MAX_NOTICES
            if more > 0:
                shown.append("strata-worker: %s %s: and %d more\n" % (self.what, folder, more))
            os.write(console.fds["stderr"], "".join(shown).encode())


class FolderStream:
    """Posts the files of a running cell's output folders to ``output_file_url`` as they settle.

    A file has settled when nothing of it changed from one poll to the next; if it does later,
    it is posted again. What the server has not taken at the end goes in the bundle.
    """

    def __init__(self, fetcher, url, folders, poll_seconds):
        self.fetcher, self.url, self.folders, self.poll_seconds = fetcher, url, folders, poll_seconds
        self.halt, self.over = Halt(), threading.Event()
        self.seen, self.sent, self.refused = {}, {}, set()  # by (folder, path)
        self.thread = threading.Thread(target=self.run, name="strata-folders", daemon=True)
        self.thread.start()

    def run(self):
        with contextlib.suppress(Halted):
            while not self.over.wait(self.poll_seconds):
                found = {(folder, path): (file, state) for folder, path, file, state in self.folders.files()}
                for key, (file, state) in found.items():
                    if self.over.is_set():
                        return
                    if self.seen.get(key) == state and self.is_due(key, state):
                        self.post(key, file, state, self.halt)
                self.seen = {key: state for key, (_, state) in found.items()}

    def is_due(self, key, state):
        return key not in self.refused and self.sent.get(key) != state

    def post(self, key, file, state, halt):
        """Post one file; False when it may go better at another time."""
        query = urllib.parse.urlencode({"folder": key[0], "path": key[1]}, quote_via=urllib.parse.quote)
        url = "%s%s%s" % (self.url, "&" if "?" in self.url else "?", query)
        LOG_PACER.wait(halt)
        try:
            with self.fetcher.request(
                halt, "POST", url, {"Content-Type": "application/octet-stream"}, [file]
            ) as response:
                status = response.status
        except FetchError as problem:  # a file that changed meanwhile too
            log.debug("output folder %s: %s", key[0], problem)
            return False
        if status == 201:
            self.sent[key] = state
        elif status < 500 and status not in (408, 429):
            self.refused.add(key)
        return status < 500

    def finish(self):
        """The cell is over: post the rest. What the server holds: ``{folder: [path, ...]}``."""
        run = self.folders.run
        self.over.set()
        with run.interruptible(self.halt):
            self.thread.join()
        run.check()
        last = {(folder, path): (file, state) for folder, path, file, state in self.folders.files()}
        given_up = threading.Event()
        in_parallel(
            run,
            [
                functools.partial(self.post_last, key, file, state, given_up)
                for key, (file, state) in last.items()
                if self.is_due(key, state)
            ],
        )
        held = {name: [] for name in self.folders.names}
        for (folder, path), (_, state) in last.items():
            if self.sent.get((folder, path)) == state:
                held[folder].append(path)
        return held

    def post_last(self, key, file, state, given_up, halt):
        if not given_up.is_set() and not self.post(key, file, state, halt):
            given_up.set()  # the bundle is on its way to the same server: no time for each to fail

    def close(self):
        self.over.set()
        self.halt()


def unpack_folder(archive, folder, check):
    """Unpack the tar of a ``dir/tar`` input. ``check`` raises when the run was cancelled.

    Only files and folders, each once and inside; ValueError for anything else. The tar is not
    compressed and nothing in it may be sparse, so it takes no more room than it came with.
    """
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r:") as tar:
            position = -1
            for member in tar:
                check()
                if member.offset <= position:
                    raise ValueError("it goes in circles")  # a negative size does that
                position = member.offset
                unpack_folder_member(tar, member, folder)
    except (tarfile.TarError, EOFError, RecursionError, OverflowError, FileExistsError, NotADirectoryError) as problem:
        raise ValueError("its tar cannot be unpacked: %s" % problem) from None


def unpack_folder_member(tar, member, folder):
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if not member.isdir() and not member.isreg() or member.issparse():
        raise ValueError("%r in its tar is neither a file nor a folder" % member.name)
    if member.name.startswith("/") or not is_inside(parts) or len(parts) > DEEPEST:
        raise ValueError("%r in its tar leads outside" % member.name)
    path = folder.joinpath(*parts)
    (path if member.isdir() else path.parent).mkdir(parents=True, exist_ok=True)
    if member.isreg():
        with open(path, "xb") as file:
            shutil.copyfileobj(tar.extractfile(member), file, CHUNK)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)


def is_inside(parts):
    """Whether a path of these parts is a file's below a folder, whatever the folder."""
    return not any(part in ("", ".", "..") or "\0" in part for part in parts)


# ---------------------------------------------------------------------------------------
# Mounts: folders of object stores, copied here for a cell, and its changes back
# ---------------------------------------------------------------------------------------
#
# pyarrow.fs speaks to the stores, and only in a helper: this same file, run as a process
# for one job on one mount. So the server never loads it, a cancel is a kill, and what the
# environment says to a cloud's library it says to no other mount. The job comes on its
# stdin with the credentials, which no argument or environment ever holds; when that pipe
# closes, the worker is gone and the helper ends.
#
# Options are fsspec's, and a cell's author writes them: each is translated when the request
# arrives, or refused by name.


class OptionError(ValueError):
    """A storage option that pyarrow.fs has nothing for, or whose value is none."""


def translated(table, options, prefix=""):
    """Arguments of pyarrow.fs from fsspec's options; those later in ``table`` win. OptionError."""
    for name in options:
        if name not in table:
            raise OptionError("the option %r has no counterpart in pyarrow.fs" % (prefix + name))
    arguments = {}
    for name in table:
        if options.get(name) is None:
            continue
        try:
            arguments.update(table[name](options[name]))
        except OptionError:
            raise
        except ValueError as problem:  # never with the value: it may be a secret
            raise OptionError("the option %r %s" % (prefix + name, problem)) from None
    return arguments


def as_text(argument):
    def translate(value):
        if not isinstance(value, str) or "\0" in value:
            raise ValueError("must be a string")
        return {argument: value}

    return translate


def as_switch(argument):
    def translate(value):
        return {argument: switch(value)}

    return translate


def as_options(name, table):
    def translate(value):
        if not isinstance(value, dict):
            raise ValueError("must be an object")
        return translated(table, value, name + ".")

    return translate


def endpoint(value):
    """``http://host:port`` as S3 and Google's storage take it."""
    parts = endpoint_parts(value)
    if parts.path.strip("/"):
        raise ValueError("must have no path")
    return {"scheme": parts.scheme, "endpoint_override": parts.netloc}


def endpoint_parts(value):
    parts = urllib.parse.urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc or parts.query:
        raise ValueError("must be an http:// or https:// URL with nothing but a host")
    return parts


def s3_verify(value):
    if isinstance(value, str):
        return {"tls_ca_file_path": value}
    if value is True:
        return {}
    raise ValueError("must be true or the path of a file: pyarrow.fs always verifies")


def s3_addressing(value):
    if value not in ("auto", "path", "virtual"):
        raise ValueError("must be auto, path or virtual")
    return {"force_virtual_addressing": True} if value == "virtual" else {}


def gs_token(value):
    """gcsfs's ``token``: a way to find one, a file's name, a file's content, or a token."""
    if value in ("google_default", "cloud", "cache"):
        return {}
    if value == "anon":
        return {"anonymous": True}
    if isinstance(value, dict):
        return {"token_info": value}
    if not isinstance(value, str) or value == "browser":
        raise ValueError("must be anon, google_default, cloud, the path of a file, its content, or a token")
    is_file = value.startswith(("/", "~", ".")) or value.endswith(".json")
    return {"token_file": os.path.expanduser(value)} if is_file else {"access_token": value}


def az_connection_string(value):
    table = {
        "AccountName": as_text("account_name"),
        "AccountKey": as_text("account_key"),
        "SharedAccessSignature": as_text("sas_token"),
        "BlobEndpoint": as_text("endpoint"),
        "DefaultEndpointsProtocol": as_text("protocol"),
        "EndpointSuffix": as_text("suffix"),
        **dict.fromkeys(("QueueEndpoint", "TableEndpoint", "FileEndpoint"), as_text("unused")),
    }
    fields = [field.partition("=") for field in value.split(";") if field] if isinstance(value, str) else [("", "", "")]
    if not all(name in table for name, _, _ in fields):  # which one is not said: it may be a key
        raise ValueError("must be AccountName=...;AccountKey=...;... of fields that pyarrow.fs has a counterpart for")
    arguments = translated(table, {name: text for name, _, text in fields})
    arguments.pop("unused", None)
    protocol, suffix = arguments.pop("protocol", "https"), arguments.pop("suffix", None)
    if suffix and "endpoint" not in arguments:
        arguments["endpoint"] = "%s://%s.blob.%s" % (protocol, arguments.get("account_name"), suffix)
    return arguments


OPTIONS = {
    "s3": {
        "use_ssl": lambda value: {"scheme": "https" if switch(value) else "http"},
        "client_kwargs": as_options(
            "client_kwargs",
            {
                "aws_access_key_id": as_text("access_key"),
                "aws_secret_access_key": as_text("secret_key"),
                "aws_session_token": as_text("session_token"),
                "region_name": as_text("region"),
                "use_ssl": lambda value: {"scheme": "https" if switch(value) else "http"},
                "endpoint_url": endpoint,
                "verify": s3_verify,
            },
        ),
        "config_kwargs": as_options(
            "config_kwargs",
            {
                "s3": as_options("config_kwargs.s3", {"addressing_style": s3_addressing}),
            },
        ),
        "anon": as_switch("anonymous"),
        "profile": as_text("profile"),
        "region": as_text("region"),
        "username": as_text("access_key"),
        "password": as_text("secret_key"),
        "key": as_text("access_key"),
        "secret": as_text("secret_key"),
        "token": as_text("session_token"),
        "endpoint_url": endpoint,
    },
    "gs": {
        "anon": as_switch("anonymous"),
        "token": gs_token,
        "project": as_text("project_id"),
        "endpoint_url": endpoint,
    },
    "az": {
        "connection_string": az_connection_string,
        "account_name": as_text("account_name"),
        "account_key": as_text("account_key"),
        "sas_token": as_text("sas_token"),
        "anon": as_switch("anonymous"),
        "tenant_id": as_text("tenant_id"),
        "client_id": as_text("client_id"),
        "client_secret": as_text("client_secret"),
        "account_host": lambda value: {"endpoint": "https://%s" % value},
        "endpoint_url": as_text("endpoint"),
    },
}
ENDPOINT_OPTIONS = ("endpoint_url", "account_host", "connection_string")
AZURE_VARIABLES = (
    "account_name",
    "account_key",
    "connection_string",
    "sas_token",
    "client_id",
    "client_secret",
    "tenant_id",
)
SECRET_ARGUMENTS = (
    "access_key",
    "secret_key",
    "session_token",
    "access_token",
    "token_info",
    "account_key",
    "sas_token",
    "client_secret",
)


def store_arguments(scheme, options):
    """What a filesystem of pyarrow.fs is made with. OptionError."""
    if scheme == "az":
        variables = {name: os.environ.get("AZURE_STORAGE_" + name.upper()) for name in AZURE_VARIABLES}
        options = {**variables, **options}  # as adlfs does
    arguments = translated(OPTIONS[scheme], options)
    if scheme != "az":
        if arguments.get("anonymous"):  # then pyarrow takes no key beside it
            arguments = {name: value for name, value in arguments.items() if name not in SECRET_ARGUMENTS}
        return arguments
    return az_arguments(arguments)


def az_arguments(arguments):
    account = arguments.get("account_name")
    if not account:
        raise OptionError("an az:// mount needs the option 'account_name' or 'connection_string'")
    if "endpoint" in arguments:
        arguments.update(az_endpoint(arguments.pop("endpoint"), account))
    if "sas_token" in arguments:
        arguments["sas_token"] = arguments["sas_token"].lstrip("?")
    # As adlfs: with nothing to say who asks, it is anybody, unless ``anon`` is false.
    credentials = arguments.keys() & {"account_key", "sas_token", "client_secret", "client_id"}
    arguments["anonymous"] = not credentials and arguments.get("anonymous", True)
    return arguments


def az_endpoint(url, account):
    """``https://account.host`` or, as emulators have it, ``http://host:port/account``."""
    try:
        parts = endpoint_parts(url)
    except ValueError as problem:
        raise OptionError("the endpoint %s" % problem) from None
    host, path = parts.netloc, parts.path.strip("/")
    if path == account:
        authority = host
    elif not path and host.startswith(account + "."):
        authority = host[len(account) :]
    else:
        raise OptionError("the endpoint must be https://ACCOUNT.host or http://host/ACCOUNT")
    return {
        "blob_storage_authority": authority,
        "blob_storage_scheme": parts.scheme,
        "dfs_storage_authority": authority.replace(".blob.", ".dfs.", 1),
        "dfs_storage_scheme": parts.scheme,
    }


# Credentials are the worker's own: a request only names them.


def mount_options(settings, mount):
    """A mount's options over its credential's over its scheme's. WorkerError."""
    fields = {}
    for name in ((settings.mount_credentials or {}).get(mount.scheme), mount.credential):
        if name:
            fields.update(credential(settings, name))
    # S3 signs, but the others send what the credential holds: not to where a notebook says.
    moved = [name for name in ENDPOINT_OPTIONS if name in mount.options]
    if fields and moved and mount.scheme != "s3":
        raise bad_request("Mount %r: the option %r must come from the credential itself" % (mount.name, moved[0]))
    return {**fields, **mount.options}


def credential(settings, name):
    fields = (settings.credentials or {}).get(name)
    if fields is None:
        raise bad_request("credential %r is not defined on this worker (STRATA_NOTEBOOK_CREDENTIALS)" % name)
    try:
        return resolved(fields)
    except ValueError as problem:
        raise run_failed("credential %r %s" % (name, problem)) from None


def resolved(value):
    """A credential's value with ``${file:/path}`` read now, so that a rotated secret counts at once.

    Settings has replaced each ``${NAME}`` that is set.
    """
    if isinstance(value, dict):
        return {name: resolved(inner) for name, inner in value.items()}
    found = re.fullmatch(r"\$\{(file:)?(.*)\}", value, re.DOTALL) if isinstance(value, str) else None
    if found is None:
        return value
    if not found.group(1):
        raise ValueError("references %s, which is not set" % value)
    if not os.path.isabs(found.group(2)):
        raise ValueError("references %s, which is not an absolute path" % value)
    try:
        return Path(found.group(2)).read_text().rstrip("\r\n")
    except (OSError, UnicodeError) as problem:
        raise ValueError(
            "references %s, which cannot be read: %s" % (value, getattr(problem, "strerror", "not text"))
        ) from None


class Store:
    """A mount with everything that is needed to reach it."""

    def __init__(self, settings, mount):
        self.mount = mount
        try:
            self.arguments = store_arguments(mount.scheme, mount_options(settings, mount))
        except OptionError as problem:
            raise bad_request("Mount %r: %s" % (mount.name, problem)) from None
        # Who asks, and where: only a mount that reaches the store alike shares its cached objects.
        whole = json.dumps([mount.scheme, self.arguments], sort_keys=True)
        self.scope = hashlib.sha256(b"strata-worker mount cache\n" + whole.encode()).hexdigest()

    def job(self, **more):
        """A helper's job. It says all there is to know, since a helper has no Settings."""
        mount = self.mount
        return {"scheme": mount.scheme, "path": mount.path, "arguments": self.arguments, "scope": self.scope, **more}

    def failure(self, text):
        """The error of a helper, without what it may quote of the credentials."""
        for name in SECRET_ARGUMENTS:
            for secret in secrets_in(self.arguments.get(name)):
                text = text.replace(secret, "***")
        return run_failed("mount %r (%s): %s" % (self.mount.name, self.mount.uri, text))


def secrets_in(value):
    """Every form in which a secret may be quoted, the longest first; a SAS also by its signature."""
    if isinstance(value, dict):
        return [secret for inner in value.values() for secret in secrets_in(inner)]
    if not isinstance(value, str):
        return []
    pieces = {value, *re.findall(r"(?:^|&)sig=([^&]+)", value)}
    forms = (
        pieces
        | {urllib.parse.quote(piece, safe="") for piece in pieces}
        | {urllib.parse.unquote(piece) for piece in pieces}
    )
    return sorted((form for form in forms if len(form) > 3), key=len, reverse=True)


class Mounts:
    """The mounts of one run, in ``mounts/`` of its folder. Making it refuses what cannot be mounted."""

    def __init__(self, settings, run, mounts):
        self.settings, self.run = settings, run
        self.stores = {mount.name: Store(settings, mount) for mount in mounts}
        self.bytes, self.writes = {}, []
        self.before = {}  # of each mount that may be written: the helper's own report

    def stage(self):
        """Copy every mount into the run's folder; what the harness is told of them."""
        results = self.help(
            {
                name: store.job(
                    folder=str(self.run.folder / "mounts" / name),
                    stall=self.settings.stall_seconds,
                    cache=None if store.mount.writable else cache_settings(self.settings),
                )
                for name, store in self.stores.items()
            }
        )
        for name, result in results.items():
            self.bytes[name] = result["bytes"]
            self.run.count_in(result["bytes"])
            self.before[name] = result
        return {name: "mounts/" + name for name in self.stores}

    def sync(self, console):
        """After a cell that succeeded: upload what it created or changed in its ``rw`` mounts."""
        jobs, notices = {}, Notices("mount")
        for name, store in self.stores.items():
            changed = self.changed(name, notices) if store.mount.writable else None
            if changed:
                jobs[name] = store.job(
                    root=str(self.run.folder),
                    folder="mounts/" + name,
                    base=self.before[name]["base"],
                    upload=changed,
                    stall=self.settings.stall_seconds,
                )
        notices.print(console)
        for name, result in self.help(jobs).items():
            if result["files"]:
                self.writes.append({"mount": name, "uri": self.stores[name].mount.uri, "files": result["files"]})

    def changed(self, name, notices):
        """The files that are not as they were staged, with the digest that they had."""
        before = self.before[name]["files"]
        return {
            path: before.get(path, {}).get("sha256")
            for path, status in regular_files(
                str(self.run.folder), "mounts/" + name, functools.partial(notices.add, name)
            )
            if before.get(path, {}).get("state") != state_of(status)
        }

    def said(self):
        """What the bundle's manifest says of them."""
        return {"mount_bytes": self.bytes, "mount_writes": self.writes}

    def help(self, jobs):
        """Run a helper for each job, all at once; their results. No helper outlives this call."""
        with contextlib.ExitStack() as stack:
            helpers = {name: stack.enter_context(MountHelper(job)) for name, job in jobs.items()}
            with self.run.interruptible(lambda: [helper.process.kill() for helper in helpers.values()]):
                answers = {name: helper.answer() for name, helper in helpers.items()}
        self.run.check()
        for name, answer in answers.items():
            if "error" in answer:
                raise self.stores[name].failure(answer["error"])
        return {name: answer["result"] for name, answer in answers.items()}


STALLED = "the store moved no byte for STRATA_WORKER_STALL_SECONDS"


class MountHelper:
    """A helper process at work on one job, killed when the block ends before it does."""

    def __init__(self, job):
        self.job = json.dumps(job).encode() + b"\n"

    def __enter__(self):
        self.process = subprocess.Popen(
            [*own_command(), "--mount-helper"],
            env=cell_environment(os.environ, ()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(BrokenPipeError):  # it died at once: its answer says so
            self.process.stdin.write(self.job)
            self.process.stdin.flush()
        return self

    def answer(self):
        """``{"result": ...}`` or ``{"error": text}``."""
        try:
            return json.loads(self.process.stdout.read())
        except ValueError:
            code = self.process.wait()
            return {"error": STALLED if code == -signal.SIGALRM else "the process that copies it %s" % ending(code)}

    def __exit__(self, *exc_info):
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


# The cache of read-only mounts holds one version of each object. A cell is the same user as
# the worker and may write wherever that may, so nothing a cell is given shares an inode with
# the cache: it gets a copy, which costs nothing where the filesystem can clone. What a cell
# does to the cache itself is noticed: a record keeps the inode and ctime of its object, which
# no write leaves alone and nobody can set, under a seal that takes the mount's credentials.
#
# A store's times are whole seconds. So size and time tell that an object is the same only if
# it was fetched long after it was written; of one that was not, the version is asked for.


RACY_SECONDS = 900  # the clocks of a store and of those it lets in differ by less: S3 refuses more


def cache_settings(settings):
    root = Path(settings.mount_cache_dir or "~/.strata/mount_cache").expanduser()
    return [str(root / "copies"), settings.mount_cache_max_bytes, settings.mount_cache_max_idle_days]


class MountCache:
    """Objects kept from run to run, by who asked for them and their path. It never fails a run."""

    def __init__(self, root, max_bytes, max_idle_days):
        self.root, self.max_bytes, self.max_idle_days = Path(root), max_bytes, max_idle_days
        self.count = lambda size: None  # is told of the bytes that are copied out of it

    def places(self, scope, path):
        name = hmac.new(scope.encode(), path.encode(), "sha256").hexdigest()
        return self.root / name[:2] / name, self.root / name[:2] / (name + ".json")

    @staticmethod
    def seal(scope, path, fields):
        return hmac.new(scope.encode(), json.dumps([path, fields], sort_keys=True).encode(), "sha256").hexdigest()

    def record(self, scope, path):
        """What was noted of an object when it was kept; None when that is not to be believed."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            with os.fdopen(os.open(self.places(scope, path)[1], FILE_FLAGS), "rb") as file:
                fields = json.loads(file.read(CHUNK))
            if hmac.compare_digest(fields.pop("seal"), self.seal(scope, path, fields)) and fields.keys() == RECORD:
                return fields
        return None

    def note(self, scope, path, fields):
        content = json.dumps({**fields, "seal": self.seal(scope, path, fields)}).encode()
        replaced(self.places(scope, path)[1], lambda fd: os.write(fd, content))

    def copy(self, scope, info, fd, ask):
        """Copy a kept object into the file ``fd`` if it is still the one in the store; True if so."""
        record = self.record(scope, info.path)
        if record is None or (record["size"], record["mtime"]) != (info.size, info.mtime_ns):
            return False
        if record["racy"] and not self.is_unchanged(record, scope, info, ask):
            return False
        data, note = self.places(scope, info.path)
        with contextlib.suppress(OSError):
            with os.fdopen(os.open(data, FILE_FLAGS), "rb") as source:
                copy_file(source.fileno(), fd, self.count)
                os.utime(note)  # it was used
                return identity(source.fileno()) == record["identity"]  # asked last: a cell may be at it now
        return False

    def is_unchanged(self, record, scope, info, ask):
        """Whether a racy object has the version it had; old enough, it is not racy any more."""
        asked = time.time()
        if record["version"] is None or ask(info.path) != record["version"]:
            return False
        if not is_racy(info, asked):
            with contextlib.suppress(OSError):
                self.note(scope, info.path, {**record, "racy": False})
        return True

    def keep(self, scope, info, version, fd, asked):
        """Keep what was fetched into the file ``fd``, after the time ``asked``."""
        if self.max_bytes and info.size > self.max_bytes:
            return
        data = self.places(scope, info.path)[0]
        with contextlib.suppress(OSError):  # a full disk, a home that is read-only
            data.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept = replaced(data, functools.partial(copy_file, fd))
            self.note(
                scope,
                info.path,
                {
                    "size": info.size,
                    "mtime": info.mtime_ns,
                    "version": version,
                    "racy": is_racy(info, asked),
                    "identity": kept,
                },
            )

    def holds(self, scope, entry):
        """Whether an object that a server lists (``POST /v1/mount-cache/cached``) is here as listed.

        ValueError when the listing does not tell.
        """
        etag, mtime = entry.get("etag", "").strip('"'), entry.get("mtime", "")
        record = self.record(scope, entry["key"])
        if record is None or record["size"] != entry["size"]:
            return False
        if etag and record["version"]:
            return etag == record["version"]
        listed = datetime.datetime.fromisoformat(mtime.replace("Z", "+00:00"))
        return int(listed.timestamp()) == record["mtime"] // 10**9

    def sweep(self):
        """Remove what nobody has used for long, and the longest unused while there is too much."""
        now, kept = time.time(), []
        for note in self.root.glob("*/*"):
            with contextlib.suppress(OSError):
                used = note.lstat().st_mtime
                if note.suffix == ".json":
                    kept.append((used, note.with_suffix("").lstat().st_size, note))
                elif now - used > 86400 and not note.with_suffix(".json").exists():
                    note.unlink()  # left by a helper that was killed
        total = sum(size for _, size, _ in kept)
        for used, size, note in sorted(kept):
            is_idle = self.max_idle_days and now - used > self.max_idle_days * 86400
            if not is_idle and not (self.max_bytes and total > self.max_bytes):
                break
            total -= size
            for path in (note, note.with_suffix("")):
                path.unlink(missing_ok=True)


RECORD = {"size", "mtime", "version", "racy", "identity"}


def is_racy(info, asked):
    """Whether an object is so new that it may be written again, within one tick of the store's clock."""
    return info.mtime_ns is None or asked - info.mtime_ns / 1e9 < RACY_SECONDS


def identity(fd):
    status = os.fstat(fd)
    return [status.st_ino, status.st_size, status.st_ctime_ns]


def replaced(path, write):
    """Put what ``write(fd)`` writes in the place of ``path``; the identity of the new file."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        write(fd)
        os.replace(name, path)
        return identity(fd)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(fd)


def copy_file(source, target, count=lambda size: None):
    """Copy one open file into another; by cloning, where the filesystem can."""
    size, offset = os.fstat(source).st_size, 0
    os.ftruncate(target, 0)
    while offset < size:
        copied = copy_range(source, target, size - offset, offset)
        offset += copied
        count(copied)


def copy_range(source, target, size, offset):
    if hasattr(os, "copy_file_range"):
        with contextlib.suppress(OSError):  # across filesystems, in an old kernel
            copied = os.copy_file_range(source, target, size, offset, offset)
            if copied:
                return copied
    data = os.pread(source, CHUNK, offset)
    if not data:
        raise OSError(errno.ESTALE, "a file shrank while it was copied")
    return os.pwrite(target, data, offset)


def cached_bytes(settings, probe):
    """The answer's list for ``POST /v1/mount-cache/cached``: None for what cannot be told."""
    mounts = expect(list, expect(dict, probe, "the probe").get("mounts"), "mounts")
    return [cached_share(settings, entry) for entry in mounts]


def cached_share(settings, entry):
    try:
        mount = parse_mount(entry["spec"])
        if mount.writable:
            return None  # is always fetched
        cache, scope = MountCache(*cache_settings(settings)), Store(settings, mount).scope
        return sum(listed["size"] for listed in entry["entries"] if cache.holds(scope, listed))
    except (WorkerError, ValueError, TypeError, KeyError, AttributeError):
        return None


# From here on it is the helper that runs.


FILES_AT_ONCE = 8
PARTS_AT_ONCE = 16  # over all files: a large one is fetched in parts
PART = 8 * 2**20


def mount_helper():
    """``--mount-helper``: do the job on stdin, answer on stdout, and end."""
    if sys.platform.startswith("linux"):
        make_undumpable()  # before the credentials come
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_worker, daemon=True).start()
    try:
        transfer = Transfer(job)
        finish_helper({"result": transfer.upload() if "upload" in job else transfer.download()})
    except BaseException as problem:
        # From in here: an upload that failed must not be tidied up into a short object.
        finish_helper({"error": str(problem) or type(problem).__name__})


def finish_helper(answer):
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def end_with_worker():
    sys.stdin.read()
    os._exit(1)


def open_store(scheme, arguments):
    """The filesystem of pyarrow.fs. What only its libraries' variables can say, they say here."""
    arguments = dict(arguments)
    if "profile" in arguments:
        os.environ["AWS_PROFILE"] = arguments.pop("profile")
    if "token_info" in arguments:
        arguments["token_file"] = hidden_file(json.dumps(arguments.pop("token_info")))
    if "token_file" in arguments:
        os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = arguments.pop("token_file")
    import pyarrow.fs

    return {"s3": open_s3, "gs": open_gs, "az": open_az}[scheme](pyarrow.fs, arguments)


def hidden_file(text):
    """The path of a file without a name, which only this process can open."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        return "/dev/fd/%d" % os.dup(file.fileno())


def open_s3(fs, arguments):
    return fs.S3FileSystem(connect_timeout=CONNECT_SECONDS, **arguments)


def open_gs(fs, arguments):
    if "access_token" in arguments:
        arguments["credential_token_expiration"] = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(
            hours=1
        )
    # Its own limit is a quarter of an hour.
    return fs.GcsFileSystem(retry_time_limit=datetime.timedelta(seconds=60), **arguments)


def open_az(fs, arguments):
    if not arguments.pop("anonymous"):
        return fs.AzureFileSystem(**arguments)
    # Nothing but a URI can say that no credentials are to be looked for.
    account, authority = arguments["account_name"], arguments.get("blob_storage_authority", ".blob.core.windows.net")
    host = account + authority if authority.startswith(".") else "%s@%s" % (account, authority)
    tls = "false" if arguments.get("blob_storage_scheme") == "http" else "true"
    return fs.FileSystem.from_uri("abfs://%s/container?credential_kind=anonymous&enable_tls=%s" % (host, tls))[0]


class Transfer:
    """One mount's way here or back."""

    def __init__(self, job):
        from concurrent.futures import ThreadPoolExecutor

        self.job = job
        if job["scheme"] == "s3" and "region" not in job["arguments"]:
            job["arguments"]["region"] = region_of(job["path"].partition("/")[0], job["arguments"])
        self.store = open_store(job["scheme"], job["arguments"])
        self.files, self.parts = ThreadPoolExecutor(FILES_AT_ONCE), ThreadPoolExecutor(PARTS_AT_ONCE)

    def in_parallel(self, do, items):
        """Call ``do`` with each, some at once. When nothing moves any more an alarm ends it all: the
        kernel's, since no thread runs while pyarrow waits for a store with Python's lock in hand."""
        self.count()
        results = list(self.files.map(do, items))
        signal.alarm(0)
        return results

    def count(self, size=0):
        """Something moved."""
        signal.alarm(math.ceil(self.job["stall"]))

    # Here

    def download(self):
        listing, base = self.listing()
        check_listing(listing)
        self.folder = Path(self.job["folder"])
        self.cache = MountCache(*self.job["cache"]) if self.job["cache"] else None
        for parent in {self.folder, *((self.folder / name).parent for name in listing)}:
            parent.mkdir(parents=True, exist_ok=True)
        if self.cache is None:
            return {
                "base": base,
                "bytes": sum(i.size for i in listing.values()),
                "files": dict(self.in_parallel(self.stage, listing.items())),
            }
        self.cache.count = self.count
        fetched = self.in_parallel(self.stage_kept, listing.items())
        self.cache.sweep()
        return {"base": base, "bytes": sum(fetched), "files": {}}

    def listing(self):
        """The objects by their names in the folder, and what those names are below in the store.

        A mount of a single object is a folder that holds it.
        """
        path = self.job["path"]
        bucket, _, prefix = path.partition("/")
        if prefix:
            info = self.store.get_file_info(path)
            if info.is_file:
                base, _, name = path.rpartition("/")
                return {name: info}, base
        from pyarrow.fs import FileSelector

        found = self.store.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
        listing = {info.path[len(path) + 1 :]: info for info in found if info.is_file and not info.path.endswith("/")}
        if not listing and self.lacks(bucket):
            raise FileNotFoundError("there is no bucket or container %r" % bucket)
        return listing, path

    def lacks(self, bucket):
        with contextlib.suppress(OSError):  # who may list a prefix may not ask this
            return self.store.get_file_info(bucket).type.name == "NotFound"
        return False

    def new_file(self, name):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.folder / name, flags, 0o644), "r+b", buffering=0)

    def stage(self, item):
        """Fetch an object that a cell may write; what its file is before the cell does."""
        name, info = item
        with self.new_file(name) as file:
            self.copy(info, file.fileno())
            return name, {"sha256": digest_of(file), "state": state_of(os.fstat(file.fileno()))}

    def stage_kept(self, item):
        """Have an object from the cache, or fetch it and keep it there; the bytes that were fetched."""
        name, info = item
        with self.new_file(name) as file:
            moved = self.fill(info, file.fileno())
            os.fchmod(file.fileno(), 0o444)
        return moved

    def fill(self, info, fd):
        if self.cache.copy(self.job["scope"], info, fd, self.version):
            return 0
        asked = time.time()
        self.cache.keep(self.job["scope"], info, self.copy(info, fd), fd, asked)
        return info.size

    def copy(self, info, fd):
        """Copy an object's one version, which is asked for before and after; that version."""
        os.ftruncate(fd, 0)
        # For a part, Google's client asks for everything that follows it.
        copy = self.copy_stream if self.job["scheme"] == "gs" else self.copy_parts
        version = copy(info, fd)
        if os.fstat(fd).st_size != info.size or self.version(info.path) != version:
            raise OSError("%s changed while it was read" % info.path)
        return version

    def copy_stream(self, info, fd):
        with self.store.open_input_stream(info.path, compression=None) as source:
            version, at = version_of(source), 0
            for data in iter(functools.partial(source.read, PART), b""):
                self.write(fd, data, at)
                at += len(data)
        return version

    def copy_parts(self, info, fd):
        with self.store.open_input_file(info.path) as source:
            version, starts = version_of(source), range(0, source.size(), PART)

            def copy_part(start):
                self.write(fd, source.read_at(PART, start), start)

            for _ in self.parts.map(copy_part, starts) if len(starts) > 1 else map(copy_part, starts):
                pass
        return version

    def write(self, fd, data, at):
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, at)
            view, at = view[written:], at + written
        self.count()

    def version(self, path):
        with self.store.open_input_file(path) as source:
            return version_of(source)

    # Back

    def upload(self):
        sent = self.in_parallel(self.send, sorted(self.job["upload"].items()))
        return {"files": [file for file in sent if file is not None]}

    def send(self, item):
        """Upload one file, unless it has the very content it came with."""
        name, before = item
        path = "%s/%s" % (self.job["folder"], name)
        with os.fdopen(open_below(self.job["root"], path, FILE_FLAGS), "rb", buffering=0) as file:
            if before is not None and digest_of(file) == before:
                return None
            file.seek(0)
            digest, size = hashlib.sha256(), 0
            target = self.store.open_output_stream("%s/%s" % (self.job["base"], name), compression=None)
            for data in iter(functools.partial(file.read, PART), b""):
                digest.update(data)
                target.write(data)
                size += len(data)
                self.count()
            target.close()  # only here: closing is what makes the object
        return {"path": name, "size": size, "sha256": digest.hexdigest()}


def region_of(bucket, arguments):
    """Where a bucket is. AWS answers any other region with a redirect, which pyarrow does not follow."""
    if "endpoint_override" not in arguments:
        import pyarrow.fs

        with contextlib.suppress(OSError):
            return pyarrow.fs.resolve_s3_region(bucket)
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def version_of(source):
    """What a store calls this version of an object, or None."""
    metadata = {name.lower(): value for name, value in (source.metadata() or {}).items()}
    version = metadata.get(b"etag") or metadata.get("etag") or metadata.get("generation")
    return version.decode(errors="replace").strip('"') if version else None


def digest_of(file):
    digest = hashlib.sha256()
    file.seek(0)
    for data in iter(functools.partial(file.read, CHUNK), b""):
        digest.update(data)
    return digest.hexdigest()


def check_listing(listing):
    """Refuse the names that would leave the folder, or cannot all be in one."""
    for name in listing:
        parts = name.split("/")
        if not is_inside(parts) or any(len(part.encode()) > 255 for part in parts):
            raise ValueError("the object %r cannot be a file in a folder" % name)
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in listing:
                raise ValueError("%r is an object and %r is another below it" % ("/".join(parts[:end]), name))


# ---------------------------------------------------------------------------------------
# Bundle: a run's folder as a tar, streamed
# ---------------------------------------------------------------------------------------


class Bundle:
    """An uncompressed tar (page: "Output bundle"): headers in memory, bodies from their files."""

    content_type, file_name = "application/x-tar", "bundle.tar"
    finalize = {"output_format": BUNDLE_FORMAT}

    def __init__(self):
        self.pieces = []

    def add(self, name, content):
        """Add a member; ``content`` is bytes or a FileSlice."""
        info = tarfile.TarInfo(name)
        info.size = content.size if isinstance(content, FileSlice) else len(content)
        info.mode = 0o644
        self.pieces += [info.tobuf(tarfile.PAX_FORMAT), content, b"\0" * (-info.size % tarfile.BLOCKSIZE)]

    def end(self):
        self.pieces.append(b"\0" * 2 * tarfile.BLOCKSIZE)

    @property
    def size(self):
        return body_size(self.pieces)

    def response(self):
        return Response(200, self.pieces, [("Content-Type", self.content_type), *PROTOCOL_HEADERS])


class TableOutput:
    """What a Core transform gives back instead of a Bundle: one Arrow IPC stream, and its console."""

    content_type, file_name = "application/vnd.apache.arrow.stream", "output.arrow"
    finalize = {}
    LOGS = 16 * 1024  # bytes; a header's size is limited, so the end of the console is sent

    def __init__(self, file, console):
        self.pieces, self.size = [file], file.size
        self.logs = "\n".join(filter(None, (console.tail(stream, self.LOGS // 2) for stream in Console.STREAMS)))

    def response(self):
        headers = [("Content-Type", self.content_type), PROTOCOL_HEADERS[0]]
        if self.logs:
            headers.append(("X-Strata-Logs", base64.b64encode(self.logs.encode()).decode()))
        return Response(200, self.pieces, headers)


def read_result(path):
    """The harness's ``result.json``, checked: the cell's code could have written it.

    None when there is none. Raises ValueError when it is not a result.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_RESULT + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    if len(data) > MAX_RESULT:
        raise ValueError("it is larger than %d bytes" % MAX_RESULT)
    try:
        result = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_result(result)
    return result


def check_result(result):
    shape = {"success": bool, "variables": dict, "displays": list, "mutation_warnings": list}
    if not isinstance(result, dict):
        raise ValueError("it is not an object")
    for key, kind in shape.items():
        if not isinstance(result.get(key), kind):
            raise ValueError("its %r is missing or of the wrong type" % key)
    entries = [*result["variables"].values(), *result["displays"]]
    if not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("a variable or display is not an object")


def bundle_of(result, outputs, console, extra, members=()):
    """The bundle of a finished cell: its manifest, its console and its files.

    ``outputs`` is the folder of the result's files, ``extra`` what the manifest says beside them,
    and ``members`` are more files, as (name, FileSlice).
    """
    files = OutputFiles(outputs)
    manifest = {
        "schema_version": BUNDLE_FORMAT,
        "success": result["success"],
        "variables": {name: files.entry(entry) for name, entry in result["variables"].items()},
        "displays": [files.entry(entry) for entry in result["displays"]],
        "stdout_file": "stdout.txt",
        "stderr_file": "stderr.txt",
        "mutation_warnings": result["mutation_warnings"],
        "error": result.get("error"),
        "traceback": result.get("traceback"),
        "build_env": result.get("build_env"),
        **extra,
    }
    bundle = Bundle()
    bundle.add("manifest.json", json.dumps(manifest).encode())
    for stream in Console.STREAMS:
        bundle.add(stream + ".txt", console.text(stream))
    for name, content in files.found.items():
        bundle.add("files/" + name, content)
    for name, content in members:
        bundle.add(name, content)
    bundle.end()
    return bundle


class OutputFiles:
    """The files a result names, each a regular file in the outputs folder and nothing else."""

    def __init__(self, folder):
        self.folder = folder
        self.found = {}  # file name -> FileSlice

    def entry(self, entry):
        """A variable's entry as the bundle lists it; an ``error`` where its file cannot be sent."""
        name = entry.get("file")
        if name is None:
            return entry
        try:
            if name not in self.found:
                self.found[name] = self.slice(name)
        except (OSError, ValueError, TypeError) as problem:
            return {
                "error": "its file %r cannot be sent: %s" % (name, problem),
                "type": str(entry.get("type", "unknown")),
            }
        return {**entry, "file": "files/" + name}

    def slice(self, name):
        if last_component(name) != name:
            raise ValueError("not a plain file name")
        path = os.path.join(self.folder, name)
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        return FileSlice(path, status.st_size)


# ---------------------------------------------------------------------------------------
# Metrics: what happened, counted, in Prometheus' text format
# ---------------------------------------------------------------------------------------


class Tally:
    """Counts of what has happened since the start."""

    # Seconds. A forked cell takes milliseconds, a locked environment minutes.
    BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
    OUTCOMES = ("ok", "raised", "timeout", "cancelled", "failed")
    PHASES = ("queued", "staging", "running", "answering")  # of a Run

    def __init__(self):
        self.lock = threading.Lock()
        self.runs = dict.fromkeys(self.OUTCOMES, 0)
        self.responses = collections.Counter()  # by status
        self.bytes = {"in": 0, "out": 0}
        self.buckets = {phase: [0] * (len(self.BOUNDS) + 1) for phase in self.PHASES}
        self.seconds = dict.fromkeys(self.PHASES, 0.0)

    def count_run(self, run):
        with self.lock:
            self.runs[run.outcome or "failed"] += 1
            self.bytes["in"] += run.bytes_in
            self.bytes["out"] += run.bytes_out
            for phase, spent in run.seconds.items():
                self.buckets[phase][bisect.bisect_left(self.BOUNDS, spent)] += 1
                self.seconds[phase] += spent

    def count_response(self, status):
        with self.lock:
            self.responses[status] += 1

    def lines(self):
        with self.lock:
            yield from family("runs_total", "counter", "Runs, by how they ended.", self.runs, "outcome")
            yield from family("responses_total", "counter", "Answered requests, by status.", self.responses, "status")
            yield from family("run_bytes_total", "counter", "Bytes of inputs and bundles.", self.bytes, "direction")
            yield from self.histogram()

    def histogram(self):
        name = "run_phase_seconds"
        yield from heading(name, "histogram", "How long runs were in each phase.")
        for phase, counts in self.buckets.items():
            totals = list(itertools.accumulate(counts))
            for bound, total in zip((*self.BOUNDS, "+Inf"), totals, strict=True):
                yield 'strata_worker_%s_bucket{phase="%s",le="%s"} %d' % (name, phase, bound, total)
            yield 'strata_worker_%s_sum{phase="%s"} %.6f' % (name, phase, self.seconds[phase])
            yield 'strata_worker_%s_count{phase="%s"} %d' % (name, phase, totals[-1])


def heading(name, kind, doc):
    return ["# HELP strata_worker_%s %s" % (name, doc), "# TYPE strata_worker_%s %s" % (name, kind)]


def family(name, kind, doc, values, label):
    """A metric with a value for each label."""
    return heading(name, kind, doc) + [
        'strata_worker_%s{%s="%s"} %s' % (name, label, key, value) for key, value in values.items()
    ]


def gauge(name, doc, value):
    """A metric with one value, or none where there is nothing to tell."""
    return [] if value is None else heading(name, "gauge", doc) + ["strata_worker_%s %s" % (name, value)]


# ---------------------------------------------------------------------------------------
# Execution: slots, and a run's life from admission to answer
# ---------------------------------------------------------------------------------------


class Slots:
    """How many cells at once, and which GPU each gets. Only a job waits for one; all others are refused."""

    def __init__(self, settings):
        self.max_concurrent = settings.max_concurrent
        self.gpu_slots = settings.gpu_slots
        visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
        count = settings.gpu_slots or 0
        self.gpus = collections.deque(visible[:count] if len(visible) >= count else map(str, range(count)))
        self.active = 0
        self.queue = []  # the runs that wait, first come first
        self.changed = threading.Condition()

    @property
    def free_gpus(self):
        return None if self.gpu_slots is None else len(self.gpus)

    @contextlib.contextmanager
    def taken(self):
        """Hold a slot; the GPU that comes with it, or None. WorkerError 503 when full."""
        with self.changed:
            shortage = self.shortage() or self.queue and "%d executions wait for a slot" % len(self.queue)
            if shortage:
                raise unavailable(shortage)
            gpu = self.take()
        with self.held(gpu):
            yield gpu

    @contextlib.contextmanager
    def awaited(self, run, limit):
        """Hold a slot as soon as it is this run's turn; WorkerError 503 after ``limit`` seconds."""
        with run.interruptible(self.wake), self.changed:
            self.queue.append(run)
            try:
                self.changed.wait_for(lambda: run.cancelled or self.is_turn_of(run), limit)
                run.check()
                if not self.is_turn_of(run):
                    raise unavailable("No slot was free for %g seconds (STRATA_WORKER_JOB_SECONDS)" % limit)
                gpu = self.take()
            finally:
                self.queue.remove(run)
                self.changed.notify_all()
        with self.held(gpu):
            yield gpu

    def is_turn_of(self, run):
        return self.queue[0] is run and not self.shortage()

    def wake(self):
        with self.changed:
            self.changed.notify_all()

    def position(self, run):
        """A waiting run's place in the queue, from 1; None if it does not wait."""
        with self.changed:
            return self.queue.index(run) + 1 if run in self.queue else None

    @contextlib.contextmanager
    def held(self, gpu):
        try:
            yield
        finally:
            with self.changed:
                self.active -= 1
                if gpu is not None:
                    self.gpus.append(gpu)
                self.changed.notify_all()

    def shortage(self):
        """Why there is no slot, or None when there is one."""
        if self.max_concurrent is not None and self.active >= self.max_concurrent:
            return "Worker is running %d of %d executions" % (self.active, self.max_concurrent)
        if self.gpu_slots is not None and not self.gpus:
            return "All %d GPU slots are in use" % self.gpu_slots
        return None

    def take(self):
        self.active += 1
        return self.gpus.popleft() if self.gpu_slots is not None else None


class Run:
    """One execution. ``phase`` is its state; every change of it is made under one lock.

        staging -> running -> answering -> done
           |          |           |
           +----------+-----------+--> cancelled, by anyone who knows the build id

    A job's run is "queued" before it has a slot. What can block in a phase hangs an interrupt
    on the run: cancelling calls it, once.
    """

    def __init__(self, folder, gpu):
        self.folder = folder
        self.gpu = gpu
        self.build_id = None
        self.phase = "staging"
        self.outcome, self.reason = None, None  # how it ended: a word for counting, and more for the log
        self.cancelled = False
        self.undelivered = False  # done, and its caller has yet to fetch the result
        self.interrupts = []
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.seconds = dict.fromkeys(Tally.PHASES, 0.0)
        self.bytes_in = self.bytes_out = 0
        self.trace = {}  # the W3C trace context it was asked for in
        self.mounts = None  # its Mounts

    def enter(self, phase):
        """Go on to the next phase; raises when the run was cancelled in this one."""
        with self.lock:
            now = time.monotonic()
            self.seconds[self.phase] += now - self.started
            self.started = now
            if self.cancelled:
                raise self.cancellation()
            self.phase = phase

    def check(self):
        with self.lock:
            if self.cancelled:
                raise self.cancellation()

    def cancellation(self):
        """Page: 409 before the harness starts; a cancelled running cell is one that failed."""
        status = 409 if self.phase in ("queued", "staging") else 500
        return run_failed("the execution was cancelled", status)

    def cancel(self):
        """Stop the run where it is; False if it is past stopping."""
        with self.lock:
            if self.phase == "done":
                return False
            self.cancelled = True
            interrupts, self.interrupts = self.interrupts, []
        for interrupt in interrupts:
            interrupt()
        return True

    @contextlib.contextmanager
    def interruptible(self, interrupt):
        """While the block runs, cancelling calls ``interrupt``; at once if it is cancelled already."""
        with self.lock:
            if self.cancelled:
                raise self.cancellation()
            self.interrupts.append(interrupt)
        try:
            yield
        finally:
            with self.lock:
                if interrupt in self.interrupts:
                    self.interrupts.remove(interrupt)

    def count_in(self, size):
        with self.lock:  # several downloads count at once
            self.bytes_in += size

    @contextlib.contextmanager
    def judged(self):
        """What the block raises is how the run ended."""
        try:
            yield
        except BaseException as problem:
            self.outcome, self.reason = outcome_of(problem)
            if self.cancelled:
                self.outcome = "cancelled"
            raise

    def finish(self):
        """The end of it, once; True when this was it."""
        with self.lock:
            if self.phase == "done":
                return False
            self.seconds[self.phase] += time.monotonic() - self.started
            self.phase = "done"
        known = {"build_id": self.build_id, "outcome": self.outcome, "reason": self.reason}
        known.update({name + "_seconds": round(spent, 6) for name, spent in self.seconds.items()})
        known.update(bytes_in=self.bytes_in, bytes_out=self.bytes_out)
        log.info(
            "run %s: %s, staging %.3f s, running %.3f s, answering %.3f s, %d bytes in, %d bytes out",
            self.build_id or "-",
            "%s (%s)" % (self.outcome, self.reason) if self.reason else self.outcome,
            *[self.seconds[phase] for phase in ("staging", "running", "answering")],
            self.bytes_in,
            self.bytes_out,
            extra={"known": known},
        )
        return True


def outcome_of(problem):
    """How a run ended that raised this: a word to count, and what the log says beside it."""
    if isinstance(problem, WorkerError):
        word = "timeout" if problem.status == 408 and problem.failed else "failed"
        word = "raised" if isinstance(problem, TransformRaised) else word
        return word, "%d: %s" % (problem.status, problem.message.partition("\n")[0])
    return "failed", "%s: %s" % (type(problem).__name__, problem)


class Runs:
    """The runs there are, begun one by one and found by their build id."""

    def __init__(self, settings):
        self.root = RunRoot(settings.run_root)
        self.slots = Slots(settings)
        self.tally = Tally()
        self.kept = set()  # every run whose folder there is
        self.draining = False
        self.idle_since = time.monotonic()
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def begun(self, gpu=None):
        """A Run with a folder, gone at the end; WorkerError 503 when the worker is stopping.

        It runs in a slot: one that its caller has taken, or one that it will wait for.
        """
        run = Run(self.root.new_folder(), gpu)
        with self.changed:
            if self.draining:
                remove_tree(run.folder)
                raise unavailable("The worker is stopping")
            self.kept.add(run)
        try:
            with run.judged():
                yield run
        finally:
            remove_tree(run.folder)
            self.finish(run)
            self.settle(lambda: self.kept.discard(run))

    def finish(self, run):
        if run.finish():
            self.tally.count_run(run)

    def settle(self, change):
        """Make a change that may leave the worker idle."""
        with self.changed:
            change()
            self.idle_since = time.monotonic()
            self.changed.notify_all()

    def active(self):
        """How many runs are under way: all but those that wait for a slot or to be fetched."""
        with self.changed:
            return sum(run.phase not in ("queued", "done") for run in self.kept)

    def are_over(self):
        return all(run.phase == "done" for run in self.kept)

    def are_delivered(self):
        """Does no result wait for its caller either?"""
        return not any(run.phase != "done" or run.undelivered for run in self.kept)

    def idle_seconds(self):
        with self.changed:
            return time.monotonic() - self.idle_since if self.are_delivered() else 0.0

    def cancel(self, build_id):
        """Cancel what runs under this id; False when nothing does."""
        with self.changed:
            found = [run for run in self.kept if run.build_id == build_id]
        return any([run.cancel() for run in found])

    def refuse_more(self):
        with self.changed:
            self.draining = True

    def wait_until(self, idle, timeout, hurry=None):
        """Wait until ``idle()``, ``timeout`` is over, or ``hurry`` is set; whether it is idle."""
        deadline = time.monotonic() + timeout
        with self.changed:
            while not idle() and not (hurry and hurry.is_set()) and time.monotonic() < deadline:
                self.changed.wait(0.05)
            return idle()

    def cancel_all(self):
        """Stop every run; how many there were."""
        with self.changed:
            kept = list(self.kept)
        return sum([run.cancel() for run in kept])

    def close(self):
        self.root.close()


class Form:
    """The parts of a form as they came: ``metadata`` in memory, every other one in a file."""

    def __init__(self, folder, boundary):
        self.folder = folder
        self.boundary = boundary
        self.metadata = None
        self.parts = []  # (Part, path)
        self.sink = None

    def receive(self, body, run):
        """Read the whole form; a cancel of the run ends that at once."""
        parser = MultipartParser(self.boundary)
        with run.interruptible(body.interrupt):
            try:
                for data in iter(body.read, b""):
                    run.count_in(len(data))
                    for event in parser.feed(data):
                        self.take(event, run)
            finally:
                self.end_part(run)
                run.check()
        parser.close()
        return self

    def take(self, event, run):
        if isinstance(event, Part):
            self.end_part(run)
            self.begin_part(event)
        else:
            self.sink.write(event)

    def begin_part(self, part):
        if part.name == "metadata":
            self.metadata = self.sink = BoundedBuffer(MAX_METADATA, "The metadata part")
        else:
            path = self.folder / str(len(self.parts))
            self.parts.append((part, path))
            self.sink = open(path, "xb", buffering=0)

    def end_part(self, run):
        if self.sink is not None:
            self.sink.close()
        if self.sink is self.metadata and run.build_id is None:
            self.name(run)

    def name(self, run):
        """Metadata comes first, so that a cancel can find a run whose inputs still come in."""
        with contextlib.suppress(WorkerError):  # said when the form is whole
            build_id = self.envelope().get("build_id")
            run.build_id = build_id if isinstance(build_id, str) else None

    def envelope(self):
        if self.metadata is None:
            raise bad_request("The form has no part named metadata")
        return parse_json_object(bytes(self.metadata.data), "metadata")

    def find(self, spec):
        """The file of an input: the part of its name, else of its recorded file name; the last such."""
        for wanted in (spec.name, spec.file):
            for part, path in reversed(self.parts):
                if part.name == wanted:
                    return path
        raise bad_request(
            "The form has no part for input %r: none is named %r or %r" % (spec.name, spec.name, spec.file)
        )


class BoundedBuffer:
    def __init__(self, limit, what):
        self.limit = limit
        self.what = what
        self.data = bytearray()

    def write(self, data):
        self.data += data
        if len(self.data) > self.limit:
            raise bad_request("%s is larger than %d bytes" % (self.what, self.limit))

    def close(self):
        pass


def execution_span(trace):
    """A ``worker.execute`` span under the caller's trace context, when opentelemetry is installed."""
    if not has_opentelemetry():
        return contextlib.nullcontext()
    from opentelemetry import propagate
    from opentelemetry.trace import get_tracer

    tracer = get_tracer("strata_worker", __version__)
    return tracer.start_as_current_span("worker.execute", context=propagate.extract(trace))


@functools.lru_cache(maxsize=None)
def has_opentelemetry():
    return importlib.util.find_spec("opentelemetry") is not None


class Executor:
    """Runs staged cells: writes the harness's manifest, starts it, waits, and reads what it left."""

    def __init__(self, settings, machine):
        self.settings = settings
        self.env = cell_environment(os.environ, settings.env_allowlist)
        self.machine = machine
        self.launcher = Launcher(settings, self.env)
        self.environments = Environments(settings, machine, self.launcher)
        self.keeper = ConsoleKeeper()
        self.folder = os.getcwd()  # where the modules of transforms may lie

    def environment(self, run, cell):
        """A context that gives a Lease on the cell's locked environment, None when it has none."""
        if cell.language == "r" and self.machine.rscript is None:
            raise run_failed("Rscript is not installed on this worker")
        if cell.environment is None:
            return contextlib.nullcontext()
        if cell.language == "r":
            return self.environments.r_library(run, cell.environment)
        return self.environments.python(run, cell.environment)

    def execute(self, run, cell, inputs, live=None):
        """Run a cell whose inputs are staged; its Bundle.

        ``inputs`` is what the harness is told of each, by name; ``live`` is called with the
        Console and the OutputFolders when the cell is about to start.
        """
        extra = {"hardware": self.machine.hardware}
        folders = OutputFolders(run, output_dir_names(cell.source))
        with contextlib.closing(Console(run.folder, self.settings.console_max_bytes)) as console:
            with self.environment(run, cell) as lease:
                launch = self.prepare(run, cell, inputs, folders, console, lease)
                if lease is not None:
                    extra["environment"] = lease.told()
                if live is not None:
                    live(console, folders)
                with self.keeper.keeping(console):
                    code = self.supervise(run, cell, launch, console, lease)
            result = self.result(run, code, console)
            run.outcome, run.reason = ("ok", None) if result["success"] else ("raised", "%.200s" % result.get("error"))
            if isinstance(cell, Transform):
                return table_of(result, run.folder / "outputs", console)
            if result["success"]:
                run.mounts.sync(console)
            said, members = folders.collect(console)
            return bundle_of(result, run.folder / "outputs", console, {**extra, **run.mounts.said(), **said}, members)

    def prepare(self, run, cell, inputs, folders, console, lease):
        for name in ("outputs", "work"):
            (run.folder / name).mkdir()
        manifest = run.folder / "manifest.json"
        manifest.write_text(
            json.dumps(
                {
                    "source": cell.source,
                    "inputs": inputs,
                    "mutation_defines": cell.mutation_defines,
                    "tables": cell.tables,
                    "mounts": run.mounts.stage(),
                    "output_dirs": folders.told(),
                    "transform": self.told_of(cell),
                }
            )
        )
        env = {**self.env, **cell.env} if lease is None else activated(self.env, cell.env, lease, cell.language)
        if cell.language == "r" and "TMPDIR" not in cell.env:
            # Every R makes a folder there, which one that is killed leaves behind.
            env["TMPDIR"] = str(run.folder / "tmp")
            (run.folder / "tmp").mkdir()
        env.update((name.upper(), value) for name, value in run.trace.items())
        if run.gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = run.gpu  # over the caller's: the slot is what was admitted
        return Launch(
            None, str(manifest), str(run.folder / "work"), env, list(console.fds.values()), self.settings.cell_memory_mb
        )

    def told_of(self, cell):
        """The harness's ``transform``: None for an ordinary cell."""
        if isinstance(cell, Transform):
            return {"function": cell.function, "params": cell.params, "folder": self.folder}
        return None

    def start(self, cell, launch, lease):
        if cell.language == "python":
            return self.launcher.python(launch, cell.source, lease.python if lease else sys.executable)
        command = [self.machine.rscript, "--no-echo", "--no-restore", sibling("harness.R"), launch.manifest]
        return self.launcher.exec(dataclasses.replace(launch, argv=command))

    def supervise(self, run, cell, launch, console, lease):
        """Start the cell and see it to its end, whichever that is; its exit code."""
        run.enter("running")
        with contextlib.closing(self.start(cell, launch, lease)) as process, run.interruptible(process.kill):
            code = process.wait(cell.timeout)
        if code is None:
            raise run_failed("the cell exceeded its timeout of %g seconds%s" % (cell.timeout, said(console)), 408)
        run.enter("answering")  # raises if it was cancelled
        return code

    def result(self, run, code, console):
        try:
            result = read_result(run.folder / "result.json")
        except (ValueError, OSError) as problem:
            raise run_failed("the cell left no readable result: %s%s" % (problem, said(console))) from None
        if result is None:
            why = "the cell's process %s before it could report" % ending(code)
            if shutil.disk_usage(run.folder.parent).free < FULL_DISK:
                why += ": No space left on the disk of %s" % run.folder.parent
            raise run_failed(why + said(console))
        self.explain_memory(result)
        return result

    def explain_memory(self, result):
        """A cell that met the limit on its memory is told that it was the limit."""
        limit, error = self.settings.cell_memory_mb, result.get("error")
        if limit and isinstance(error, str) and "MemoryError" in error:
            result["error"] = "%s (STRATA_WORKER_CELL_MEMORY_MB limits it to %d MiB)" % (error, limit)

    def stop(self):
        self.launcher.stop()
        self.keeper.stop()


def table_of(result, outputs, console):
    """The TableOutput of a finished Core transform; TransformError when it raised."""
    if not result["success"]:
        where = (result.get("traceback") or "").rstrip().rpartition("\n")[0]
        code = str(result["error"]).partition(":")[0]
        raise TransformRaised(500, "%s\n%s" % (result["error"], where), code)
    try:
        file = OutputFiles(outputs).slice(result["variables"]["output"]["file"])
    except (LookupError, TypeError, ValueError, OSError) as problem:
        raise TransformError(500, "the transform's output is not there: %s" % problem) from None
    return TableOutput(file, console)


class Pull:
    """The pull model's way of one run: download, execute, upload, finalize."""

    def __init__(self, fetcher, executor, run, manifest):
        self.fetcher, self.executor, self.run, self.manifest = fetcher, executor, run, manifest
        self.settings = fetcher.settings
        self.live = self.stream = None

    def run_it(self):
        """The body of the 200 answer."""
        for what, url in self.manifest.all_urls():
            self.fetcher.judge(url, what)
        inputs = self.stage()
        try:
            bundle = self.executor.execute(self.run, self.manifest.cell, inputs, self.go_live)
            answer = {}
            in_parallel(self.run, [lambda halt: answer.update(finalize=self.publish(halt, bundle))])
        finally:
            for beside in filter(None, (self.live, self.stream)):
                beside.close()
        return {
            "success": True,
            "build_id": self.run.build_id,
            "byte_size": bundle.size,
            "protocol_version": MANIFEST_FORMAT,
            **answer,
        }

    def go_live(self, console, folders):
        if self.manifest.log_url:
            self.live = LiveConsole(self.fetcher, self.manifest.log_url, console)
        if self.manifest.output_file_url and folders.names:
            self.stream = folders.stream = FolderStream(
                self.fetcher,
                self.manifest.output_file_url,
                folders,
                self.settings.output_dir_poll_seconds,
            )

    def stage(self):
        """Download what the cell's inputs need, each artifact once; what the harness is told."""
        folder = self.run.folder / "inputs"
        folder.mkdir()
        specs = [spec for outer in self.manifest.cell.inputs for spec in (outer, *outer.injected.values())]
        names = {}
        for spec in specs:
            names.setdefault(spec.uri, spec.name)
        paths = {uri: folder / str(number) for number, uri in enumerate(names)}
        in_parallel(
            self.run,
            [
                functools.partial(self.download, name, self.manifest.urls[uri], paths[uri])
                for uri, name in names.items()
            ],
        )
        return {
            spec.name: staged(self.run, spec, paths[spec.uri], lambda inner: paths[inner.uri])
            for spec in self.manifest.cell.inputs
        }

    def download(self, name, url, path, halt):
        what = "input %r" % name
        try:
            answer = self.fetcher.download(halt, what, url, path, self.settings.max_input_bytes, self.run.count_in)
        except FetchError as problem:
            raise WorkerError(502, "Downloading %s failed: %s" % (what, problem)) from None
        if answer.status != 200:
            raise WorkerError(502, "Downloading %s failed: its URL answered %d" % (what, answer.status))

    def publish(self, halt, bundle):
        """Upload the output and finalize; what finalize answered."""
        if self.live is not None:
            self.live.end()
        limit = self.manifest.max_bytes
        if limit is not None and bundle.size > limit:
            raise WorkerError(
                502, "The output bundle has %d bytes, more than output.max_bytes (%d)" % (bundle.size, limit)
            )
        self.send(halt, "Uploading the output bundle", *self.upload(bundle))
        self.run.bytes_out = bundle.size
        body = json.dumps(bundle.finalize).encode()
        answer = self.send(
            halt,
            "Finalizing the build",
            "POST",
            self.manifest.finalize_url,
            {"Content-Type": "application/json"},
            [body],
        )
        try:
            return json.loads(answer.body)
        except ValueError:
            return None

    def upload(self, bundle):
        """Method, URL, headers and body of the upload, in whichever way the store takes it."""
        url, kind = self.manifest.output_url, {"Content-Type": bundle.content_type}
        if self.manifest.fields is not None:
            content_type, body = presigned_form(self.manifest.fields, bundle)
            return "POST", url, {"Content-Type": content_type}, body
        if self.manifest.put:
            return "PUT", url, {**kind, **self.manifest.headers}, bundle.pieces
        return "POST", url, kind, bundle.pieces

    def send(self, halt, what, *request):
        try:
            answer = self.fetcher.send(halt, *request)
        except FetchError as problem:
            raise WorkerError(502, "%s failed: %s" % (what, problem)) from None
        if not 200 <= answer.status < 300:
            raise WorkerError(502, "%s failed: its URL answered %d%s" % (what, answer.status, answer.detail()))
        return answer


def presigned_form(fields, bundle):
    """A presigned POST's Content-Type and body: every field in order, then the file.

    The stores read up to the file and ignore what follows, so it is last.
    """
    parts = [(name, None, None, [str(value).encode()]) for name, value in fields.items()]
    return form_body([*parts, ("file", bundle.file_name, bundle.content_type, bundle.pieces)])


def form_body(parts):
    """The Content-Type and body of a form of (name, file name, content type, pieces)."""
    boundary = "strata-" + os.urandom(16).hex()
    body = []
    for name, file, content_type, pieces in parts:
        head = '--%s\r\nContent-Disposition: form-data; name="%s"' % (boundary, quoted(name))
        head += '; filename="%s"' % quoted(file) if file else ""
        head += "\r\nContent-Type: " + content_type if content_type else ""
        body += [head.encode() + b"\r\n\r\n", *pieces, b"\r\n"]
    return "multipart/form-data; boundary=" + boundary, [*body, b"--%s--\r\n" % boundary.encode()]


def quoted(name):
    """A field's name inside quotes, as browsers write it."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def ending(code):
    if code >= 0:
        return "exited with code %d" % code
    try:
        return "was killed by %s" % signal.Signals(-code).name
    except ValueError:
        return "was killed by signal %d" % -code


def said(console):
    """The end of a cell's console, for the error of a run that has no bundle to carry it."""
    tails = [(stream, console.tail(stream)) for stream in ("stdout", "stderr")]
    return "".join("\n--- the end of its %s ---\n%s" % (stream, tail) for stream, tail in tails if tail)


# ---------------------------------------------------------------------------------------
# Jobs: executions whose callers come back for the result
# ---------------------------------------------------------------------------------------
#
# Page: "Asynchronous execution (202)". A job is a run in a thread of its own. Its inputs
# have come in before it is accepted; it waits for a slot where another would be refused;
# and its result stays in the run's folder until it is fetched, or too old.


def answered(what, make):
    """The response that ``make`` gives, or that its error becomes."""
    try:
        return make()
    except WorkerError as error:
        return error_response(error)
    except Disconnected:
        raise
    except OSError as problem:
        log.warning("%s: %s", what, problem)
        return error_response(run_failed("the worker's own disk or system failed: %s" % problem))
    except Exception as problem:
        log.exception("%s failed", what)
        return error_response(run_failed("a fault in the worker: %s: %s" % (type(problem).__name__, problem)))


class Job:
    """One accepted execution, under an id that nobody can guess."""

    STATES = {"queued": "queued", "staging": "starting"}  # of a run's phases; all others are running

    def __init__(self, jobs, run, resources):
        self.id = os.urandom(16).hex()
        self.jobs, self.run, self.resources = jobs, run, resources
        self.response = None  # once it is done
        self.expires = math.inf
        self.readers = 0  # requests that are sending its result now

    def start(self, make):
        """Run ``make``, which gives the Response, as soon as a slot is free."""
        self.run.enter("queued")
        self.run.undelivered = True
        thread = threading.Thread(target=self.work, args=(make,), name="strata-job", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            raise unavailable("The worker has no thread to spare") from None

    def wait(self, make):
        """Run ``make`` in its turn, here: for a caller that cannot come back."""
        self.run.enter("queued")
        try:
            return self.attempt(make)
        finally:
            self.jobs.runs.finish(self.run)

    def work(self, make):
        response = answered("job %s" % self.id, functools.partial(self.attempt, make))
        self.jobs.runs.finish(self.run)
        self.jobs.finished(self, response)

    def attempt(self, make):
        with self.run.judged(), self.jobs.runs.slots.awaited(self.run, self.jobs.seconds) as gpu:
            self.run.gpu = gpu
            self.run.enter("staging")
            with execution_span(self.run.trace):
                return make()

    def told(self):
        """What its URL answers now."""
        if self.response is None:
            return json_response(200, self.progress())
        self.jobs.lend(self)
        if ("Content-Type", "application/json") in self.response.headers:
            return json_response(200, self.ending(), close=functools.partial(self.jobs.take_back, self))
        return Response(200, self.response.body, self.response.headers, functools.partial(self.jobs.take_back, self))

    def progress(self):
        position = self.jobs.runs.slots.position(self.run)
        if position is None:
            return {"state": self.STATES.get(self.run.phase, "running")}
        before = "Next" if position == 1 else "Behind %d cell%s" % (position - 1, "s" * (position > 2))
        return {"state": "queued", "position": position, "detail": before + " for a slot on this worker."}

    def ending(self):
        """A finished pull, or a failure of either transport. A pushed job's success is its bundle."""
        status, content = self.response.status, json.loads(b"".join(self.response.body))
        if status == 200:
            return {"state": "finished", "status_code": status, "result": content}
        error = next(filter(None, map(content.get, ("error", "detail", "error_message"))), "")
        return {"state": "failed", "status_code": status, "error": error}


class Jobs:
    """The jobs there are, by id: bounded in number, each for a time."""

    FETCHED_SECONDS = 30  # kept once it has been sent: whether it arrived, only its caller knows

    def __init__(self, settings, runs):
        self.limit, self.seconds = settings.max_jobs, settings.job_seconds
        self.runs = runs
        self.jobs = {}
        self.changed = threading.Condition()
        self.stopped = False
        threading.Thread(target=self.sweep, name="strata-jobs", daemon=True).start()

    @contextlib.contextmanager
    def opened(self):
        """A new Job, to be started in the block, and gone if that raises; WorkerError 503 when there are too many."""
        with contextlib.ExitStack() as stack:
            job = Job(self, stack.enter_context(self.runs.begun()), stack)
            with self.changed:
                if len(self.jobs) >= self.limit:
                    raise unavailable(
                        "Worker keeps %d jobs of %d (STRATA_WORKER_MAX_JOBS)" % (len(self.jobs), self.limit)
                    )
                self.jobs[job.id] = job
            stack.callback(self.forget, job)
            yield job
            job.resources = stack.pop_all()

    def forget(self, job):
        with self.changed:
            del self.jobs[job.id]

    def find(self, job_id):
        with self.changed:
            if job_id in self.jobs:
                return self.jobs[job_id]
        raise WorkerError(404, "There is no job %s: a result is kept for %g seconds" % (job_id[:100], self.seconds))

    def finished(self, job, response):
        with self.changed:
            job.response = response
            job.expires = time.monotonic() + self.seconds
            self.changed.notify_all()

    def lend(self, job):
        """A request is sending the result: it is not removed meanwhile."""
        with self.changed:
            job.readers += 1

    def take_back(self, job):
        with self.changed:
            job.readers -= 1
            job.expires = min(job.expires, time.monotonic() + self.FETCHED_SECONDS)
            self.changed.notify_all()
        self.runs.settle(lambda: setattr(job.run, "undelivered", False))

    def sweep(self):
        """The thread that removes what is too old."""
        while True:
            with self.changed:
                if self.stopped:
                    return
                old = [job for job in self.jobs.values() if job.expires <= time.monotonic() and not job.readers]
                if not old:
                    soonest = min((job.expires for job in self.jobs.values() if not job.readers), default=math.inf)
                    self.changed.wait(min(3600, max(0, soonest - time.monotonic())))
            for job in old:
                job.resources.close()

    def stop(self):
        """Remove what is left; nothing runs any more."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
            left = list(self.jobs.values())
        for job in left:
            job.resources.close()


# ---------------------------------------------------------------------------------------
# Routes: which request is whose
# ---------------------------------------------------------------------------------------


class Routes:
    """Answers requests, wherever they come from."""

    def __init__(self, settings, runs, executor, machine, fetcher, jobs=None):
        self.settings = settings
        self.runs = runs
        self.jobs = jobs  # where this worker takes them
        self.transforms = {PYTHON_SCRIPT: None, **dict(settings.transforms)}
        self.parse_execute = functools.partial(parse_execute, self.transforms)
        self.executor = executor
        self.machine = machine
        self.fetcher = fetcher
        self.started = time.monotonic()
        self.table = [
            ("GET", r"/health", self.health),
            ("GET", r"/metrics", self.metrics),
            ("POST", r"/v1/execute", self.push_job if jobs else functools.partial(self.push, self.parse_execute)),
            ("POST", r"/v1/notebook-execute", functools.partial(self.push, parse_notebook_execute)),
            ("POST", r"/v1/execute-manifest", self.pull_job if jobs else self.pull),
            ("POST", r"/execute", self.pull_for_pool),
            ("POST", r"/v1/executions/([^/]+)/cancel", self.cancel),
            ("POST", r"/v1/mount-cache/cached", self.cached),
        ]
        if jobs:
            self.table += [("GET", r"/v1/jobs/([^/]+)", self.job), ("POST", r"/v1/hints", self.hint)]

    def answer(self, request):
        response = answered("%s %s" % (request.method, request.path), functools.partial(self.route, request))
        self.runs.tally.count_response(response.status)
        return response

    def route(self, request):
        allowed = []
        for method, pattern, handler in self.table:
            match = re.fullmatch(pattern, request.path)
            if match is None:
                continue
            if request.method == method or request.method == "HEAD" and method == "GET":
                if request.path != "/health":
                    self.authorize(request.headers.get("authorization"))
                return handler(request, *map(urllib.parse.unquote, match.groups()))
            allowed += [method, "HEAD"] if method == "GET" else [method]
        if allowed:
            raise WorkerError(
                405, "%s does not take %s" % (request.path, request.method), headers=[("Allow", ", ".join(allowed))]
            )
        raise WorkerError(404, "There is nothing at %s; cells are posted to /v1/execute" % request.path[:200])

    def authorize(self, header):
        if self.settings.token is None:
            return
        scheme, _, token = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise self.unauthorized("Missing or malformed Authorization header (expected Bearer token)")
        # As bytes: compare_digest refuses text that is not ASCII, and a header is Latin-1.
        if not hmac.compare_digest(token.strip().encode("latin-1"), self.settings.token.encode()):
            raise self.unauthorized("Invalid worker token")

    @staticmethod
    def unauthorized(message):
        return WorkerError(401, message, headers=[("WWW-Authenticate", "Bearer")])

    def health(self, request):
        slots = self.runs.slots
        return json_response(
            200,
            {
                "status": "healthy",
                "capabilities": {
                    "protocol_versions": [PROTOCOL],
                    "transform_refs": [TRANSFORM_REF, *self.transforms],
                    "features": self.features(),
                },
                "version": __version__,
                "uptime_seconds": round(time.monotonic() - self.started, 3),
                "launch_id": self.settings.launch_id,
                "active_executions": self.runs.active(),
                "max_concurrent": slots.max_concurrent,
                "gpu_slots": slots.gpu_slots,
                "free_gpu_slots": slots.free_gpus,
                "hardware": self.machine.hardware,
            },
        )

    def features(self):
        return {
            "notebook_protocol_version": NOTEBOOK_PROTOCOL,
            "output_format": BUNDLE_FORMAT,
            "pull_model": True,
            "cancel": True,
            "locked_environments": self.machine.locks_python,
            "locked_r_environments": self.machine.has_renv,
            "languages": self.machine.languages,
            "output_dirs": True,
            "folder_inputs": True,
            "mount_cache_probe": True,
            "jobs": self.jobs is not None,
        }

    def push(self, parse, request):
        """``POST /v1/execute`` and ``/v1/notebook-execute``: inputs in the form, bundle in the answer."""
        check_protocol(request.headers)
        boundary = form_boundary(request.headers.get("content-type"))
        with contextlib.ExitStack() as stack:
            # The slot is free before the answer goes out: whoever has read it may ask again at once.
            with self.runs.slots.taken() as gpu:
                run = stack.enter_context(self.runs.begun(gpu))
                run.trace = trace_context(request.headers)
                stack.enter_context(execution_span(run.trace))
                response = self.run_pushed(run, *self.receive(run, parse, boundary, request.body))
            response.close = stack.pop_all().close
            return response

    def push_job(self, request):
        """``POST /v1/execute`` as a job: accepted once its inputs are here."""
        check_protocol(request.headers)
        boundary = form_boundary(request.headers.get("content-type"))
        with self.jobs.opened() as job:
            job.run.trace = trace_context(request.headers)
            cell, inputs = self.receive(job.run, self.parse_execute, boundary, request.body)
            work = functools.partial(self.run_pushed, job.run, cell, inputs)
            if not isinstance(cell, Transform):
                job.start(work)
                return self.accepted(job)
            response = job.wait(work)  # Core does not poll
        response.close = job.resources.close
        return response

    def receive(self, run, parse, boundary, body):
        """Stage what is pushed: the Cell, and what the harness is told of its inputs."""
        folder = run.folder / "inputs"
        folder.mkdir()
        form = Form(folder, boundary).receive(body, run)
        cell = self.admit(run, parse(form.envelope()))
        with core_errors(isinstance(cell, Transform)):
            return cell, {spec.name: staged(run, spec, form.find(spec), form.find) for spec in cell.inputs}

    def admit(self, run, cell):
        """The cell is known: so is what the run is called and may take."""
        run.build_id = cell.build_id
        run.mounts = Mounts(self.settings, run, cell.mounts)
        if isinstance(cell, Transform):
            cell.timeout = self.settings.transform_seconds
        return cell

    def run_pushed(self, run, cell, inputs):
        with core_errors(isinstance(cell, Transform)):
            response = self.executor.execute(run, cell, inputs).response()
        run.bytes_out = response.length
        return response

    def pull(self, request):
        """``POST /v1/execute-manifest`` and ``/execute``: inputs and bundle go by signed URLs."""
        check_protocol(request.headers)
        with self.runs.slots.taken() as gpu, self.runs.begun(gpu) as run:
            work = self.take_manifest(run, request)
            with execution_span(run.trace):
                return work()

    def pull_job(self, request):
        """``POST /v1/execute-manifest`` as a job."""
        check_protocol(request.headers)
        with self.jobs.opened() as job:
            job.start(self.take_manifest(job.run, request))
        return self.accepted(job)

    def take_manifest(self, run, request):
        """Read a manifest; what runs it, and gives the Response."""
        manifest = parse_manifest(self.transforms, read_json_object(request.body, "The manifest"))
        run.trace = trace_context(request.headers) or manifest.trace
        self.admit(run, manifest.cell)
        return functools.partial(self.run_pulled, Pull(self.fetcher, self.executor, run, manifest))

    def run_pulled(self, pull):
        with core_errors(isinstance(pull.manifest.cell, Transform)):
            return json_response(200, pull.run_it())

    @staticmethod
    def accepted(job):
        return json_response(202, {"job_url": "/v1/jobs/" + job.id})

    def job(self, request, job_id):
        """``GET /v1/jobs/{id}``: where the job is, and at its end what a synchronous worker had answered."""
        return self.jobs.find(job_id).told()

    def hint(self, request):
        """``POST /v1/hints``: a run may come soon. This worker is up already."""
        read_json_object(request.body, "The hint")
        return json_response(202, {"accepted": True})

    def metrics(self, request):
        """``GET /metrics``, for Prometheus."""
        lines = [*self.runs.tally.lines(), *self.gauges()]
        body = "".join(line + "\n" for line in lines).encode()
        return Response(200, [body], [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")])

    def gauges(self):
        slots = self.runs.slots
        yield from family("info", "gauge", "The worker's version.", {__version__: 1}, "version")
        yield from gauge("uptime_seconds", "Since the start.", round(time.monotonic() - self.started, 3))
        yield from gauge("slots", "Cells at once.", slots.max_concurrent)
        yield from gauge("slots_in_use", "Cells that hold a slot.", slots.active)
        yield from gauge("gpu_slots", "GPUs to hand out.", slots.gpu_slots)
        yield from gauge("gpu_slots_free", "GPUs that no cell has.", slots.free_gpus)
        yield from gauge("queued", "Jobs that wait for a slot.", len(slots.queue))
        yield from gauge("jobs", "Jobs that are kept.", len(self.jobs.jobs) if self.jobs else None)
        yield from gauge("environments", "Locked environments on disk.", self.executor.environments.count())
        yield from gauge("fork_servers", "Fork servers.", len(self.executor.launcher.servers))
        yield from gauge("cells", "Processes of cells.", self.executor.launcher.cells())

    def pull_for_pool(self, request):
        """``POST /execute``: a pool's way to the same. A proxy between may end a request that is silent."""
        period = self.settings.heartbeat_seconds
        if not period:
            return self.pull(request)
        body = BytesBody(read_body(request.body, "The manifest"))
        whole = Request(request.method, request.path, request.query, request.headers, body)
        work = Background(lambda: answered("POST /execute", lambda: self.pull(whole)))
        return work.wait(period) or Streamed(200, heartbeat(work, period), HEARTBEAT_HEADERS)

    def cached(self, request):
        """``POST /v1/mount-cache/cached``: how much of each mount a server lists is here already."""
        return json_response(
            200, {"cached_bytes": cached_bytes(self.settings, read_json_object(request.body, "The probe"))}
        )

    def cancel(self, request, build_id):
        return json_response(200, {"build_id": build_id, "cancelled": self.runs.cancel(build_id)})


def read_body(body, what):
    buffer = BoundedBuffer(MAX_METADATA, what)
    for data in iter(body.read, b""):
        buffer.write(data)
    return bytes(buffer.data)


def read_json_object(body, what):
    return parse_json_object(read_body(body, what), what)


class BytesBody:
    """A body that is here already."""

    def __init__(self, data):
        self.data = data

    def read(self):
        data, self.data = self.data, b""
        return data

    def interrupt(self):
        self.data = b""


class Background:
    """A response that a thread of its own makes; ``make`` raises nothing."""

    def __init__(self, make):
        self.make, self.response = make, None
        self.thread = threading.Thread(target=self.run, name="strata-background", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # the system has no thread to give
            raise unavailable("The worker has no thread to spare") from None

    def run(self):
        self.response = self.make()

    def wait(self, seconds):
        """The response, or None while there is none after so many seconds."""
        self.thread.join(seconds)
        return self.response


HEARTBEAT_HEADERS = [("Content-Type", "application/json"), ("X-Strata-Status-In-Body", "1")]


def heartbeat(work, period):
    """The body of an answer that starts before its status is known: spaces, which JSON ignores, then both."""
    while work.wait(period) is None:
        yield b" "
    content = b"".join(work.response.body).decode()
    yield json.dumps({"status_code": work.response.status, "content": content}).encode()


def trace_context(headers):
    found = {name: headers.get(name) for name in TRACE_FIELDS}
    return {name: value for name, value in found.items() if value} if found["traceparent"] else {}


def check_protocol(headers):
    version = headers.get("x-strata-executor-protocol", PROTOCOL)
    check_version("X-Strata-Executor-Protocol", version, PROTOCOL)


def staged(run, spec, path, find):
    """What the harness is told of an input whose file is at ``path``."""
    if spec.content_type == "file/path":
        path = named(path, spec.file)
    if spec.content_type == "dir/tar":
        path = unpacked(run, spec, path)
    told = {"content_type": spec.content_type, "file": "/".join(path.parts[path.parts.index("inputs") :])}
    if spec.injected:
        told["injected"] = {name: staged(run, inner, find(inner), find) for name, inner in spec.injected.items()}
    return told


def unpacked(run, spec, path):
    """The folder of a ``dir/tar`` input, named after its file."""
    folder = Path(str(path) + ".d", spec.file.removesuffix(".tar"))
    try:
        if not folder.exists():  # two inputs may name one part
            unpack_folder(path, folder, run.check)
    except ValueError as problem:
        raise bad_request("input %r: %s" % (spec.name, problem)) from None
    return folder


def named(path, name):
    """The same file under the name its cell is to see, in a folder where that name is free."""
    folder = Path(str(path) + ".d")
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):  # two inputs may name one part
        os.link(path, folder / name)
    return folder / name


# ---------------------------------------------------------------------------------------
# Relay: the same requests, over a WebSocket that the worker opens
# ---------------------------------------------------------------------------------------
#
# A worker that nobody can reach dials out (--connect), and requests come back that way.
# First RFC 6455 as a client needs it, without I/O: h11 reads the handshake, and the frames
# are read here. wsproto would be a fourth dependency, and a copied file without it a worker
# without a relay; a client that negotiates no extension needs a hundred lines of it.
# Then the socket: one thread reads it, and each request has a thread of its own, as over HTTP.


SUBPROTOCOL = "strata-worker-connect.v1"
MAX_MESSAGE = 4 + CHUNK  # a stream id and a chunk
FRAME = CHUNK // 4  # of an answer: what stays in a processor's cache goes out half as fast again
LAST_STREAM = 2**32 - 1
BODY_CHUNKS = 4  # of a body, waiting for their reader
PING_SECONDS = 20  # of silence; a NAT forgets a quiet connection, and tells nobody
LONGEST_DIAL_WAIT = 60

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


class RelayRefused(Exception):
    """The relay does not want this worker; asking again would get the same answer."""


class FrameError(Exception):
    """The relay broke RFC 6455. ``code`` is what the Close frame says of it (7.4.1)."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Handshake:
    """The request that opens a WebSocket, and what may be made of its answer (RFC 6455, 4.1)."""

    def __init__(self, url, token):
        self.protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self.url, self.token = urllib.parse.urlsplit(url), token
        self.key = base64.b64encode(os.urandom(16))
        self.refusal = None
        self.detail = b""

    def request(self):
        target = (self.url.path or "/") + ("?" + self.url.query if self.url.query else "")
        headers = [
            ("Host", self.url.netloc),
            ("User-Agent", "strata-worker/" + __version__),
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", self.key),
            ("Sec-WebSocket-Protocol", SUBPROTOCOL),
        ]
        if self.token:
            headers.append(("Authorization", "Bearer " + self.token))
        request = h11.Request(method="GET", target=target, headers=headers)
        return self.protocol.send(request) + self.protocol.send(h11.EndOfMessage())

    def feed(self, data):
        """What came after the answer (the first frames), or None for "more, please".

        Raises RelayRefused for an answer that is final, Disconnected for any other.
        """
        try:
            self.protocol.receive_data(data)
            for event in iter(self.protocol.next_event, h11.NEED_DATA):
                if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                    self.check(Headers((name.decode(), value.decode("latin-1")) for name, value in event.headers))
                    return self.protocol.trailing_data[0]
                self.gather_refusal(event)
        except h11.RemoteProtocolError as problem:
            raise self.refusal or Disconnected("its handshake is not HTTP: %s" % problem) from None
        return None

    def gather_refusal(self, event):
        """Keep the answer's status and the start of its body, where a relay may say why."""
        if isinstance(event, h11.Response):
            final = 400 <= event.status_code < 500 and event.status_code not in (408, 429)
            self.refusal = (RelayRefused if final else Disconnected)(
                "it answered %d %s" % (event.status_code, event.reason.decode("latin-1"))
            )
        elif isinstance(event, h11.Data):
            self.detail += event.data
        if isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)) or len(self.detail) > 300:
            detail = self.detail[:300].decode("utf-8", "replace").strip()
            raise type(self.refusal)(("%s: %r" if detail else "%s%s") % (self.refusal, detail))

    def check(self, headers):
        digest = hashlib.sha1(self.key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        if headers.get("sec-websocket-accept") != base64.b64encode(digest).decode():
            raise Disconnected("its Sec-WebSocket-Accept does not answer our key")
        if headers.tokens("upgrade") != ["websocket"] or "upgrade" not in headers.tokens("connection"):
            raise Disconnected("it switched to another protocol than WebSocket")
        if headers.get("sec-websocket-extensions"):
            raise Disconnected("it selected an extension that was not offered")
        if headers.get("sec-websocket-protocol") != SUBPROTOCOL:
            raise RelayRefused("it did not select the subprotocol " + SUBPROTOCOL)


class FrameReader:
    """Frames from a server to messages (RFC 6455, 5.2 to 5.6), fed in pieces of any size.

    ``next`` gives ``(opcode, payload)``, TEXT as str, control frames in between the fragments
    of a message; or None for "more, please". Raises FrameError.
    """

    def __init__(self):
        self.buffer = bytearray()
        self.opcode = None  # of the message whose fragments are gathered
        self.fragments = bytearray()

    def feed(self, data):
        self.buffer += data

    def next(self):
        for final, opcode, payload in iter(self.take_frame, None):
            if opcode == CLOSE:
                check_close(payload)
            if opcode >= CLOSE:
                return opcode, payload
            if final and opcode != CONTINUATION:
                return opcode, text_or_bytes(opcode, payload)  # the usual case, not copied again
            self.opcode = opcode or self.opcode
            self.fragments += payload
            if final:
                opcode, self.opcode = self.opcode, None
                payload, self.fragments = bytes(self.fragments), bytearray()
                return opcode, text_or_bytes(opcode, payload)
        return None

    def take_frame(self):
        if len(self.buffer) < 2:
            return None
        first, second = self.buffer[:2]
        final, opcode, size = first >= 0x80, first & 0x0F, second & 0x7F
        self.check_kind(final, opcode, first & 0x70 or second & 0x80, size)
        width = {126: 2, 127: 8}.get(size, 0)
        if len(self.buffer) < 2 + width:
            return None
        if width:
            size = int.from_bytes(self.buffer[2 : 2 + width], "big")
        self.check_size(size, width)
        end = 2 + width + size
        if len(self.buffer) < end:
            return None
        with memoryview(self.buffer) as view:
            payload = bytes(view[2 + width : end])
        del self.buffer[:end]
        return final, opcode, payload

    def check_kind(self, final, opcode, forbidden, size):
        if forbidden:
            raise FrameError(1002, "a reserved bit is set, or a server's frame is masked")
        if opcode not in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG):
            raise FrameError(1002, "opcode %d is reserved" % opcode)
        if opcode >= CLOSE and (size > 125 or not final):
            raise FrameError(1002, "a control frame is fragmented or longer than 125 bytes")
        if opcode < CLOSE and (opcode == CONTINUATION) != (self.opcode is not None):
            raise FrameError(1002, "a fragment is out of order")

    def check_size(self, size, width):
        if size < {0: 0, 2: 126, 8: 65536}[width]:
            raise FrameError(1002, "a length is not in its shortest form")
        if len(self.fragments) + size > MAX_MESSAGE:
            raise FrameError(1009, "a message is longer than %d bytes" % MAX_MESSAGE)


def text_or_bytes(opcode, payload):
    try:
        return payload.decode() if opcode == TEXT else payload
    except UnicodeDecodeError:
        raise FrameError(1007, "a text message is not UTF-8") from None


def check_close(payload):
    code = int.from_bytes(payload[:2], "big")
    if payload and not (1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999):
        raise FrameError(1002, "a Close frame holds no valid code")
    text_or_bytes(TEXT, payload[2:])


def frame(opcode, payload):
    """A whole frame as a client sends it: masked, with a new key each time.

    A server cannot tell a key of zeros, which would cost nothing. But RFC 6455, 10.3 wants one
    that nobody can predict: what a cell sends must not look like HTTP to a proxy on the way.
    """
    size, key = len(payload), os.urandom(4)
    short = size if size < 126 else 126 if size < 65536 else 127
    length = size.to_bytes({126: 2, 127: 8}.get(short, 0), "big") if short > 125 else b""
    return b"".join((bytes((0x80 | opcode, 0x80 | short)), length, key, *masked(payload, key)))


def masked(data, key, block=16384):
    """``data`` XORed with the key, as numbers of 16 KiB: 600 MB/s, a hundred times as fast as byte by byte."""
    pattern = int.from_bytes(key * (block // 4), "big")
    for start in range(0, len(data), block):
        piece = data[start : start + block]
        spare = 8 * (block - len(piece))
        yield (int.from_bytes(piece, "big") ^ pattern >> spare).to_bytes(len(piece), "big")


class Link:
    """An open WebSocket. One thread receives, any may send; Disconnected once it is over.

    The socket does not block, and waiting is done outside the lock of its calls: an SSL
    object must not be in two threads at once, and a reader waits most of the time.
    """

    def __init__(self, sock, received, stall_seconds):
        sock.setblocking(False)
        self.sock, self.stall_seconds = sock, stall_seconds
        self.calling = threading.Lock()
        self.sending = threading.Lock()  # a frame goes out whole
        self.parted = False  # a Close is the last frame there may be
        self.pings = collections.deque(maxlen=1)  # the last one's payload, not yet answered
        self.reader = FrameReader()
        self.reader.feed(received)

    def receive(self):
        """The next message, or a Close. FrameError too."""
        while True:
            opcode, payload = self.reader.next() or (None, self.read())
            if opcode is None:
                self.reader.feed(payload)
            elif opcode == PING:
                self.pings.append(payload)
                self.answer_ping()
            elif opcode != PONG:
                return opcode, payload

    def read(self):
        """What has arrived. A silent relay is pinged once, and given up if it stays silent."""
        for last in (False, True):
            data = self.move(functools.partial(self.sock.recv, CHUNK // 4), selectors.EVENT_READ, PING_SECONDS)
            if data:
                return data
            if data == b"":
                raise Disconnected("it hung up")
            if not last:
                self.send(PING, b"")
        raise Disconnected("it did not answer a ping in %d seconds" % PING_SECONDS)

    def send(self, opcode, payload):
        data = frame(opcode, payload)  # masked outside the lock, where another's frame may go out
        with self.sending:
            if self.parted:
                raise Disconnected("the link is closing")
            self.write(data)
        self.answer_ping()

    def answer_ping(self):
        """Send the pong that is due, or leave it to whoever is sending: the reader never waits."""
        while self.pings and not self.parted and self.sending.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):  # another was quicker
                    self.write(frame(PONG, self.pings.popleft()))
            finally:
                self.sending.release()

    def write(self, data):
        view = memoryview(data)
        while view:
            sent = self.move(functools.partial(self.sock.send, view), selectors.EVENT_WRITE, self.stall_seconds)
            if sent is None:
                self.cut()
                raise Disconnected("it took nothing for %g seconds" % self.stall_seconds)
            view = view[sent:]

    def move(self, call, event, patience):
        """What ``call`` gives once the socket is ready for it; None after ``patience`` seconds."""
        try:
            while True:
                try:
                    with self.calling:
                        return call()
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                    needed = {ssl.SSLWantReadError: selectors.EVENT_READ, ssl.SSLWantWriteError: selectors.EVENT_WRITE}
                    if not is_ready(self.sock, needed.get(type(wanted), event), patience):
                        return None
        except (OSError, ValueError) as problem:  # ValueError: closed while we waited
            self.cut()  # a frame may be half written
            raise Disconnected(str(problem)) from None

    def part(self, code):
        """Send a Close, unless another's frame is stuck; the relay's own Close ends the link."""
        if self.sending.acquire(timeout=LINGER_SECONDS):
            self.parted = True
            with contextlib.suppress(Disconnected):
                self.write(frame(CLOSE, code.to_bytes(2, "big")))
            self.sending.release()

    def cut(self):
        """Wake whoever waits for the socket. SSLSocket's own shutdown would go on in the clear."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self):
        self.cut()
        with self.sending:
            self.sock.close()


def is_ready(sock, event, patience):
    with selectors.DefaultSelector() as selector:
        selector.register(sock, event)
        return bool(selector.select(patience))


class Stream:
    """A relayed request. Its body, which the socket's thread puts in and its own reads, and its answer."""

    def __init__(self, link, number):
        self.link, self.number = link, number
        self.chunks = collections.deque()
        self.body = "open"  # then "whole", or "lost"
        self.changed = threading.Condition()
        self.gone = False

    def put(self, data):
        """Add to the body; waits for its reader, and so the socket is not read, and the relay waits."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.chunks) < BODY_CHUNKS or self.body != "open")
            if self.body == "open" and data:
                self.chunks.append(data)
                self.changed.notify_all()

    def end(self):
        """The body is complete."""
        self.settle("whole")

    def interrupt(self):
        """Nobody wants the body: wakes its reader, and lets go of the socket."""
        self.settle("lost")

    def lose(self):
        """The caller has gone: what is missing of the body will not come."""
        self.gone = True
        self.settle("lost")

    def settle(self, body):
        with self.changed:
            if self.body == "open":
                self.body = body
                if body == "lost":
                    self.chunks.clear()
                self.changed.notify_all()

    def read(self):
        with self.changed:
            self.changed.wait_for(lambda: self.chunks or self.body != "open", self.link.stall_seconds)
            if self.chunks:
                self.changed.notify_all()
                return self.chunks.popleft()
            if self.body == "open":
                raise WorkerError(408, "The request's body stopped for %g seconds" % self.link.stall_seconds)
            if self.body == "lost":
                raise Disconnected("the body ends early")
            return b""

    def check(self):
        if self.gone:
            raise Disconnected("its caller has gone")

    def tell(self, kind, **fields):
        self.check()
        self.link.send(TEXT, json.dumps({"type": kind, "id": self.number, **fields}).encode())

    def send(self, data):
        self.check()
        self.link.send(BINARY, self.number.to_bytes(4, "big") + data)


def relayed_request(fields, body):
    """The Request of a request frame; WorkerError 400 where a field is not what it should be."""
    try:
        headers = [(name, value) for name, value in fields.get("headers") or ()]
        texts = [fields["method"], fields["path"], fields.get("query") or "", *sum(headers, ())]
        for text in texts:
            text.encode("latin-1")  # what a header on a socket could hold
    except (LookupError, TypeError, ValueError, AttributeError):
        raise bad_request("The relay's request frame is malformed") from None
    return Request(*texts[:3], Headers(headers), body)


def regrouped(pieces, size):
    """The same bytes in pieces of ``size``: a tar's small ones are not worth a frame each."""
    pending = bytearray()
    for piece in pieces:
        pending += piece
        while len(pending) >= size:
            yield pending[:size]
            del pending[:size]
    if pending:
        yield pending


class Relay:
    """Answers what a relay forwards, and dials again when it goes; stands in for a Server.

    ``refused`` is called with the reason, once, when dialling again would be no use.
    """

    def __init__(self, answer, url, token, stall_seconds, refused):
        self.answer, self.refused = answer, refused
        self.url, self.token, self.stall_seconds = url, token, stall_seconds
        self.link = None
        self.streams = {}  # of this link, by number
        self.busy = 0  # requests with a thread, of this link or an earlier one
        self.lock = threading.Lock()  # over these two
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run, name="strata-relay", daemon=True)

    def start(self):
        self.thread.start()

    def stop_accepting(self):
        """Refuse new requests and dial no more; answers go on."""
        self.stopping.set()

    def stop(self):
        """Hang up; call once nothing is being answered any more."""
        self.stop_accepting()
        if self.link is not None:
            self.link.part(1001)
            self.thread.join(LINGER_SECONDS)
            self.link.cut()
        self.thread.join(LINGER_SECONDS)

    # What follows runs in the relay's own thread.

    def run(self):
        waits = dial_waits()
        while not self.stopping.is_set():
            try:
                with contextlib.closing(self.dial()) as self.link:
                    waits = dial_waits()
                    log.info("connected to the relay at %s", self.shown)
                    self.serve(self.link)
            except RelayRefused as refusal:
                self.refused("the relay at %s refused this worker: %s" % (self.shown, refusal))
                return
            except (OSError, ValueError, Disconnected, FrameError) as problem:
                log.warning("the relay at %s is not there: %s", self.shown, problem)
            except Exception:
                log.exception("the relay's thread met a fault")
            if not self.stopping.is_set():
                self.stopping.wait(next(waits))

    @property
    def shown(self):
        """The URL without its query, which may hold a secret."""
        return self.url.partition("?")[0]

    def dial(self):
        """A new Link. OSError, ValueError (of a host name), Disconnected or RelayRefused."""
        url = urllib.parse.urlsplit(self.url)
        port = url.port or {"ws": 80, "wss": 443}[url.scheme]
        sock = connect_to(socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if url.scheme == "wss":
                sock = tls_context().wrap_socket(sock, server_hostname=url.hostname)
            handshake, received = Handshake(self.url, self.token), None
            sock.sendall(handshake.request())
            while received is None:
                received = handshake.feed(sock.recv(CHUNK // 16))
        except BaseException:
            sock.close()
            raise
        return Link(sock, received, self.stall_seconds)

    def serve(self, link):
        """Take what the relay sends until it closes. Requests that run then go on to their end."""
        try:
            while True:
                opcode, payload = link.receive()
                if opcode == CLOSE:
                    link.part(1000)
                    raise Disconnected("it closed the connection (%d)" % int.from_bytes(payload[:2], "big"))
                self.take_chunk(payload) if opcode == BINARY else self.take_text(link, payload)
        except FrameError as error:
            link.part(error.code)
            raise
        finally:
            for stream in list(self.streams.values()):
                self.leave(stream)
                stream.lose()

    def take_chunk(self, payload):
        stream = self.streams.get(int.from_bytes(payload[:4], "big"))
        if stream is not None:
            stream.put(payload[4:])

    def take_text(self, link, text):
        try:
            fields = json.loads(text)
            kind, number = fields["type"], fields["id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return
        if type(number) is not int or not 1 <= number <= LAST_STREAM:
            return
        stream = self.streams.get(number)
        if kind == "request" and stream is None:
            self.begin(Stream(link, number), fields)
        elif kind == "end" and stream is not None:
            stream.end()
        elif kind == "abort" and stream is not None:
            self.leave(stream)
            stream.lose()

    def begin(self, stream, fields):
        """Give the request a thread, or refuse it. It cannot wait for one, as it could over HTTP:
        its body would hold up the socket, and on it the request that cancels another."""
        short = str(fields.get("path")).endswith(("/health", "/cancel"))
        thread = threading.Thread(target=self.respond, args=(stream, fields), name="strata-request", daemon=True)
        with self.lock, contextlib.suppress(RuntimeError):  # the system may have no thread to give
            if not self.stopping.is_set() and self.busy < MAX_REQUESTS + (RESERVE if short else 0):
                self.streams[stream.number] = stream
                thread.start()
                self.busy += 1
                return
        self.leave(stream)
        error = unavailable("The worker is busy or stopping")
        self.reply(stream, error_response(error))

    def leave(self, stream):
        with self.lock:
            if self.streams.get(stream.number) is stream:
                del self.streams[stream.number]

    # What follows runs in the request's own thread.

    def respond(self, stream, fields):
        try:
            response = self.response(stream, fields)
            stream.interrupt()  # what was not read must not hold up the socket
            self.reply(stream, response, fields.get("method") == "HEAD")
        except Disconnected as gone:
            log.debug("a relayed request: %s", gone)
        finally:
            self.leave(stream)
            with self.lock:
                self.busy -= 1

    def response(self, stream, fields):
        try:
            return self.answer(relayed_request(fields, stream))
        except Disconnected:
            raise
        except WorkerError as error:
            return error_response(error)
        except Exception:
            log.exception("a relayed request failed")
            return error_response(run_failed("a fault in the worker"))

    def reply(self, stream, response, bodiless=False):
        with contextlib.closing(response):
            headers = [*response.framing(), *response.headers]
            stream.tell("response", status=response.status, headers=headers)
            whole = bodiless or self.send_body(stream, response)
        self.leave(stream)  # before the relay hears of the end: then the number is free again
        stream.tell("end" if whole else "abort")

    @staticmethod
    def send_body(stream, response):
        """True once all is sent, False when a file is not any more what it was."""
        sent = 0
        try:
            for data in regrouped(read_pieces(response.body, stream), FRAME):
                stream.send(data)
                sent += len(data)
        except OSError as problem:
            log.warning("a relayed answer broke off: %s", problem)
        return response.length in (None, sent)


def dial_waits():
    """Seconds between attempts: doubling from 1 to 60, the second half of each random, so
    that a relay that comes back is not met by all its workers at once."""
    wait = 1
    while True:
        yield wait / 2 + random.uniform(0, wait / 2)
        wait = min(2 * wait, LONGEST_DIAL_WAIT)


# ---------------------------------------------------------------------------------------
# Worker: all of the above, started and stopped together
# ---------------------------------------------------------------------------------------


class Worker:
    """A worker on threads of this process. Use it as a context manager::

        with Worker(port=0, max_concurrent=2) as worker:
            requests.get(worker.url + "/health")

    Keywords are the fields of Settings; what is not given comes from the environment.
    Raises ValueError for a bad setting and OSError when the address is not to be had.
    """

    def __init__(self, **given):
        unknown = set(given) - {field.name for field in dataclasses.fields(Settings)}
        if unknown:
            raise TypeError("Worker has no setting named %s" % ", ".join(sorted(unknown)))
        self.settings = Settings.load(os.environ, given)
        if bool(self.settings.tls_cert) != bool(self.settings.tls_key):
            raise ValueError("--tls-cert and --tls-key need each other")
        self.tls = self.read_certificate()
        self.hurry = threading.Event()  # set to end a stop() that waits for cells
        self.over = threading.Event()  # set when it is time to stop
        self.failure = None  # why a worker that nobody stopped is of no more use
        self.url = None  # none through a relay, where nothing listens

    def start(self):
        for name in HARNESSES:
            sibling(name)  # said at start, not by the first cell
        self.check_transforms()
        with contextlib.ExitStack() as stack:
            # Before anything slow: a port that is taken is said at once.
            listener = None if self.settings.connect else self.listen(stack)
            answer = self.open(stack).answer
            self.server = self.serve(answer, listener)
            self.server.start()
            stack.callback(self.server.stop)
            self.resources = stack.pop_all()
        return self

    def check_transforms(self):
        """A module that is not there is said at start; to import it is the cells' business."""
        for ref, function in self.settings.transforms:
            package = function.partition(":")[0].partition(".")[0]
            if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
                raise ValueError("--transform %s=%s: there is no module %s here" % (ref, function, package))

    def listen(self, stack):
        if self.settings.uds:
            self.url = "unix:" + os.path.abspath(self.settings.uds)
            return stack.enter_context(listen_unix(self.settings.uds))
        listener = stack.enter_context(listen(self.settings.bind_host, self.settings.port))
        scheme = "https" if self.settings.tls_cert else "http"
        self.url = "%s://%s:%d" % (scheme, *url_host(*listener.getsockname()[:2]))
        return listener

    def open(self, stack):
        """Everything but the way in; what has to be closed goes on the stack."""
        self.machine = Machine()
        self.runs = Runs(self.settings)
        stack.callback(self.runs.close)
        self.executor = Executor(self.settings, self.machine)
        stack.callback(self.executor.stop)
        jobs = Jobs(self.settings, self.runs) if self.settings.jobs else None
        if jobs:
            stack.callback(jobs.stop)
        return Routes(self.settings, self.runs, self.executor, self.machine, Fetcher(self.settings), jobs)

    def serve(self, answer, listener):
        settings = self.settings
        if listener is None:
            return Relay(answer, settings.connect, settings.connect_token, settings.stall_seconds, self.fail)
        return Server(answer, listener, settings.stall_seconds, self.tls)

    def read_certificate(self):
        settings = self.settings
        return server_tls(settings.tls_cert, settings.tls_key) if settings.tls_cert else None

    def reload(self):
        """Read the certificate again; connections that are open keep the one they have."""
        try:
            self.server.tls = self.read_certificate()
            log.info("read %s again", self.settings.tls_cert)
        except ValueError as problem:
            log.error("the old certificate stays: %s", problem)

    def fail(self, reason):
        log.error("%s", reason)
        self.failure = reason
        self.over.set()

    @property
    def way_in(self):
        return "listening on " + self.url if self.url else "dialling " + self.server.shown

    def wait(self):
        """Wait until it is time to stop; the seconds that cells may go on."""
        limit = self.settings.exit_when_idle
        while not self.over.wait(max(0.0, limit - self.runs.idle_seconds()) if limit else None):
            if self.runs.idle_seconds() >= limit:
                log.info("no run for %g seconds", limit)
                self.over.set()
                return math.inf  # whoever comes at this very moment is not to suffer from it
        return self.settings.drain_seconds

    def stop(self, drain_seconds=None):
        """Refuse new runs, let cells finish for ``drain_seconds``, stop those that have not."""
        self.runs.refuse_more()
        if not self.settings.jobs:  # whose callers have yet to come back for what they did
            self.server.stop_accepting()
        patience = self.settings.drain_seconds if drain_seconds is None else drain_seconds
        if not self.runs.wait_until(self.runs.are_delivered, patience, self.hurry):
            log.warning("stopping %d cells that are still running", self.runs.cancel_all())
            self.runs.wait_until(self.runs.are_over, KILL_SECONDS)
        self.resources.close()

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc_info):
        self.stop()


def wsgi_app(**given):
    """The worker as a WSGI application, for a platform that owns the port::

        waitress-serve --call strata_worker:wsgi_app

    Keywords are the fields of Settings; those of listening are ignored. For one process with
    threads: a cancel has to find its run. The server reads each body whole before a cell starts,
    so its own limit on bodies is the worker's.
    """
    worker = Worker(**given)
    stack = contextlib.ExitStack()
    answer = worker.open(stack).answer
    atexit.register(stack.close)
    hide_secrets(os.environ)
    return functools.partial(wsgi_call, answer)


def wsgi_call(answer, environ, start_response):
    try:
        response = answer(wsgi_request(environ))
    except Disconnected:
        response = error_response(bad_request("The request's body ends early"))
    status = "%d %s" % (response.status, reason(response.status) or "-")
    start_response(status, [*response.framing(), *response.headers])
    return WSGIBody(response, environ["REQUEST_METHOD"] == "HEAD")


def wsgi_request(environ):
    """The Request of an environ, whose path was decoded: it is encoded again, for the routes to decode."""
    fields = [(name[5:].replace("_", "-"), value) for name, value in environ.items() if name.startswith("HTTP_")]
    fields += [
        (name.replace("_", "-"), environ[name]) for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)
    ]
    path = urllib.parse.quote(environ.get("PATH_INFO", "").encode("latin-1"), safe="/:@!$&'()*+,;=~")
    return Request(
        environ["REQUEST_METHOD"], path, environ.get("QUERY_STRING", ""), Headers(fields), WSGIInput(environ)
    )


class WSGIInput:
    """A body as wsgi.input gives it: so many bytes, or to the end where the server ends it itself."""

    def __init__(self, environ):
        self.stream = environ["wsgi.input"]
        ended = environ.get("wsgi.input_terminated")
        self.remaining = int(environ.get("CONTENT_LENGTH") or (sys.maxsize if ended else 0))
        self.sized = bool(environ.get("CONTENT_LENGTH"))
        self.interrupted = False

    def interrupt(self):
        self.interrupted = True

    def read(self):
        try:
            piece = self.stream.read(min(CHUNK, self.remaining)) if self.remaining else b""
        except OSError as problem:
            raise Disconnected(str(problem)) from None
        if self.interrupted or not piece and self.remaining and self.sized:
            raise Disconnected("the body ends early")
        self.remaining -= len(piece)
        return piece


class WSGIBody:
    """A response's pieces as a WSGI server takes them; it calls close() at the end of either kind."""

    def __init__(self, response, bodiless):
        self.close = response.close
        self.pieces = regrouped(() if bodiless else read_pieces(response.body, Halt()), CHUNK // 4)

    def __iter__(self):
        return map(bytes, self.pieces)


def url_host(host, port):
    """An address as a URL says it: a wildcard is reached on loopback, IPv6 goes in brackets."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return ("[%s]" % host if address.version == 6 else host), port


def is_loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---------------------------------------------------------------------------------------
# Tools: a check of this machine, one file run as a cell, one file to copy
# ---------------------------------------------------------------------------------------
#
# What a person runs who has no notebook at hand. Cells go the whole way, over HTTP to a
# worker in this process, so that what works here works for a server.


class Trial:
    """A worker of this process's own, on a free port of loopback, that nobody else may use."""

    def __init__(self, **given):
        for field in dataclasses.fields(Settings):  # where and how to listen is not for this one
            if field.metadata["flag"] and field.name not in ("max_concurrent", "gpu_slots", "log_level"):
                os.environ.pop(field.metadata["env"], None)
        self.token = os.urandom(16).hex()
        self.worker = Worker(host="127.0.0.1", port=0, token=self.token, **given)

    def __enter__(self):
        set_up_log(dataclasses.replace(self.worker.settings, log_level="warning"))
        hide_secrets(os.environ)
        self.worker.start()
        return self

    def __exit__(self, *exc_info):
        self.worker.stop(0 if exc_info[0] else KILL_SECONDS)

    def run(self, source, folder, inputs=(), **params):
        """Run a cell; its bundle's manifest, its files unpacked in ``folder``. WorkerError as the worker answers.

        ``inputs`` are (name, format, path).
        """
        entries = [{"name": name, "format": kind, "file": path.name} for name, kind, path in inputs]
        transform = {"ref": TRANSFORM_REF, "params": {"source": source, **params}}
        metadata = {"protocol_version": PROTOCOL, "transform": transform, "inputs": entries}
        parts = [("metadata", "metadata.json", "application/json", [json.dumps(metadata).encode()])]
        parts += [(name, path.name, None, [FileSlice(str(path), path.stat().st_size)]) for name, _, path in inputs]
        self.post(*form_body(parts), folder.with_name(folder.name + ".tar"))
        unpack_folder(folder.with_name(folder.name + ".tar"), folder, lambda: None)
        folder.with_name(folder.name + ".tar").unlink()
        return json.loads((folder / "manifest.json").read_text())

    def post(self, content_type, body, bundle):
        host, port = self.worker.server.address
        headers = {"Content-Type": content_type, "Content-Length": str(body_size(body))}
        headers["Authorization"] = "Bearer " + self.token
        with contextlib.closing(http.client.HTTPConnection(host, port)) as connection:
            connection.request("POST", "/v1/execute", read_pieces(body, Halt()), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                told = json.loads(answer.read())
                raise WorkerError(answer.status, told.get("detail") or told.get("error"))
            with open(bundle, "xb") as file:
                shutil.copyfileobj(answer, file, CHUNK)


def print_table(rows):
    """Rows of text, each column as wide as its widest."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join("%-*s" % pair for pair in zip(widths, row, strict=True)).rstrip())


# One file, run as a cell.

BUNDLE_NAMES = ("manifest.json", "stdout.txt", "stderr.txt", "files", "dirs")


def run_tool(argv):
    """``strata-worker run CELL``: the console and a table of what the cell left; 0 if it succeeded."""
    parser = argparse.ArgumentParser(prog="strata-worker run", description="Run one file as a cell.")
    parser.add_argument("cell", type=Path, help="the cell's source: .py, or .R")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=parse_input_file,
        metavar="NAME=FILE",
        help="a variable of the cell; its format is told by the file's extension (%s), and any other "
        "file is a Path. A folder is one, too" % " ".join(sorted(EXTENSIONS.values())),
    )
    parser.add_argument("--env", action="append", default=[], type=parse_variable, metavar="NAME=VALUE")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder for the bundle's files")
    options = parser.parse_args(argv)
    there = [name for name in BUNDLE_NAMES if options.out and (options.out / name).exists()]
    if there:
        parser.error("--out %s has a %s already" % (options.out, there[0]))
    try:
        source = options.cell.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        parser.error("%s cannot be read: %s" % (options.cell, problem))
    return run_file(options, source)


def run_file(options, source):
    params = {"timeout_seconds": options.timeout, "env": dict(options.env)}
    if options.cell.suffix.lower() == ".r":
        params["language"] = "r"
    with tempfile.TemporaryDirectory(prefix="strata-run-") as folder, Trial() as trial:
        unpacked, inputs = Path(folder, "bundle"), []
        try:
            for number, entry in enumerate(options.input):
                inputs.append(as_sent(*entry, Path(folder, str(number))))
            manifest = trial.run(source, unpacked, inputs, **params)
        except (WorkerError, OSError) as problem:
            print("strata-worker: %s" % problem, file=sys.stderr)
            return 1
        show_run(manifest, unpacked)
        if options.out:
            shutil.copytree(unpacked, options.out, dirs_exist_ok=True)
    return 0 if manifest["success"] else 1


def parse_input_file(text):
    name, _, path = text.partition("=")
    if not name.isidentifier() or not path or not Path(path).exists():
        raise argparse.ArgumentTypeError("%r is not NAME=FILE with a file or folder that is there" % text)
    return name, Path(path)


def parse_variable(text):
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError("%r is not NAME=VALUE" % text)
    return name, value


def as_sent(name, path, scratch):
    """An input as it is sent: (name, format, file). A folder becomes a tar, an Arrow file a stream."""
    scratch.mkdir()
    if path.is_dir():
        tar = scratch / (path.resolve().name + ".dir.tar")
        with tarfile.open(tar, "w") as folder:
            folder.add(path, arcname=".", filter=lambda member: member if member.isreg() or member.isdir() else None)
        return name, "dir/tar", tar
    kinds = [kind for kind, extension in EXTENSIONS.items() if path.name.endswith(extension) and kind != "image/png"]
    kind = kinds[0] if kinds else "file/path"
    if kind == "arrow/ipc":
        with open(path, "rb") as file:
            if file.read(6) == b"ARROW1":
                return name, kind, arrow_stream(path, scratch / path.name)
    return name, kind, path


def arrow_stream(path, target):
    """A copy of an Arrow (Feather) file as the stream that cells are given."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise OSError("%s is an Arrow file, not a stream; pyarrow is needed to read it" % path) from None
    with pyarrow.ipc.open_file(str(path)) as file, pyarrow.ipc.new_stream(str(target), file.schema) as stream:
        for number in range(file.num_record_batches):
            stream.write_batch(file.get_batch(number))
    return target


def show_run(manifest, folder):
    for stream, name in ((sys.stdout, "stdout_file"), (sys.stderr, "stderr_file")):
        with open(folder / manifest[name], encoding="utf-8", newline="") as text:
            shutil.copyfileobj(text, stream)
    if not manifest["success"]:
        print(manifest["traceback"] or manifest["error"], file=sys.stderr)
    rows = [result_row(name, entry) for name, entry in manifest["variables"].items()]
    rows += [
        ("%s/%s" % (name, path), "file", "%d" % size, "")
        for name, files in manifest.get("output_dirs", {}).items()
        for path, size in files.items()
    ]
    if rows:
        print_table([("variable", "content type", "bytes", "value"), *rows])


def result_row(name, entry):
    if "error" in entry:
        return name, "-", "-", "cannot be kept: %s" % entry["error"]
    shape = "%d rows: %s" % (entry["rows"], ", ".join(map(str, entry.get("columns", ())))) if "rows" in entry else None
    preview = entry.get("preview", "")
    value = shape or (preview if isinstance(preview, str) else json.dumps(preview, ensure_ascii=False, default=str))
    value = " ".join(value.split())
    return name, entry["content_type"], str(entry.get("bytes", "")), value if len(value) < 60 else value[:57] + "..."


# A check of this machine.


@dataclasses.dataclass(frozen=True)
class Probe:
    """A cell that shows whether something works here, and what to do if it does not."""

    what: str
    source: str
    content_type: str  # that the variable shall come back in
    advice: str = ""
    needed: bool = False
    language: str = "python"
    variable: str = "x"


PROBES = (
    Probe("Python cells", "x = 1 + 1", "json/object", "see the error", needed=True),
    Probe("pickled values", "x = {1, 2}", "pickle/object", "see the error", needed=True),
    Probe("modules", "import json as x", "module/import", "see the error"),
    Probe("Markdown", "Markdown('*x*')", "text/markdown", "see the error", variable="_"),
    Probe("functions of a cell", "x = lambda: 1", "pickle/object", "pip install cloudpickle"),
    Probe("Arrow tables", "import pyarrow\nx = pyarrow.table({'a': [1]})", "arrow/ipc", "pip install pyarrow"),
    Probe("numpy arrays", "import numpy\nx = numpy.arange(3)", "arrow/ipc", "pip install numpy pyarrow"),
    Probe(
        "pandas frames", "import pandas\nx = pandas.DataFrame({'a': [1]})", "arrow/ipc", "pip install pandas pyarrow"
    ),
    Probe(
        "polars frames", "import polars\nx = polars.DataFrame({'a': [1]})", "arrow/ipc", "pip install polars pyarrow"
    ),
    Probe("torch tensors", "import torch\nx = torch.zeros(3)", "arrow/ipc", "pip install torch pyarrow"),
    Probe(
        "plots",
        "import matplotlib.pyplot as p\np.plot([1, 2])\np.show()",
        "image/png",
        "pip install matplotlib",
        variable="_",
    ),
    Probe("mounts", "from pyarrow import fs\nx = [fs.S3FileSystem.__name__]", "json/object", "pip install pyarrow"),
    Probe("R cells", "x <- 1", "json/object", "install R, and its package jsonlite", language="r"),
    Probe("R objects", "x <- factor('a')", "application/x-r-rds", "install R, and its package jsonlite", language="r"),
    Probe(
        "R data frames",
        "x <- data.frame(a = 1)",
        "arrow/ipc",
        'R: install.packages("arrow"), or "nanoarrow"',
        language="r",
    ),
)


def check_tool(argv):
    """``strata-worker check``: what works here, what does not, and what to do; 0 if what is needed works."""
    parser = argparse.ArgumentParser(
        prog="strata-worker check", description="Say what this machine can run, by running it. Exit code 0 or 1."
    )
    parser.parse_args(argv)
    rows, missing = [("what", "works", "")], 0
    with tempfile.TemporaryDirectory(prefix="strata-check-") as folder, Trial(env_root=folder + "/envs") as trial:
        for number, probe in enumerate(PROBES):
            problem = failing(trial, probe, Path(folder, str(number)))
            missing += bool(problem and probe.needed)
            rows.append(verdict(probe.what, problem is None, "", "%s (%s)" % (probe.advice, problem)))
        rows += [locked_row(trial, Path(folder, "locked")), *machine_rows(trial.worker.machine)]
        rows += disk_rows(Settings.load(os.environ))
    print_table(rows)
    print("\n" + ("Something that every cell needs does not work." if missing else "This machine can run cells."))
    return 1 if missing else 0


def failing(trial, probe, folder, **params):
    """Why this does not work here, in a line; None where it does."""
    params.update({} if probe.language == "python" else {"language": probe.language})
    try:
        manifest = trial.run(probe.source, folder, timeout_seconds=120, **params)
    except WorkerError as problem:
        return problem.message.partition("\n")[0]
    entry = manifest["variables"].get(probe.variable, {})
    if not manifest["success"]:
        return manifest["error"].partition("\n")[0]
    if entry.get("content_type") != probe.content_type:
        return entry.get("error", "it comes back as %s" % entry.get("content_type")).partition("\n")[0]
    return None


EMPTY_PROJECT = '[project]\nname = "check"\nversion = "0"\nrequires-python = ">=3.9"\n'
EMPTY_LOCK = (
    'version = 1\nrequires-python = ">=3.9"\n\n[[package]]\nname = "check"\nversion = "0"\nsource = { virtual = "." }\n'
)


def locked_row(trial, folder):
    """An environment without packages is built, and a cell run in it."""
    what = "locked environments"
    if not trial.worker.machine.locks_python:
        return verdict(what, False, "", "install uv, and on Python 3.10 tomli")
    block = {"key": uv_lock_key(EMPTY_LOCK), "lockfile": EMPTY_LOCK, "pyproject": EMPTY_PROJECT}
    block["python"] = "%d.%d" % sys.version_info[:2]
    problem = failing(trial, Probe(what, "x = 1", "json/object"), folder, environment=block)
    return verdict(what, problem is None, "", problem)


def machine_rows(machine):
    """What the machine has beside what its cells can show."""
    gpus = ", ".join(each["name"] for each in machine.hardware.get("accelerators", ()))
    yield verdict("locked R environments", machine.has_renv, "", 'R: install.packages("renv")')
    yield verdict("GPUs", gpus, gpus, "nvidia-smi on PATH would tell of them")


def verdict(what, works, fact, advice):
    return (what, "yes", fact) if works else (what, "no", advice)


def disk_rows(settings):
    """The folders that the worker writes to, and the room in them."""
    places = {
        "folder of runs": settings.run_root or tempfile.gettempdir(),
        "folder of environments": settings.env_root,
        "cache of mounts": settings.mount_cache_dir,
    }
    for what, place in places.items():
        path = Path(place).expanduser()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        free = "%s, %.1f GiB free" % (path, shutil.disk_usage(there).free / 2**30)
        yield verdict(what, os.access(there, os.W_OK), free, "%s cannot be written to" % path)


# One file to copy.


def write_zipapp(path):
    """``--bundle FILE.pyz``: this worker, its harnesses, h11 and certifi in one file that Python runs.

    The same bytes each time. It holds this Python's bytecode as well; another compiles for itself.
    """
    import zipfile

    own = Path(__file__).resolve().parent
    if own.is_file():  # a zipapp makes another by being copied
        shutil.copy(own, path)
        return 0
    with open(path, "wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in zipapp_members():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    os.chmod(path, 0o755)
    print("wrote %s: python %s --port 9000" % (path, path))
    return 0


def zipapp_members():
    yield "__main__.py", "import sys\n\nimport strata_worker\n\nsys.exit(strata_worker.main())\n"
    yield "strata_worker.py", Path(__file__).read_bytes()
    yield "strata_worker.pyc", bytecode(__file__)
    for name in HARNESSES:
        yield name, Path(sibling(name)).read_bytes()
    if Path(__file__).with_name("LICENSE").is_file():
        yield "licences/strata-worker/LICENSE", Path(__file__).with_name("LICENSE").read_bytes()
    for package in ("h11", "certifi"):
        folder = Path(importlib.util.find_spec(package).origin).parent
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts and "tests" not in file.parts:
                yield "/".join((package, *file.relative_to(folder).parts)), file.read_bytes()
        yield from licences(package)


def bytecode(source):
    """Compiled once for all starts: unchecked, since it lies beside its source for good."""
    import py_compile

    with tempfile.TemporaryDirectory() as folder:
        target = py_compile.compile(
            source,
            os.path.join(folder, "bytecode"),
            "strata_worker.py",
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        return Path(target).read_bytes()


def licences(package):
    import importlib.metadata

    found = importlib.metadata.distribution(package).files or ()
    for file in sorted(found):
        if re.match(r"LICEN[CS]E|COPYING", file.name):
            yield "licences/%s/%s" % (package, file.name), file.locate().read_bytes()


TOOLS = {"check": check_tool, "run": run_tool}


def use_tool(tool, arguments):
    """Run a tool to its exit code. A signal ends its cell and leaves nothing."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return tool(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


# ---------------------------------------------------------------------------------------
# Command line: flags, signals, the log
# ---------------------------------------------------------------------------------------


def environment_table():
    """Every variable the worker reads, as the text of --help and of README."""
    rows = [(field.metadata["env"], field.metadata["doc"]) for field in dataclasses.fields(Settings)]
    width = max(len(name) for name, _ in rows)
    return "\n".join("  %-*s  %s" % (width, name, doc) for name, doc in rows)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="strata-worker",
        usage="strata-worker [options] | strata-worker check | strata-worker run CELL [options]",
        description="Run the cells of a Strata notebook on this machine. `check` says what works here; "
        "`run` runs one file as a cell.",
        epilog="environment variables (a flag wins over its variable):\n" + environment_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version="strata-worker " + __version__)
    parser.add_argument(
        "--print-env-path",
        metavar="PYTHON",
        help="print <interpreter>/<platform> of this Python, as a registry of environments names it, and end",
    )
    parser.add_argument(
        "--bundle",
        metavar="FILE.pyz",
        help="write this worker, its harnesses, h11 and certifi as one file that Python runs, and end",
    )
    for field in dataclasses.fields(Settings):
        if field.metadata["flag"]:
            is_switch = field.metadata["parse"] is switch
            is_list = field.metadata["parse"] is transform_table
            shape = {"action": "store_const", "const": "1"} if is_switch else {"metavar": "X"}
            shape.update({"action": "append"} if is_list else {})
            help = field.metadata["doc"].replace("%", "%%")
            parser.add_argument(field.metadata["flag"], dest=field.name, help=help, **shape)
    return vars(parser.parse_args(argv))


def print_env_path(python):
    """``<interpreter>/<platform>`` of a Python command or version, for who prebuilds archives."""
    try:
        found = describe_python(python) if shutil.which(python) else Machine().interpreter(python)
    except (EnvironmentFailure, OSError) as problem:
        sys.exit("strata-worker: %s" % problem)
    print("%s/%s" % (found.name, found.platform))


def main(argv=None):
    """The command ``strata-worker``. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--mount-helper"]:
        mount_helper()  # does not return
    if arguments[:1] and arguments[0] in TOOLS:
        return use_tool(TOOLS[arguments[0]], arguments[1:])
    given = parse_arguments(arguments)
    python, bundle = given.pop("print_env_path"), given.pop("bundle")
    if python:
        return print_env_path(python)
    if bundle:
        return write_zipapp(bundle)
    try:
        worker = Worker(**given)
    except ValueError as problem:
        sys.exit("strata-worker: %s" % problem)
    set_up_log(worker.settings)
    hide_secrets(os.environ)
    warn_of_exposure(worker.settings)
    try:
        worker.start()
    except (OSError, ValueError) as problem:
        sys.exit("strata-worker: %s" % problem)
    serve_until_signalled(worker)
    return 1 if worker.failure else 0


class JSONFormatter(logging.Formatter):
    """A record as one JSON object; a run's last line also has what it says as fields."""

    def format(self, record):
        when = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        fields = {"time": when.isoformat(timespec="milliseconds"), "level": record.levelname.lower()}
        fields.update(message=record.getMessage(), **getattr(record, "known", {}))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def set_up_log(settings):
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JSONFormatter() if settings.log_format == "json" else text)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])


def warn_of_exposure(settings):
    exposed = not settings.connect and not settings.uds and not is_loopback(settings.bind_host)
    if exposed and settings.token is None:
        log.warning("anyone who can reach %s can run code here: set STRATA_WORKER_TOKEN", settings.bind_host)
    elif exposed and settings.tls_cert is None:
        log.warning("anyone on the way can read the token: serve https with --tls-cert and --tls-key")
    if (
        settings.connect
        and settings.connect_token
        and settings.connect.startswith("ws:")
        and not is_loopback(urllib.parse.urlsplit(settings.connect).hostname)
    ):
        log.warning("anyone on the way to the relay can read the tokens: connect by wss://")


def serve_until_signalled(worker):
    """Wait for SIGTERM or SIGINT, then drain; a second one stops at once. SIGHUP reads certificates again."""
    # A handler may interrupt the very wait that it ends, so it takes no lock: SimpleQueue.put
    # is made for that, and a thread does the rest.
    arrived = queue.SimpleQueue()
    threading.Thread(target=heed_signals, args=(worker, arrived), name="strata-signals", daemon=True).start()
    handled = [signal.SIGTERM, signal.SIGINT] + ([signal.SIGHUP] if worker.settings.tls_cert else [])
    for number in handled:
        signal.signal(number, lambda number, _: arrived.put(number))
    log.info("strata-worker %s %s", __version__, worker.way_in)
    drain_seconds = worker.wait()
    log.info("stopping: running cells have %s", "%g seconds" % drain_seconds if drain_seconds < math.inf else "no end")
    worker.stop(drain_seconds)


def heed_signals(worker, arrived):
    for number in iter(arrived.get, None):
        if number == signal.SIGHUP:
            worker.reload()
            continue
        if worker.over.is_set():
            worker.hurry.set()
        worker.over.set()


if __name__ == "__main__":
    sys.exit(main())
