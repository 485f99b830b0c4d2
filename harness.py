"""Runs one notebook cell: reads its inputs, executes its source, writes what comes back.

    python harness.py MANIFEST

MANIFEST is the manifest.json of a run's folder. Next to it lie inputs/ (one file per input),
outputs/ (where value and display files go), work/ (the cell's working folder) and, at the end,
result.json. Exit code 0 means that result.json was written, also when the cell raised; 1 that it
could not be written; 2 that the manifest is no manifest. The reasons are on stderr.

Nothing but the standard library is needed. pyarrow, numpy, pandas, polars, torch, jax, matplotlib,
PIL and cloudpickle are used when the cell imported them or when a value cannot travel without.

Sections, each built on the ones above it:

    Standing on its own feet    what the cell must not be able to take away from the harness
    Errors                      the exceptions of this module, and exceptions as text
    JSON-safe                   values as the previews in result.json show them
    The outputs folder          file names, and files that follow no link
    Arrow: writing              tables, tensors and scalars as one Arrow IPC stream
    Arrow: reading              and back, from mapped memory
    JSON                        what JSON gives back unchanged
    Modules                     imported modules, and modules made from another cell's source
    Pickle                      everything else
    Cell instances              objects whose class came from another cell
    Values                      which format a value gets; reading inputs, writing variables
    Displays                    display(), the last expression, markdown, images, matplotlib
    Mutation warnings           inputs changed behind the notebook's back, outputs that share
    Console                     file descriptors 1 and 2
    The cell                    the manifest, the namespace, running the source
    The run                     from manifest.json to result.json
    Fork server                 processes for a worker, and their ends
    Main                        the command line
"""

from __future__ import annotations

import _io
import _signal
import _thread
import atexit
import builtins
import errno
import io
import itertools
import json
import linecache
import math
import os
import sys
import time

# --------------------------------------------------------------------------------------------
# Standing on its own feet
# --------------------------------------------------------------------------------------------
# The cell shares this process and may rebind anything: builtins.len, json.dumps, os.open. So the
# harness looks names up in copies of those namespaces, and puts the originals back after the
# cell for the libraries that it calls then. (From Python 3.10 on, a function's builtins are what
# its module's `__builtins__` is: one assignment covers all of this file.)


def own_copy(module):
    copy = type(module)(module.__name__)
    vars(copy).update(vars(module))
    return copy


ORIGINALS = tuple((vars(m), dict(vars(m))) for m in (builtins, io, json, os, os.path))
__builtins__ = dict(vars(builtins))
io, json, os = own_copy(io), own_copy(json), own_copy(os)
os.path = own_copy(os.path)


def put_back_originals() -> None:
    """Uses no builtin itself: they may be gone."""
    for names, originals in ORIGINALS:
        names.update(originals)


class ImportSystem:
    """What import statements go by, as it is before the cell."""

    def __init__(self):
        self.path, self.finders = list(sys.path), list(sys.meta_path)
        self.main = sys.modules["__main__"]

    def put_back(self) -> None:
        """Add again what the cell has taken away; what it added stays."""
        sys.path = with_missing(sys.path, self.path)
        sys.meta_path = with_missing(sys.meta_path, self.finders)
        sys.modules["__main__"] = self.main


def with_missing(current, wanted: list) -> list:
    kept = list(current) if type(current) is list else []
    return kept + [item for item in wanted if item not in kept]


OWN_FILE = own_copy.__code__.co_filename  # as frames of this module name it
MODULE_TYPE = type(sys)
FUNCTION_TYPE = type(own_copy)


C_LIBRARY = []


def c_library():
    """The C library by ctypes; looked up once, and before the fork where a process is one."""
    if not C_LIBRARY:
        import ctypes

        C_LIBRARY.append(ctypes.CDLL(None))
    return C_LIBRARY[0]


def library(name: str):
    """The module *name* if something has imported it already, else None: never an import."""
    return sys.modules.get(name)


def is_kind(kind: type, module: str, *names: str) -> bool:
    """Whether *kind* is one of the classes *names* of *module*, or derived from one."""
    home = library(module)
    classes = [getattr(home, name, None) for name in names] if home else []
    return any(isinstance(cls, type) and issubclass(kind, cls) for cls in classes)


# Everywhere below, a value is judged by type(value). isinstance() would also ask
# value.__class__, which may be a property of the cell's making that raises, exits or lies.

# --------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------

# An exception's message can be a gigabyte; its start and end tell what happened.
MAX_ERROR_CHARS = 200_000


class ManifestError(Exception):
    """The manifest cannot be read or is not one: the worker's fault, not the cell's."""


class FolderError(Exception):
    """The run's folder cannot be written (disk full, no descriptors): no result is possible."""


class InputError(Exception):
    """An input of the cell cannot be loaded. The message names it, its format and a way out."""


class Unwritable(Exception):
    """A value that no format can carry, or a name that no file can have."""


class Refused(Exception):
    """Arrow would not give this value back as it is."""


def type_name(kind: type) -> str:
    """The name of *kind*, past any `__name__` that its metaclass defines."""
    return printable(type.__dict__["__name__"].__get__(kind))


def printable(text: str) -> str:
    """*text* as valid Unicode: lone surrogates, which UTF-8 refuses, become escapes."""
    text = str.__str__(text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


def text_of(value) -> str:
    """`str(value)`, whatever the value's own `__str__` may do."""
    try:
        return printable(str(value))
    except BaseException:
        return f"<{type_name(type(value))} object>"


def shortened(text: str) -> str:
    half = MAX_ERROR_CHARS // 2
    if len(text) <= MAX_ERROR_CHARS:
        return text
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def describe(error: BaseException) -> str:
    """One line (or more, if the message has more): "TypeName: message"."""
    name, message = type_name(type(error)), text_of(error)
    if type(error) is SystemExit:
        message = f"the cell ended itself with sys.exit({safe_repr(error.code)})"
    return shortened(f"{name}: {message}" if message else name)


def safe_repr(value) -> str:
    try:
        return "" if value is None else printable(repr(value))
    except BaseException:
        return "..."


def traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of this file."""
    try:
        import traceback

        drop_own_frames(error)
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return shortened(printable("".join(lines)))
    except BaseException:
        return describe(error)


def drop_own_frames(error: BaseException) -> None:
    """Cut the harness out of *error*'s traceback and of every exception it is linked to."""
    todo, seen = [error], set()
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = cells_part(link.__traceback__)
        todo += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]


def cells_part(trace):
    """The traceback *trace* from the cell's first frame on, minus frames of this file."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    # Awaiting cells are driven by asyncio, whose frames come before the cell's own.
    names = [frame.tb_frame.f_code.co_filename for frame in frames]
    start = names.index(CELL_FILE) if CELL_FILE in names else 0
    kept = None
    for frame, name in zip(reversed(frames[start:]), reversed(names[start:])):
        if name != OWN_FILE:
            frame.tb_next = kept
            kept = frame
    return kept


# --------------------------------------------------------------------------------------------
# JSON-safe
# --------------------------------------------------------------------------------------------


def json_safe(value):
    """*value* reduced to what JSON has: None is "", keys are strings, the unknown is its text."""
    kind = type(value)
    if value is None:
        return ""
    if kind in (bool, int, float, str):
        return value
    if issubclass(kind, (list, tuple)):
        return [json_safe(item) for item in value]
    if issubclass(kind, dict):
        return {text_of(key): json_safe(item) for key, item in dict.items(value)}
    if is_kind(kind, "numpy", "integer", "floating", "bool_"):
        return number_of(value)
    return text_of(value)


def number_of(value):
    """A numpy number as Python's; one that has no equal there (long double) as a float."""
    number = value.item()
    return number if type(number) in (bool, int, float) else float(number)


def strict_json(value):
    """*value*, made of JSON types, without what strict JSON lacks.

    result.json becomes part of the bundle's manifest, and its previews go on to browsers,
    whose JSON.parse fails on NaN: there a NaN or an infinity is null. The value's own file
    keeps it.
    """
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is str:
        return printable(value)
    if kind is list:
        return [strict_json(item) for item in value]
    if kind is dict:
        return {printable(key): strict_json(item) for key, item in value.items()}
    return value


# --------------------------------------------------------------------------------------------
# The outputs folder
# --------------------------------------------------------------------------------------------

# What a file name may hold on any of the file systems that a server may store it on.
MAX_FILE_NAME_BYTES = 255
FORBIDDEN_IN_NAMES = frozenset("/\\") | frozenset(map(chr, range(32)))

# Errors that say something of the machine, and nothing of the value that was being written.
MACHINE_ERRNOS = frozenset(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EMFILE", "ENFILE")
)


class Encoded:
    """A value ready to be written: its format, its bytes, and what the manifest says of it."""

    __slots__ = ("content_type", "extension", "write", "about")

    def __init__(self, content_type: str, body, about: dict):
        """*body*: the file's bytes, or a function that writes them to a binary file."""
        self.content_type = content_type
        self.extension = EXTENSIONS[content_type]
        self.write = body if callable(body) else lambda file: file.write(body)
        self.about = about


def file_stem(name: str) -> str:
    """A variable's file name without extension; `X` and `x` differ on case-folding disks too."""
    if name == name.lower():
        return name
    import hashlib

    return f"{name}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def file_name(name: str, extension: str) -> str:
    """The file of variable *name*. Raises Unwritable for a name that is no file name.

    Such names cannot be written in Python source, but `globals()["../x"] = 1` binds one.
    """
    shown = safe_repr(name)
    if printable(name) != name or not FORBIDDEN_IN_NAMES.isdisjoint(name):
        raise Unwritable(f"a variable named {shown} cannot be stored as a file")
    if not name or name.startswith("."):
        raise Unwritable(f"a variable named {shown} cannot be stored as a file")
    file = file_stem(name) + extension
    if len(file.encode()) > MAX_FILE_NAME_BYTES:
        raise Unwritable(f"the variable's name is too long to be stored as a file: {shown}")
    return file


class Outputs:
    """The folder that value and display files go to. Everything written is a new plain file."""

    def __init__(self, path: str):
        self.path = path
        self.taken = set()  # file names, case-folded

    def store(self, name: str, encoded: Encoded) -> dict:
        """Write one value; returns its entry for result.json.

        Raises FolderError when the machine is at fault, Unwritable for an unusable name.
        """
        file = file_name(name, encoded.extension)
        if file.casefold() in self.taken:
            raise Unwritable(f"another variable is already stored as {file}")
        size = self.write(file, encoded.write)
        self.taken.add(file.casefold())
        return {
            "content_type": encoded.content_type,
            "file": file,
            "bytes": size,
            **encoded.about,
        }

    def write(self, file: str, write) -> int:
        path = os.path.join(self.path, file)
        try:
            with create(path) as stream:
                write(stream)
                return stream.tell()
        except BaseException as error:
            remove(path)
            if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
                raise FolderError(f"{file} could not be written: {error}") from error
            raise

    def restore(self) -> None:
        """Make the folder a folder again: the cell may have deleted, moved or linked it."""
        try:
            if os.path.islink(self.path) or not os.path.isdir(self.path):
                remove(self.path)
                os.makedirs(self.path, 0o700)
            for folder in (os.path.dirname(self.path), self.path):
                os.chmod(folder, 0o700)
        except OSError as error:
            raise FolderError(f"the folder for outputs is gone: {error}") from error


def create(path: str):
    """A new file at *path*. A link the cell left under that name is replaced, not followed."""
    remove(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "wb")


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


# --------------------------------------------------------------------------------------------
# Arrow: writing
# --------------------------------------------------------------------------------------------

PREVIEW_ROWS = 20

SHAPE = b"strata.arrow.shape"
SOURCE = b"strata.arrow.source"
SERIES_NAME = b"strata.arrow.pandas.name"
TENSOR_SHAPE = b"strata.arrow.tensor.shape"
TENSOR_DTYPE = b"strata.arrow.tensor.dtype"
SCALAR_TYPE = b"strata.arrow.scalar.type"

FALLBACK_MARK = "__strata_arrow_json_fallback__"
FALLBACK_FORMAT = "strata.notebook.arrow_json_fallback.v1"

# Arrow has no complex numbers: they are stored as pairs of these.
COMPLEX_PARTS = {"complex64": "float32", "complex128": "float64"}

# bool, int, unsigned, float, complex, str, bytes, timedelta, datetime, object. Others (records,
# bfloat16 and its kin) have no Arrow type.
TENSOR_KINDS = frozenset("biufcUSmMO")


def arrow_converter(kind: type):
    """The function that makes an Arrow table of a *kind*, or None if it travels otherwise."""
    for matches, convert in ARROW_RULES:
        if matches(kind):
            return convert
    return None


def stamped(table, shape: bytes, more: dict | None = None):
    """*table* with the metadata that says how to rebuild the Python value."""
    metadata = {**(table.schema.metadata or {}), SHAPE: shape, **(more or {})}
    return table.replace_schema_metadata(metadata)


def table_from_pyarrow(value):
    import pyarrow

    if issubclass(type(value), pyarrow.RecordBatch):
        table = pyarrow.Table.from_batches([value])
        return stamped(table, b"table", {SOURCE: b"pyarrow.RecordBatch"})
    return stamped(value, b"table", {SOURCE: b"pyarrow.Table"})


def table_from_pandas(value):
    import pyarrow

    if is_kind(type(value), "pandas", "DataFrame"):
        table = pyarrow.Table.from_pandas(value)
        if not table.num_columns and len(value):
            raise Refused("rows without columns")
        return stamped(table, b"table", {SOURCE: b"pandas.DataFrame"})
    name = value.name
    frame = value.to_frame() if name is None or type(name) is str else value.to_frame(text_of(name))
    table = pyarrow.Table.from_pandas(frame)
    about = {SOURCE: b"pandas.Series", SERIES_NAME: series_name(name)}
    return stamped(table, b"table", about)


def series_name(name) -> bytes:
    """A Series' name as JSON, where None, "" and 0 differ."""
    if is_kind(type(name), "numpy", "integer", "floating", "bool_"):
        name = number_of(name)
    if name is not None and type(name) not in (str, int, float, bool):
        name = text_of(name)
    return json.dumps(name).encode()


def table_from_polars(value):
    if is_kind(type(value), "polars", "DataFrame"):
        return stamped(value.to_arrow(), b"table", {SOURCE: b"polars.DataFrame"})
    return stamped(value.to_frame().to_arrow(), b"table", {SOURCE: b"polars.Series"})


def table_from_numpy(value):
    import numpy

    if issubclass(type(value), numpy.ndarray):
        # Masked arrays, matrices and arrays with units are more than their numbers.
        if type(value) not in (numpy.ndarray, numpy.memmap):
            raise Refused("a subclass of numpy.ndarray")
        return tensor_table(value)
    return numpy_scalar_table(value)


def numpy_scalar_table(value):
    """A numpy scalar travels as the Python scalar it equals."""
    import pyarrow

    kind = value.dtype.kind
    if kind == "c" and value.dtype.name in COMPLEX_PARTS:
        return complex_table(complex(value))
    if kind in "mM":
        array = pyarrow.array(value.reshape(1))
    elif kind in "biufUS":
        array = pyarrow.array([value.item()], pyarrow.uint64() if kind == "u" else None)
    else:
        raise Refused(f"a numpy scalar of type {value.dtype}")
    if array.null_count:
        raise Refused("NaT")
    return stamped(pyarrow.table({"value": array}), b"scalar")


def tensor_table(array, source: bytes | None = None):
    """An array of any shape as one column of its elements in C order."""
    import numpy
    import pyarrow

    dtype = str(array.dtype)
    if array.dtype.kind not in TENSOR_KINDS:
        raise Refused(f"an array of {dtype}")
    flat = numpy.ascontiguousarray(array).reshape(-1)
    values = pyarrow.array(flat.view(COMPLEX_PARTS[dtype]) if dtype in COMPLEX_PARTS else flat)
    if array.dtype.kind in "USO":
        refuse_lossy_text(flat, values)
    about = {TENSOR_SHAPE: json.dumps(list(array.shape)).encode(), TENSOR_DTYPE: dtype.encode()}
    if source is not None:
        about[SOURCE] = source
    return stamped(pyarrow.table({"values": values}), b"tensor", about)


def refuse_lossy_text(flat, values) -> None:
    """Refuse what Arrow's text would change: an inner NUL ends it, objects become their kin."""
    if flat.dtype.kind == "O":
        unchanged = all(type(item) is str for item in flat)
    else:
        unchanged = (values.to_numpy(zero_copy_only=False).astype(flat.dtype) == flat).all()
    if not unchanged:
        raise Refused(f"an array of {flat.dtype} that Arrow would change")


def table_from_torch(value):
    # A conjugated or negated view has no numpy equal until it is resolved. What numpy cannot
    # hold at all (sparse, quantized, bfloat16) raises here.
    array = value.detach().cpu().resolve_conj().resolve_neg().numpy()
    return tensor_table(array, b"torch.Tensor")


def table_from_jax(value):
    import numpy

    return tensor_table(numpy.asarray(value), b"jax.Array")


def table_from_scalar(value):
    import pyarrow

    kind = type(value)
    if kind is complex:
        return complex_table(value)
    if is_kind(kind, "uuid", "UUID"):
        array = pyarrow.array([value.bytes], pyarrow.binary(16))
        return stamped(pyarrow.table({"value": array}), b"scalar", {SCALAR_TYPE: b"uuid"})
    array = pyarrow.array([value], nanosecond_type(value))
    # Time zones, subclasses, NaN decimals, nanoseconds: Arrow takes more than it gives back.
    if kind not in (bytes, bytearray) and not same(array[0].as_py(), value):
        raise Refused(f"a {type_name(kind)} that Arrow would change")
    return stamped(pyarrow.table({"value": array}), b"scalar")


def same(left, right) -> bool:
    return type(left) is type(right) and bool(left == right)


def nanosecond_type(value):
    """The Arrow type of a pandas Timestamp or Timedelta; None lets pyarrow choose."""
    import pyarrow

    if is_kind(type(value), "pandas", "Timestamp"):
        return pyarrow.timestamp("ns", None if value.tz is None else str(value.tz))
    return pyarrow.duration("ns") if is_kind(type(value), "pandas", "Timedelta") else None


def complex_table(value: complex):
    import pyarrow

    kind = pyarrow.struct([("real", pyarrow.float64()), ("imag", pyarrow.float64())])
    array = pyarrow.array([{"real": value.real, "imag": value.imag}], kind)
    return stamped(pyarrow.table({"value": array}), b"scalar", {SCALAR_TYPE: b"complex"})


def table_from_capsule(value):
    import pyarrow

    return stamped(pyarrow.table(value), b"table", {SOURCE: b"arrow.capsule"})


def tensor_from_dlpack(value):
    import numpy

    return tensor_table(numpy.from_dlpack(value))


def is_scalar_kind(kind: type) -> bool:
    return (
        issubclass(kind, (bytes, bytearray, complex))
        or is_kind(kind, "datetime", "datetime", "date", "time", "timedelta")
        or is_kind(kind, "decimal", "Decimal")
        or is_kind(kind, "uuid", "UUID")
    )


def exports_table(kind: type) -> bool:
    """An iterator is left alone: to read a stream that can be read once is to use it up."""
    return hasattr(kind, "__arrow_c_stream__") and not hasattr(kind, "__next__")


# First match wins. The two protocols come last: the libraries above export them too, and would
# come back as something else.
ARROW_RULES = (
    (lambda kind: is_kind(kind, "pyarrow", "Table", "RecordBatch"), table_from_pyarrow),
    (lambda kind: is_kind(kind, "pandas", "DataFrame", "Series"), table_from_pandas),
    (lambda kind: is_kind(kind, "polars", "DataFrame", "Series"), table_from_polars),
    (lambda kind: is_kind(kind, "numpy", "ndarray", "generic"), table_from_numpy),
    (lambda kind: is_kind(kind, "torch", "Tensor"), table_from_torch),
    (lambda kind: is_kind(kind, "jax", "Array"), table_from_jax),
    (is_scalar_kind, table_from_scalar),
    (exports_table, table_from_capsule),
    (lambda kind: hasattr(kind, "__dlpack__"), tensor_from_dlpack),
)

# Nearly all values are one of these, and none of them is Arrow's.
NEVER_ARROW = frozenset({type(None), bool, int, float, str, list, dict, tuple, MODULE_TYPE})


def encode_arrow(value, convert) -> Encoded:
    """*value* as an Arrow IPC stream. Whatever it raises means: Arrow refuses this value."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what conversion leaves out: not the cell's doing
        table = convert(value)
    return Encoded("arrow/ipc", lambda file: write_stream(table, file), about_table(table))


def write_stream(table, file) -> None:
    import pyarrow

    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def about_table(table) -> dict:
    shape = table.schema.metadata[SHAPE]
    if shape == b"tensor":
        sizes = tuple(json.loads(table.schema.metadata[TENSOR_SHAPE]))
        dtype = table.schema.metadata[TENSOR_DTYPE].decode()
        return {"preview": f"ndarray shape={sizes} dtype={dtype}"}
    if shape == b"scalar":
        return {"preview": strict_json(scalar_preview(scalar_value(table)))}
    columns = [printable(name) for name in table.column_names]
    rows = strict_json(preview_rows(table))
    return {"rows": table.num_rows, "columns": columns, "preview": rows}


def scalar_preview(value):
    """Bytes can be gigabytes, and their text four times as long: show the start."""
    limit = 10_000
    if type(value) is bytes and len(value) > limit:
        return f"{value[:limit]}... ({len(value)} bytes)"
    return json_safe(value)


def preview_rows(table) -> list:
    head = table.slice(0, PREVIEW_ROWS)
    columns = [[json_safe(item) for item in python_values(column)] for column in head.columns]
    return [list(row) for row in zip(*columns)]


def python_values(column) -> list:
    """The column's values, or their text where Python has no such value (nanoseconds, say)."""
    import pyarrow

    try:
        return column.to_pylist()
    except Exception:
        pass
    try:
        return column.cast(pyarrow.string()).to_pylist()
    except Exception:
        return ["?"] * len(column)


def encode_json_table(value) -> Encoded:
    """A pandas DataFrame or Series that Arrow refuses, as a JSON table of JSON-safe values."""
    is_series = is_kind(type(value), "pandas", "Series")
    frame = value.to_frame(text_of(value.name)) if is_series else value
    columns = [column_label(label) for label in frame.columns]
    rows = [
        [None if item is None else json_safe(item) for item in row]
        for row in frame.itertuples(index=False, name=None)
    ] or [[]] * len(frame)
    table = {
        FALLBACK_MARK: True,
        "format": FALLBACK_FORMAT,
        "kind": "series" if is_series else "dataframe",
        "columns": columns,
        "data": rows,
        "series_name": json.loads(series_name(value.name)) if is_series else None,
    }
    preview = strict_json([json_safe(row) for row in rows[:PREVIEW_ROWS]])
    about = {"rows": len(rows), "columns": strict_json(columns), "preview": preview}
    return Encoded("arrow/ipc", json.dumps(table).encode(), about)


def column_label(label):
    """A label that pandas takes back: a list (made of a tuple) it would take for a level."""
    return text_of(label) if issubclass(type(label), tuple) else json_safe(label)


# --------------------------------------------------------------------------------------------
# Arrow: reading
# --------------------------------------------------------------------------------------------

# Below this size to read a file costs less than to map it (a mapping keeps a descriptor open).
MAP_FROM_BYTES = 256 * 1024


class Stream:
    """An Arrow IPC stream in memory that the cell may write to without changing the file.

    The file is mapped copy-on-write: a gigabyte is neither read nor copied until it is used,
    and an array made on it is an ordinary writable array.
    """

    def __init__(self, path: str):
        import pyarrow

        self.memory = writable_memory(path)
        self.buffer = pyarrow.py_buffer(self.memory)
        with pyarrow.ipc.open_stream(pyarrow.BufferReader(self.buffer)) as reader:
            self.table = reader.read_all()
        self.metadata = self.table.schema.metadata or {}

    def value(self):
        shape = self.metadata.get(SHAPE, b"table")
        if shape == b"tensor":
            return self.tensor()
        return scalar_value(self.table) if shape == b"scalar" else table_value(self.table)

    def tensor(self):
        import numpy

        dtype = numpy.dtype(self.metadata[TENSOR_DTYPE].decode())
        parts = COMPLEX_PARTS.get(str(dtype))
        flat = self.elements(numpy.dtype(parts) if parts else dtype).view(dtype)
        shape = json.loads(self.metadata[TENSOR_SHAPE])
        return array_for(flat.reshape(shape), self.metadata.get(SOURCE))

    def elements(self, dtype):
        """The one column's values as a writable numpy array of *dtype*, copied only if it must."""
        import numpy

        column = self.table.column(0)
        if not len(column):
            return numpy.empty(0, dtype)
        if self.holds_plainly(column, dtype):
            values = column.chunk(0)
            start = values.buffers()[1].address - self.buffer.address
            start += values.offset * dtype.itemsize
            return numpy.frombuffer(self.memory, dtype, len(values), start)
        return numpy.array(column.to_numpy(zero_copy_only=False).astype(dtype, copy=False))

    def holds_plainly(self, column, dtype) -> bool:
        """Whether the stream holds the column's numbers just as a numpy array would."""
        import pyarrow

        if dtype.kind not in "iuf" or column.num_chunks != 1 or column.null_count:
            return False
        return column.type == pyarrow.from_numpy_dtype(dtype)


def writable_memory(path: str):
    """The file's bytes: an mmap, or a bytearray for a small file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < MAP_FROM_BYTES:
            return bytearray(file.read())
        import mmap

        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def array_for(array, source: bytes | None):
    """*array* as the library's that it came from, where that library is installed."""
    try:
        if source == b"torch.Tensor":
            import torch

            return torch.from_numpy(array)
        if source == b"jax.Array":
            import jax

            return jax_array(jax, array)
    except ImportError:
        pass
    return array


def jax_array(jax, array):
    """A 64-bit array comes back as 64 bits, though jax makes 32 of them unless told not to."""
    made = jax.numpy.asarray(array)
    if made.dtype != array.dtype:
        jax.config.update("jax_enable_x64", True)
        made = jax.numpy.asarray(array)
    if made.dtype != array.dtype:
        raise ValueError(f"jax narrows {array.dtype} to {made.dtype} even with jax_enable_x64 on")
    return made


def scalar_value(table):
    kind = (table.schema.metadata or {}).get(SCALAR_TYPE)
    value = table.column(0)[0].as_py()
    if kind == b"uuid":
        import uuid

        return uuid.UUID(bytes=value)
    return complex(value["real"], value["imag"]) if kind == b"complex" else value


def table_value(table):
    """The table as the type it was made of, or as the nearest type that is installed."""
    metadata = table.schema.metadata or {}
    source = metadata.get(SOURCE, b"pandas.DataFrame").decode()
    table = without_marks(table)
    if source == "pyarrow.RecordBatch":
        return record_batch(table)
    is_series = source.endswith(".Series")
    for maker in TABLE_MAKERS.get(source.partition(".")[0], ()):
        try:
            return maker(table, is_series, metadata)
        except ImportError:
            continue
    return table


def without_marks(table):
    """The table with its own metadata alone, and none that says how to rebuild a value."""
    metadata = table.schema.metadata or {}
    kept = {key: value for key, value in metadata.items() if not key.startswith(b"strata.arrow.")}
    return table.replace_schema_metadata(kept or None)


def record_batch(table):
    import pyarrow

    batches = table.combine_chunks().to_batches()
    empty = [pyarrow.array([], field.type) for field in table.schema]
    return batches[0] if batches else pyarrow.RecordBatch.from_arrays(empty, schema=table.schema)


def pandas_value(table, is_series: bool, metadata: dict):
    import pandas  # noqa: F401  (fails here, and not inside pyarrow, when it is not installed)

    frame = table.to_pandas()
    if not is_series:
        return frame
    series = frame.iloc[:, 0]
    series.name = read_series_name(metadata.get(SERIES_NAME, b"").decode())
    return series


def read_series_name(text: str):
    """Files older than the JSON rule hold the bare text, and nothing for None."""
    try:
        return json.loads(text)
    except ValueError:
        return text or None


def polars_value(table, is_series: bool, metadata: dict):
    import polars

    frame = polars.from_arrow(table)
    return frame.to_series(0) if is_series else frame


TABLE_MAKERS = {
    "pandas": (pandas_value, polars_value),
    "polars": (polars_value, pandas_value),
}


def read_table(path: str):
    """A Core transform's input: the pyarrow Table itself, whatever it was made of."""
    return Stream(path).table


def read_arrow(path: str):
    with open(path, "rb") as file:
        if file.read(1) == b"{":
            return json_table_value(read_json(path))
    return Stream(path).value()


def json_table_value(table: dict):
    """A JSON table as a pandas DataFrame or Series, or as the dict it is without pandas."""
    if table.get(FALLBACK_MARK) is not True or table.get("format") != FALLBACK_FORMAT:
        raise ValueError("neither an Arrow stream nor a JSON table")
    try:
        import pandas
    except ImportError:
        return table
    labels = [tuple(label) if type(label) is list else label for label in table["columns"]]
    frame = pandas.DataFrame(table["data"], columns=pandas.Index(labels, tupleize_cols=False))
    if table.get("kind") != "series":
        return frame
    series = frame.iloc[:, 0] if len(labels) else pandas.Series(dtype=object)
    series.name = table.get("series_name")
    return series


# --------------------------------------------------------------------------------------------
# JSON
# --------------------------------------------------------------------------------------------

# Python itself refuses to read a longer integer (4300 digits) back from text.
MAX_INT_BITS = 14_000


def json_text(value) -> str | None:
    """*value* as JSON, or None if JSON would not give it back unchanged."""
    if type(value) not in JSON_KINDS:
        return None
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if json_depth(value) else None


JSON_KINDS = frozenset({dict, list, int, float, str, bool, type(None)})


def json_depth(value) -> int:
    """How deep *value*, which json.dumps took, is nested; 0 if not all of it is JSON's own.

    By exact type: a subclass (an enum, a Counter) comes back as its base. numpy's float64 and
    str_ are taken for the float and str that they are: results are full of them, and as JSON
    they can be looked at.
    """
    depth, level = 0, [value]
    while level:
        depth, below = depth + 1, []
        for item in level:
            kind = type(item)
            if kind is dict:
                if not all(type(key) is str and survives_as_text(key) for key in item):
                    return 0
                below += item.values()
            elif kind is list:
                below += item
            elif not survives_as_leaf(item, kind):
                return 0
        level = below
    return depth


def survives_as_leaf(item, kind: type) -> bool:
    if kind is int:
        return item.bit_length() < MAX_INT_BITS
    if kind is str or is_numpys(kind, str):
        return survives_as_text(item)
    return kind in JSON_KINDS or is_numpys(kind, float)


def is_numpys(kind: type, base: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and kind is {float: numpy.float64, str: numpy.str_}[base]


def survives_as_text(text: str) -> bool:
    """A pair of lone surrogates is read back as the one character that the pair encodes."""
    return text.isascii() or printable(text) == text or json.loads(json.dumps(text)) == text


def encode_json(value, text: str) -> Encoded:
    return Encoded("json/object", text.encode("ascii"), {"preview": json_preview(value, text)})


# The preview travels inside other JSON, through readers that have a recursion limit.
MAX_PREVIEW_DEPTH = 100


def json_preview(value, text: str):
    """The value itself, unless it holds what strict JSON or a reader of it cannot take."""
    if text.count("[") + text.count("{") > MAX_PREVIEW_DEPTH:
        depth = json_depth(value)
        if depth > MAX_PREVIEW_DEPTH:
            return f"<{type_name(type(value))}, {depth} levels deep>"
    suspect = "NaN" in text or "Infinity" in text or "\\ud" in text
    return strict_json(value) if suspect else value


def read_json(path: str):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


# --------------------------------------------------------------------------------------------
# Modules
# --------------------------------------------------------------------------------------------

CELL_MODULE = "__strata_cell_module__"
CELL_MODULE_SOURCE = "__strata_cell_module_source__"
CELL_CLASS = "__strata_cell_exported_class__"
INJECTED = "__strata_cell_injected__"


def encode_module(value) -> Encoded:
    name = vars(value).get("__name__")
    if type(name) is not str or name not in sys.modules:
        raise Unwritable("the module cannot be imported by name, so no other cell could")
    body = json.dumps({"module_name": name}).encode("ascii")
    return Encoded("module/import", body, {"preview": f"<module '{printable(name)}'>"})


def read_module(path: str):
    import importlib

    return importlib.import_module(read_json(path)["module_name"])


def read_cell_symbol(path: str, injected: dict):
    """A function or class that another cell defines: its module's source is run here."""
    about = read_json(path)
    module = cell_module(about["module_name"], about["source"], injected)
    return symbol_of(module, about["symbol_name"])


def symbol_of(module, name: str):
    if name not in vars(module):
        raise ValueError(f"the cell module {module.__name__} does not define {name}")
    return vars(module)[name]


def cell_module(name: str, source: str, injected: dict):
    """The synthetic module *name*, made from *source* the first time that it is asked for.

    *injected* are values that the source uses without defining them.
    """
    module = sys.modules.get(name)
    if module is None:
        module = new_cell_module(name, source, injected)
    elif not getattr(module, CELL_MODULE, False):
        raise ValueError(f"{name} is the name of an imported module")
    return module


def new_cell_module(name: str, source: str, injected: dict):
    file = f"<{name}>"
    module = MODULE_TYPE(name)
    module.__file__ = file
    vars(module).update(injected, **{"__builtins__": builtins})
    vars(module).update({CELL_MODULE: True, CELL_MODULE_SOURCE: source, INJECTED: injected})
    show_source(file, source)
    sys.modules[name] = module
    try:
        exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    mark_classes(module)
    return module


def mark_classes(module) -> None:
    for value in list(vars(module).values()):
        if issubclass(type(value), type) and value.__module__ == module.__name__:
            try:
                setattr(value, CELL_CLASS, True)
            except (AttributeError, TypeError):
                pass  # its instances are pickled, like those of any other class


def show_source(file: str, source: str) -> None:
    """Let tracebacks and inspect.getsource find the lines of code that is in no file."""
    lines = io.StringIO(source, newline=None).readlines()
    linecache.cache[file] = (len(source), None, lines, file)


# --------------------------------------------------------------------------------------------
# Pickle
# --------------------------------------------------------------------------------------------

ENVELOPE_MARK = "__strata_object_codec__"
ENVELOPE_FORMAT = "strata.notebook.object_codec.v1"
CODEC_VARIABLE = "STRATA_NOTEBOOK_OBJECT_CODEC"


CODECS = ("cloudpickle", "pickle")


def pickle_codec() -> tuple:
    """`(name, dumps)` of the codec that the environment asks for."""
    import pickle

    name = (os.environ.get(CODEC_VARIABLE) or "cloudpickle").strip().lower()
    if name not in CODECS:
        raise ValueError(f"{CODEC_VARIABLE} is {name!r}; it can be {' or '.join(CODECS)}")
    if name == "cloudpickle":
        try:
            import cloudpickle

            return name, lambda value: dumps_with_modules(cloudpickle, value)
        except ImportError:
            pass
    return "pickle", lambda value: pickle.dumps(value, protocol=5)


def dumps_with_modules(cloudpickle, value) -> bytes:
    """Pickle *value* so that the cell modules whose classes it names are made where it is read.

    cloudpickle writes such a class as a name in its module, and the cell that gets a list of
    instances has that module only if it uses the class itself, too.
    """
    payload = cloudpickle.dumps(value, protocol=5)
    named = {
        name: (names[CELL_MODULE_SOURCE], names[INJECTED])
        for name, names in cell_modules().items()
        if name.encode() in payload
    }
    if not named:
        return payload
    return cloudpickle.dumps(WithModules(named, payload), protocol=5)


def cell_modules() -> dict:
    """The namespaces of the cell modules of this process, by name."""
    modules = {name: module for name, module in sys.modules.items() if type(module) is MODULE_TYPE}
    return {name: vars(m) for name, m in modules.items() if CELL_MODULE in vars(m)}


class WithModules:
    """Pickled, it is a call that makes the modules and returns the value of the payload."""

    def __init__(self, modules: dict, payload: bytes):
        self.call = loads_with_modules, (modules, payload)

    def __reduce__(self):
        return self.call


def loads_with_modules(modules: dict, payload: bytes):
    """Travels inside the pickle, and so uses nothing of this file."""
    import pickle
    import sys

    for name, (source, injected) in modules.items():
        if name in sys.modules:
            continue
        module = sys.modules[name] = type(sys)(name)
        names = vars(module)
        names.update(injected, __strata_cell_module__=True, __strata_cell_injected__=injected)
        exec(compile(source, f"<{name}>", "exec", dont_inherit=True), names)
        names["__strata_cell_module_source__"] = source
        for value in list(names.values()):
            if isinstance(value, type) and value.__module__ == name:
                value.__strata_cell_exported_class__ = True
    return pickle.loads(payload)


loads_with_modules.__module__ = "__main__"  # which cloudpickle takes along, not by name


def encode_pickle(value) -> Encoded:
    import pickle

    codec, dumps = pickle_codec()
    envelope = {ENVELOPE_MARK: ENVELOPE_FORMAT, "codec": codec, "payload": dumps(value)}
    body = pickle.dumps(envelope, protocol=5)
    return Encoded("pickle/object", body, about_object(type(value), codec))


def about_object(kind: type, codec: str) -> dict:
    name = type_name(kind)
    return {"codec": codec, "type": name, "preview": f"<{name} object>"}


def read_pickle(path: str):
    import pickle

    with open(path, "rb") as file:
        value = pickle.load(file)
    if type(value) is not dict or value.get(ENVELOPE_MARK) != ENVELOPE_FORMAT:
        return value
    return unpickle(value["codec"], value["payload"])


def unpickle(codec: str, payload: bytes):
    """The value that either codec made *payload* of: both write what plain pickle reads."""
    import pickle

    if codec not in CODECS:
        raise ValueError(f"it was written with the unknown codec {codec!r}")
    return pickle.loads(payload)


# --------------------------------------------------------------------------------------------
# Cell instances
# --------------------------------------------------------------------------------------------

STATE_MARK = "__strata_cell_instance_state__"
STATE_FORMAT = "strata.notebook.cell_instance_state.v1"

# Py_TPFLAGS_HEAPTYPE: set on classes that a class statement made.
MADE_BY_CLASS_STATEMENT = 1 << 9


def is_cell_instance(kind: type) -> bool:
    """Whether the class came in through a cell module and attributes are all its state."""
    module = sys.modules.get(getattr(kind, "__module__", None))
    if not getattr(kind, CELL_CLASS, False) or not getattr(module, CELL_MODULE, False):
        return False
    return vars(module).get(type_name(kind)) is kind and holds_attributes_only(kind)


def holds_attributes_only(kind: type) -> bool:
    """Not so a list's subclass or an exception, whose content would stay behind, or an enum."""
    base = kind
    while base.__flags__ & MADE_BY_CLASS_STATEMENT:
        base = base.__base__
    return base is object and not is_kind(kind, "enum", "Enum")


def encode_cell_instance(value) -> Encoded:
    import pickle

    kind = type(value)
    codec, dumps = pickle_codec()
    about = {
        "module_name": kind.__module__,
        "class_name": type_name(kind),
        "source": getattr(sys.modules[kind.__module__], CELL_MODULE_SOURCE),
        "state_codec": codec,
        "state_payload": dumps(instance_state(value)),
    }
    body = pickle.dumps(about, protocol=5)
    return Encoded("module/cell-instance", body, about_object(kind, codec))


def instance_state(value):
    """What the class's own `__getstate__` gives, else the attributes and slots, else None."""
    kind = type(value)
    own = getattr(kind, "__getstate__", None)
    if own is not None and own is not getattr(object, "__getstate__", None):
        return value.__getstate__()
    slots = {name: getattr(value, name) for name in slot_names(kind) if hasattr(value, name)}
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else None
    if attributes is None and not slots:
        return None
    return {STATE_MARK: STATE_FORMAT, "dict": attributes, "slots": slots}


def slot_names(kind: type) -> list:
    import copyreg

    return copyreg._slotnames(kind)  # what pickle itself uses; knows of mangled names


def read_cell_instance(path: str, injected: dict):
    import pickle

    with open(path, "rb") as file:
        about = pickle.load(file)
    module = cell_module(about["module_name"], about["source"], injected)
    kind = symbol_of(module, about["class_name"])
    if "state_payload" in about:
        state = unpickle(about["state_codec"], about["state_payload"])
    else:
        state = pickle.loads(about["state_pickle"])
    return restored(kind, state)


def restored(kind: type, state):
    """A new instance with *state*, made without `__init__`, as pickle makes one."""
    value = kind.__new__(kind)
    parts = state if type(state) is dict and state.get(STATE_MARK) == STATE_FORMAT else None
    if hasattr(kind, "__setstate__"):
        value.__setstate__(pickled_state(parts) if parts else state)
    elif parts:
        restore_attributes(value, parts.get("dict"), parts.get("slots"))
    elif type(state) is tuple and len(state) == 2:
        restore_attributes(value, *state)
    else:
        restore_attributes(value, state, None)
    return value


def pickled_state(parts: dict):
    """The default state in the form that a `__setstate__` written for pickle expects."""
    return (parts["dict"], parts["slots"]) if parts.get("slots") else parts["dict"]


def restore_attributes(value, attributes: dict | None, slots: dict | None) -> None:
    if attributes:
        vars(value).update(attributes)
    for name, item in (slots or {}).items():
        object.__setattr__(value, name, item)  # past a frozen dataclass's own


# --------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------

EXTENSIONS = {
    "arrow/ipc": ".arrow",
    "json/object": ".json",
    "pickle/object": ".pickle",
    "image/png": ".png",
    "text/markdown": ".md",
    "module/import": ".module.json",
    "module/cell-instance": ".cell_instance.pickle",
}


def converter_of(value):
    kind = type(value)
    return None if kind in NEVER_ARROW else arrow_converter(kind)


def write_value(outputs: Outputs, name: str, value) -> dict:
    """Write *value* in the first format that takes it; returns its entry for result.json.

    Raises whatever the value's own code raises, and FolderError.
    """
    convert = converter_of(value)
    if convert is None:
        return outputs.store(name, encode_plain(value))
    try:
        return outputs.store(name, encode_arrow(value, convert))
    except (FolderError, Unwritable):
        raise
    except BaseException:  # a panic in polars is no Exception
        is_table = is_kind(type(value), "pandas", "DataFrame", "Series")
        return outputs.store(name, (encode_json_table if is_table else encode_pickle)(value))


def encode_plain(value) -> Encoded:
    """*value*, which is not Arrow's, in the first other format that takes it."""
    text = json_text(value)
    if text is not None:
        return encode_json(value, text)
    kind = type(value)
    if issubclass(kind, MODULE_TYPE):
        return encode_module(value)
    return (encode_cell_instance if is_cell_instance(kind) else encode_pickle)(value)


def write_variables(outputs: Outputs, variables: dict) -> dict:
    """Each variable's entry for result.json; one that fails costs no other."""
    return {
        printable(name): attempt(value, lambda: write_value(outputs, name, value))
        for name, value in variables.items()
    }


def attempt(value, write) -> dict:
    """What *write* returns or, if it raises or tries to exit, the entry that says so."""
    try:
        return write()
    except FolderError:
        raise
    except BaseException as error:
        return {"error": describe(error), "type": type_name(type(value))}


def read_rds(path: str):
    raise ValueError(
        "it is an R object that only R can read; let the R cell make a data.frame, an atomic "
        "vector or a plain list of it"
    )


def read_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def read_path(path: str):
    import pathlib

    return pathlib.Path(path)


READERS = {
    "arrow/ipc": read_arrow,
    "arrow_ipc_stream": read_table,
    "json/object": read_json,
    "pickle/object": read_pickle,
    "text/markdown": read_text,
    "module/import": read_module,
    "file/path": read_path,
    "dir/tar": read_path,  # the worker has unpacked it: the file is a folder
    "application/x-r-rds": read_rds,
}

# These also take the values that the cell's source uses.
CELL_READERS = {
    "module/cell": read_cell_symbol,
    "module/cell-instance": read_cell_instance,
}


def read_inputs(inputs: dict) -> dict:
    """All input values by name. Raises InputError for the first that cannot be loaded."""
    # A cell module is made once: first by the specs that know what to inject into it.
    names = sorted(inputs, key=lambda name: inputs[name].content_type != "module/cell")
    values = {name: read_input(name, inputs[name]) for name in names}
    return {name: values[name] for name in inputs}


def read_input(name: str, spec: InputSpec):
    injected = {inner: read_input(f"{name}.{inner}", its) for inner, its in spec.injected.items()}
    try:
        if spec.content_type in CELL_READERS:
            return CELL_READERS[spec.content_type](spec.path, injected)
        if spec.content_type not in READERS:
            raise ValueError("this worker knows no such format")
        return READERS[spec.content_type](spec.path)
    except BaseException as error:
        raise InputError(input_problem(name, spec, error)) from error


def input_problem(name: str, spec: InputSpec, error: BaseException) -> str:
    reason = describe(error)
    if isinstance(error, ImportError) and error.name:
        package = error.name.partition(".")[0]
        reason += f" (install {package} in the environment this cell runs in)"
    if isinstance(error, FileNotFoundError) and not os.path.exists(spec.path):
        reason = f"the request carries no file {os.path.basename(spec.path)}"
    return f"input {name!r} ({spec.content_type}) could not be loaded: {reason}"


# --------------------------------------------------------------------------------------------
# Displays
# --------------------------------------------------------------------------------------------


class Markdown:
    """Text that is shown as markdown: `display(Markdown("# Title"))`."""

    def __init__(self, text: str):
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Markdown({self.text!r})"

    def __str__(self) -> str:
        return self.text


# Pickled as the class of the cell's __main__ that it is for the cell.
Markdown.__module__ = "__main__"


class DisplayFunction:
    """Show each value below the cell: `display(value)`."""

    def __init__(self, displays: Displays):
        self._displays = displays

    def __call__(self, *values) -> None:
        for value in values:
            self._displays.show(value)

    def __repr__(self) -> str:
        return "<function display>"

    def __reduce__(self):
        # A function of the cell that calls display() shows things in the cell that runs it.
        return eval, ("vars(__import__('__main__')).get('display', print)",)


class Displays:
    """What the cell shows, in order.

    Images and markdown are made at once, as the value may change before the cell ends. Other
    values are written after the variables, whose files they share.
    """

    def __init__(self, outputs: Outputs):
        self.outputs = outputs
        self.entries = []  # each a result.json entry, or None while it is to be written
        self.values = []

    def show(self, value) -> None:
        if value is None:
            return
        # Both lists grow first: making an image may run code that shows something else.
        index = len(self.entries)
        self.entries.append(None)
        self.values.append(value)
        self.entries[index] = attempt(value, lambda: self.render(index, value))

    def render(self, index: int, value) -> dict | None:
        rendered = None if converter_of(value) else (as_markdown(value) or as_png(value))
        if rendered is None:
            return None
        self.values[index] = None
        return self.outputs.store(f"__display__{index}", rendered)

    def finish(self, variables: dict, written: dict) -> list:
        """All entries. *variables* are the cell's values, *written* their entries by name."""
        shared = {id(value): written[printable(name)] for name, value in variables.items()}
        for index, entry in enumerate(self.entries):
            if entry is None:
                self.entries[index] = self.entry_for(index, shared)
        return self.entries

    def entry_for(self, index: int, shared: dict) -> dict:
        value = self.values[index]
        if id(value) in shared:
            return dict(shared[id(value)])
        name = f"__display__{index}"
        return attempt(value, lambda: write_value(self.outputs, name, value))


def representation(value, method: str):
    """What `value._repr_..._()` gives, without its metadata, or None if there is none."""
    if not callable(getattr(type(value), method, None)):
        return None
    made = getattr(value, method)()
    return made[0] if type(made) is tuple and made else made


def as_markdown(value) -> Encoded | None:
    text = representation(value, "_repr_markdown_")
    if text is None:
        return None
    text = bytes(text).decode("utf-8") if type(text) is bytes else printable(text)
    about = {"markdown_text": text, "preview": None}
    return Encoded("text/markdown", text.encode("utf-8"), about)


def as_png(value) -> Encoded | None:
    image = representation(value, "_repr_png_")
    if image is None:
        image = drawn(value)
    if image is None:
        return None
    image = image.encode("latin-1") if type(image) is str else bytes(image)
    width, height = png_size(image)
    about = {"inline_data_url": data_url(image), "width": width, "height": height, "preview": None}
    return Encoded("image/png", image, about)


def drawn(value) -> bytes | None:
    """The PNG of a matplotlib Figure or a PIL Image, or None for anything else."""
    file = io.BytesIO()
    if is_kind(type(value), "matplotlib.figure", "Figure"):
        value.savefig(file, format="png")
    elif is_kind(type(value), "PIL.Image", "Image"):
        value.save(file, format="PNG")
    return file.getvalue() or None


def data_url(image: bytes) -> str:
    import base64

    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def png_size(image: bytes) -> tuple:
    """(width, height) in pixels, from the header every PNG starts with; else (None, None)."""
    if image[:8] != b"\x89PNG\r\n\x1a\n" or image[12:16] != b"IHDR":
        return None, None
    return int.from_bytes(image[16:20], "big"), int.from_bytes(image[20:24], "big")


class AfterImport:
    """A finder that calls a function on a module right after it has been imported.

    Cells that do not import it do not pay for it.
    """

    def __init__(self, actions: dict):
        self.actions = actions
        for name in actions:
            if name in sys.modules:
                actions[name](sys.modules[name])

    def find_spec(self, name: str, path=None, target=None):
        if name not in self.actions:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = FollowedLoader(spec.loader, self.actions[name])
                return spec
        return None


class FollowedLoader:
    """A module's loader, followed by one call; the module never sees it."""

    def __init__(self, loader, action):
        self.loader = loader
        self.action = action

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.action(module)


def show_catchers(displays: Displays) -> dict:
    """What makes plt.show() and Figure.show() displays, by the module it is to be done to."""

    def catch_figure_show(module) -> None:
        module.Figure.show = lambda figure, *args, **options: displays.show(figure)

    def catch_pyplot_show(pyplot) -> None:
        pyplot.show = lambda *args, **options: show_figures(pyplot, displays)

    return {"matplotlib.figure": catch_figure_show, "matplotlib.pyplot": catch_pyplot_show}


def show_figures(pyplot, displays: Displays) -> None:
    """Show every open figure, then close it, so that the next plot starts on a new one."""
    helpers = sys.modules["matplotlib._pylab_helpers"]
    for manager in helpers.Gcf.get_all_fig_managers():
        displays.show(manager.canvas.figure)
    pyplot.close("all")


# --------------------------------------------------------------------------------------------
# Mutation warnings
# --------------------------------------------------------------------------------------------
# An input that the cell changes in place and does not give back is, for the cells after this
# one, unchanged. To notice, each input is looked at before and after, and never copied whole:
#
#   - what cannot change (numbers, text, bytes, tuples of such, modules, pyarrow, jax): not at all;
#   - arrays and frames: shape, labels, types and about SAMPLE_SIZE elements spread evenly, which
#     is all of a small one (and a torch tensor counts its in-place changes itself);
#   - other values whose file is small (up to SMALL_BYTES): a hash of all of the value;
#   - other large values: the length, and the identity of the first and last elements.
#
# So a large input changed in few places can go unnoticed; an unchanged one is never reported.

SMALL_BYTES = 256 * 1024
SAMPLE_SIZE = 4096
SAMPLE_COLUMNS = 64
EDGE_SIZE = 64

UNCHANGEABLE = (bool, int, float, complex, str, bytes, type(None), type, MODULE_TYPE, FUNCTION_TYPE)


def is_unchangeable(kind: type) -> bool:
    return (
        issubclass(kind, UNCHANGEABLE)
        or (is_scalar_kind(kind) and not issubclass(kind, bytearray))
        or is_kind(kind, "pyarrow", "Table", "RecordBatch")
        or is_kind(kind, "pathlib", "PurePath")
        or is_kind(kind, "jax", "Array")
        or is_kind(kind, "enum", "Enum")
    )


def fingerprint(value, file_size: int):
    """Something that is equal before and after unless *value* changed; None if there is none."""
    try:
        kind = type(value)
        if is_unchangeable(kind):
            return None
        for matches, look in FINGERPRINTS:
            if matches(kind):
                return look(value)
        return whole(value) if file_size <= SMALL_BYTES else edges(value)
    except BaseException:
        return None


def whole(value):
    """A hash of all of the value, if two looks at it give the same."""
    if type(value) in (dict, list):
        text = json_text(value)
        if text is not None:
            return hash(text)
    first = hash(pickled(value))
    return first if hash(pickled(value)) == first else None


def pickled(value) -> bytes:
    import pickle

    try:
        return pickle.dumps(value, protocol=5)
    except BaseException:  # a function or class of another cell's
        return pickle_codec()[1](value)


def edges(value):
    """The length and the ends of a large built-in container, or an object's attributes."""
    kind = type(value)
    if issubclass(kind, (list, tuple)):
        return len(value), [id(item) for item in [*value[:EDGE_SIZE], *value[-EDGE_SIZE:]]]
    if issubclass(kind, dict):
        pairs = itertools.islice(dict.items(value), EDGE_SIZE)
        return len(value), [(id(key), id(item)) for key, item in pairs]
    if issubclass(kind, (set, bytearray)):
        return len(value)
    return edges(vars(value))


def spread(length: int, limit: int = SAMPLE_SIZE) -> list:
    """At most about *limit* positions, evenly spread from the first to the last."""
    step = max(1, length // limit)
    return [*range(0, length, step), length - 1] if length else []


def look_at_array(array):
    small = array.nbytes <= SMALL_BYTES
    sample = array.ravel() if small else array.flat[spread(array.size)]
    content = list(map(id, sample)) if array.dtype.hasobject else hash(sample.tobytes())
    return array.shape, str(array.dtype), content


def look_at_tensor(tensor):
    flat = tensor.detach().flatten()
    sample = flat[spread(len(flat))] if len(flat) > SAMPLE_SIZE else flat
    return tuple(tensor.shape), tensor._version, repr(sample.tolist())


def look_at_pandas(value):
    frame = value.to_frame(0) if is_kind(type(value), "pandas", "Series") else value
    names = [value.name] if frame is not value else list(value.columns)
    places = spread(len(names), SAMPLE_COLUMNS)
    rows = frame.iloc[spread(len(value), SAMPLE_SIZE // max(1, len(places)))]
    columns = [rows.iloc[:, place] for place in places]
    content = [(str(column.dtype), column.tolist()) for column in columns]
    return value.shape, hash(repr((names, rows.index.tolist(), content)))


def look_at_polars(value):
    frame = value.to_frame() if is_kind(type(value), "polars", "Series") else value
    sample = frame[spread(frame.height, SAMPLE_SIZE // max(1, frame.width))]
    return frame.shape, hash(repr((frame.schema, sample.rows())))


FINGERPRINTS = (
    (lambda kind: is_kind(kind, "numpy", "ndarray"), look_at_array),
    (lambda kind: is_kind(kind, "pandas", "DataFrame", "Series"), look_at_pandas),
    (lambda kind: is_kind(kind, "polars", "DataFrame", "Series"), look_at_polars),
    (lambda kind: is_kind(kind, "torch", "Tensor"), look_at_tensor),
)

CHANGED = (
    "'{0}' was changed in place and does not come back: the cells after this one see it unchanged"
)
CHANGED_HELP = "Assign it ({0} = ...), or change a copy of it under another name."
DELETED = "'{0}' was deleted: the cells after this one still have it"
SHARED = (
    "'{0}' and '{1}' share one {2}: they are stored apart, so the cells after this one get "
    "two that no longer change together"
)
SHARED_HELP = "Let only one of them come back, and make the other from it where both are used."


def mutation_warnings(prints: dict, namespace: dict, outputs: dict) -> list:
    """Warnings about inputs, whose earlier fingerprints are *prints* `{name: (value, size,
    fingerprint)}`, and about *outputs*, the variables that come back."""
    warnings = []
    for name, (value, size, earlier) in prints.items():
        if name not in namespace:
            warnings.append(warning(name, DELETED.format(name), None))
        elif name not in outputs and earlier is not None and fingerprint(value, size) != earlier:
            warnings.append(warning(name, CHANGED.format(name), CHANGED_HELP.format(name)))
    return warnings + sharing_warnings(outputs)


def warning(name: str, message: str, suggestion: str | None) -> dict:
    return {
        "var_name": printable(name),
        "message": printable(message),
        "suggestion": suggestion and printable(suggestion),
    }


# How many objects are looked at in one variable, and in all of them.
MAX_WALK = 20_000
MAX_WALK_TOTAL = 200_000


def sharing_warnings(outputs: dict) -> list:
    """One warning for each pair of variables with a mutable object in common."""
    owners, pairs, warnings, left = {}, set(), [], MAX_WALK_TOTAL
    for name, value in outputs.items():
        if left <= 0:
            break
        found, walked = mutable_parts(value, min(left, MAX_WALK))
        left -= walked
        for key, kind in found.items():
            owner = owners.setdefault(key, name)
            if owner != name and (owner, name) not in pairs:
                pairs.add((owner, name))
                message = SHARED.format(owner, name, type_name(kind))
                warnings.append(warning(owner, message, SHARED_HELP))
    return warnings


def mutable_parts(root, limit: int) -> tuple:
    """`({id: type} of the mutable objects in *root*, number of objects looked at)`."""
    found, seen, todo, walked = {}, set(), [root], 0
    roles = {}
    while todo and walked < limit:
        item = todo.pop()
        kind = type(item)
        role = roles.get(kind) or roles.setdefault(kind, role_of(kind))
        walked += role is not LEAF
        if role is LEAF or id(item) in seen:
            continue
        seen.add(id(item))
        parts = list(itertools.islice(role(item), limit))
        if not issubclass(kind, (tuple, frozenset)):
            found[id(item)] = kind
        todo += parts
    return found, walked


def role_of(kind: type):
    """How a value's parts are found: LEAF for what cannot change, else a function.

    Objects without a `__dict__` (patterns, locks, dates) count as leaves unless known.
    """
    if is_unchangeable(kind):
        return LEAF
    if issubclass(kind, bytearray) or any(matches(kind) for matches, _ in FINGERPRINTS):
        return no_parts
    if issubclass(kind, dict):
        return dict.values
    for base in (list, tuple, set, frozenset):
        if issubclass(kind, base):
            return base.__iter__
    return attribute_values if kind.__dictoffset__ else LEAF


def LEAF(item) -> tuple:
    return ()


def no_parts(item) -> tuple:
    return ()


def attribute_values(item):
    return object.__getattribute__(item, "__dict__").values()


# --------------------------------------------------------------------------------------------
# Console
# --------------------------------------------------------------------------------------------


# A stream is in a flood from so many writes within so many seconds on; until then every line is
# a write of its own. In one it is flushed so often, until a period brings less than this.
FLOOD_WRITES, FLOOD_SECONDS = 500, 0.25
FLOOD_PERIOD, FLOOD_BYTES = 0.02, 4096

# A file is locked while it is written to. Between writes the worker can give back the disk of
# what is past the console's limit.
LONGEST_WRITE = 16 * 1024 * 1024


class ConsoleFile(_io.FileIO):
    """Descriptor 1 or 2 below a text stream; it notices when lines come in a flood.

    A write for each line makes printing a million lines take several times as long as it takes
    plain Python. In a flood a thread has the stream collect lines, flushes it, and is gone again
    soon after. It is never there in a fork: Python warns of forks with threads, and what the
    stream holds would be printed twice.
    """

    def __init__(self, fd: int):
        super().__init__(fd, "w", closefd=False)
        self.name = {1: "<stdout>", 2: "<stderr>"}[fd]
        self.writes = self.size = 0
        self.since = time.monotonic()
        self.stream = _io.TextIOWrapper(
            _io.BufferedWriter(self), "utf-8", "backslashreplace", line_buffering=True
        )
        self.stream.mode = "w"
        self.stopping = False
        self.thread = _thread.allocate_lock()  # held while there is one
        os.register_at_fork(before=self.calm)

    def write(self, data) -> int:
        size = super().write(data[:LONGEST_WRITE])
        self.writes += 1
        self.size += size or 0  # None: a cell has made the descriptor non-blocking, and it is full
        if self.writes == FLOOD_WRITES:
            now = time.monotonic()
            if now - self.since < FLOOD_SECONDS and self.thread.acquire(False):
                self.start()
            self.writes, self.since = 0, now
        return size

    def start(self) -> None:
        self.stopping = False
        try:
            _thread.start_new_thread(self.collect, ())
        except RuntimeError:  # no thread to be had: a write for each line, then
            self.thread.release()

    def collect(self) -> None:
        """The thread, for as long as the flood lasts."""
        try:
            self.stream.reconfigure(line_buffering=False)
            last = -FLOOD_BYTES
            while not self.stopping and self.size - last >= FLOOD_BYTES:
                last = self.size
                time.sleep(FLOOD_PERIOD)
                self.stream.flush()
            self.stream.reconfigure(line_buffering=True)
        except ValueError:
            pass  # the cell has closed the stream
        finally:
            self.thread.release()

    def calm(self) -> None:
        """End the thread, whose last act is to flush."""
        self.stopping = True
        with self.thread:
            pass


class Console:
    """The cell's standard streams. They are flushed at each line's end, so that what Python, C
    code and child processes print to descriptors 1 and 2 stays in order; but for floods."""

    def __init__(self):
        sys.stdout = sys.__stdout__ = ConsoleFile(1).stream
        sys.stderr = sys.__stderr__ = ConsoleFile(2).stream
        self.streams = (sys.stdout, sys.stderr)
        self.libc = line_buffered_libc()

    def flush(self) -> None:
        for stream in (*self.streams, sys.stdout, sys.stderr):
            flush(stream)
        if self.libc is not None:
            self.libc.fflush(None)


def flush(stream) -> None:
    try:
        stream.flush()
    except BaseException:
        pass  # closed, None, or of the cell's own making


def line_buffered_libc():
    """The C library, its stdout set to flush at each line's end, or None where there is none."""
    try:
        import ctypes

        libc = c_library()
        name = "__stdoutp" if sys.platform == "darwin" else "stdout"
        line_buffered = 1  # _IOLBF, on Linux and macOS alike
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, line_buffered, 0)
        return libc
    except (ImportError, OSError, AttributeError, ValueError):
        return None


def reopen_standard_descriptors() -> None:
    """Give 0, 1 and 2 something to point to: else the next file opened takes their place, and
    what is still printed goes into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


# --------------------------------------------------------------------------------------------
# The cell
# --------------------------------------------------------------------------------------------

CELL_FILE = "<cell>"
ONLY_AST = 0x400  # ast.PyCF_ONLY_AST; the ast module itself is not needed
TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
IS_COROUTINE = 0x80  # inspect.CO_COROUTINE

# Where the last expression's value is kept: no name that source could spell.
LAST_VALUE = "<last value>"


class InputSpec:
    """One input as the manifest describes it, its file as an absolute path."""

    def __init__(self, spec: dict, folder: str):
        self.content_type = spec["content_type"]
        self.path = os.path.join(folder, spec["file"])
        self.injected = input_specs(spec.get("injected"), folder)

    def size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0


def input_specs(specs: dict | None, folder: str) -> dict:
    return {name: InputSpec(spec, folder) for name, spec in (specs or {}).items()}


class Manifest:
    """manifest.json, its paths made absolute. Raises ManifestError."""

    def __init__(self, path: str):
        self.folder = os.path.dirname(os.path.abspath(path))
        try:
            self.read(read_json(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{path} is no manifest: {describe(error)}") from error

    def read(self, data: dict) -> None:
        self.source = data["source"] + ""
        self.inputs = input_specs(data.get("inputs"), self.folder)
        self.mutation_defines = frozenset(data.get("mutation_defines") or ())
        self.tables = {
            name: (table.get("uri"), table.get("snapshot_id"))
            for name, table in (data.get("tables") or {}).items()
        }
        self.transform = data.get("transform")
        folders = {**(data.get("mounts") or {}), **(data.get("output_dirs") or {})}
        self.folders = {name: self.inside(path) for name, path in folders.items()}

    def inside(self, path: str) -> str:
        return os.path.join(self.folder, path)


def bound_names(manifest: Manifest) -> dict:
    """What the cell finds bound: its inputs, tables, mounts and output folders."""
    names = read_inputs(manifest.inputs)
    for name, (uri, snapshot) in manifest.tables.items():
        names[name] = uri
        names[f"{name}_snapshot"] = snapshot
    for name, path in manifest.folders.items():
        names[name] = read_path(path)
    return names


def new_main() -> dict:
    """The namespace of a fresh `__main__`, for the cell.

    It is a real module: dataclasses, pickle, get_type_hints and inspect look it up by name.
    """
    module = MODULE_TYPE("__main__")
    module.__builtins__ = builtins
    module.__file__ = CELL_FILE  # else inspect finds the source of no class
    sys.modules["__main__"] = module
    return vars(module)


def no_main_for_spawned(spawn) -> None:
    """Keep multiprocessing's spawned processes from looking for `__main__`'s file, which is none.

    As in any notebook, they know nothing that the cell itself defines.
    """
    prepare = spawn.get_preparation_data

    def get_preparation_data(name):
        return {k: v for k, v in prepare(name).items() if k != "init_main_from_path"}

    spawn.get_preparation_data = get_preparation_data


def run_source(source: str, namespace: dict):
    """Run the cell; returns the value of its last statement if that is an expression."""
    show_source(CELL_FILE, source)
    code = compile_cell(source)
    try:
        if code.co_flags & IS_COROUTINE:
            import asyncio

            asyncio.run(eval(code, namespace))
        else:
            exec(code, namespace)
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        put_back_originals()
    return namespace.pop(LAST_VALUE, None)


def compile_cell(source: str):
    """The cell's code. A last bare expression becomes an assignment, so that one code object
    (and, with await, one event loop) runs all of it."""
    import _ast

    flags = TOP_LEVEL_AWAIT
    tree = compile(source.lstrip("\ufeff"), CELL_FILE, "exec", flags | ONLY_AST, True)
    if tree.body and type(tree.body[-1]) is _ast.Expr:
        last = tree.body[-1]
        place = {name: getattr(last, name) for name in last._attributes}
        target = _ast.Name(id=LAST_VALUE, ctx=_ast.Store(), **place)
        tree.body[-1] = _ast.Assign(targets=[target], value=last.value, **place)
    return compile(tree, CELL_FILE, "exec", flags, True)


def look_like_an_own_process() -> None:
    """Hide the harness's script from the cell: sys.path, sys.argv and import see none of it."""
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        sys.path[0] = ""  # the working folder, as in any notebook
    sys.argv[:] = [""]


# --------------------------------------------------------------------------------------------
# The run
# --------------------------------------------------------------------------------------------


class Run:
    """One run of one cell, from its manifest to its result."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.outputs = Outputs(manifest.inside("outputs"))
        self.console = Console()
        self.displays = Displays(self.outputs)
        # Given up after the cell: one that has used up all descriptors leaves one to work with.
        self.spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def result(self) -> dict:
        """Run the cell; returns what result.json says. Raises FolderError."""
        try:
            namespace, before, prints = self.prepare()
        except BaseException as error:
            return self.failed(error)
        try:
            value = self.run(namespace)
            self.settle(namespace)
        except BaseException as error:
            self.settle(namespace)
            return self.failed(error)
        return self.succeeded(value, namespace, before, prints)

    def run(self, namespace: dict):
        return run_source(self.manifest.source, namespace)

    def prepare(self) -> tuple:
        """`(namespace, what it held before the cell, fingerprints of inputs)`."""
        work = self.manifest.inside("work")
        os.makedirs(work, exist_ok=True)
        os.chdir(work)
        look_like_an_own_process()
        namespace = new_main()
        namespace.update(display=DisplayFunction(self.displays), Markdown=Markdown)
        names = bound_names(self.manifest)
        prints = self.fingerprints(names)
        namespace.update(names)
        os.environ["MPLBACKEND"] = os.environ.get("MPLBACKEND") or "Agg"  # needs no screen
        follow = {**show_catchers(self.displays), "multiprocessing.spawn": no_main_for_spawned}
        sys.meta_path.insert(0, AfterImport(follow))
        self.imports = ImportSystem()
        return namespace, dict(namespace), prints

    def fingerprints(self, names: dict) -> dict:
        """For each input, what tells later whether it was changed. One that comes back anyway
        need not be looked at."""
        prints = {}
        for name, spec in self.manifest.inputs.items():
            value, size = names[name], spec.size()
            known = name in self.manifest.mutation_defines
            prints[name] = (value, size, None if known else fingerprint(value, size))
        return prints

    def settle(self, namespace: dict) -> None:
        """After the cell: take back what the harness needs, and write out what is buffered."""
        block_signals()
        self.imports.put_back()
        sys.setrecursionlimit(min(max(sys.getrecursionlimit(), 1000), MAX_RECURSION))
        os.umask(0o077)
        self.console.flush()
        for value in list(namespace.values()):
            if issubclass(type(value), _io._IOBase):
                flush(value)  # the process ends without closing it
        self.release_spare()
        reopen_standard_descriptors()
        self.outputs.restore()

    def release_spare(self) -> None:
        try:
            if os.path.samestat(os.fstat(self.spare), os.stat(os.devnull)):
                os.close(self.spare)
        except OSError:
            pass  # the cell closed it

    def changed(self, namespace: dict, before: dict) -> dict:
        """The variables that come back: what the cell bound, and what it is known to change."""
        again = self.manifest.mutation_defines & self.manifest.inputs.keys()
        return {
            name: value
            for name, value in dict(namespace).items()
            if type(name) is str
            and not name.startswith("_")
            and (name in again or name not in before or before[name] is not value)
        }

    def succeeded(self, value, namespace: dict, before: dict, prints: dict) -> dict:
        self.displays.show(value)
        variables = self.changed(namespace, before)
        try:
            warnings = mutation_warnings(prints, namespace, variables)
        except BaseException:
            warnings = []  # some value would not be looked at; that costs no result
        written = write_variables(self.outputs, variables)
        displays = self.displays.finish(variables, written)
        if displays:
            written["_"] = dict(displays[-1])
        return report(variables=written, displays=displays, mutation_warnings=warnings)

    def failed(self, error: BaseException) -> dict:
        displays = self.displays.finish({}, {})
        return report(
            success=False, displays=displays, error=describe(error), traceback=traceback_of(error)
        )


class Tables(dict):
    """A transform's inputs by name and, as they have an order, by number."""

    def __missing__(self, number):
        if type(number) is not int:
            raise KeyError(number)
        return list(self.values())[number]


class Transform(Run):
    """A Core transform: tables in, one table out, as a script or as a function of a module."""

    def run(self, namespace: dict):
        function, params = self.manifest.transform["function"], self.manifest.transform["params"]
        if function is not None:
            tables = Tables((name, namespace[name]) for name in self.manifest.inputs)
            return self.function(function)(tables, params)
        namespace["params"] = params
        super().run(namespace)
        if "output" not in namespace:
            raise NameError("the script leaves no table in `output`")
        return namespace["output"]

    def function(self, path: str):
        """The function `module:name`; the module may lie where the worker was started."""
        import importlib

        sys.path.insert(0, self.manifest.transform["folder"])
        module, _, names = path.partition(":")
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        return found

    def succeeded(self, value, *rest) -> dict:
        try:
            reader = batches_of(value)
            encoded = Encoded("arrow/ipc", lambda file: write_batches(reader, file), {})
            return report(variables={"output": self.outputs.store("output", encoded)})
        except FolderError:
            raise
        except BaseException as error:
            return self.failed(error)


def batches_of(value):
    """A pyarrow.RecordBatchReader of what a transform gives back."""
    if is_kind(type(value), "pyarrow", "RecordBatchReader"):
        return value
    if type(value) is dict:
        import pyarrow

        value = pyarrow.table(value)
    convert = arrow_converter(type(value))
    table = convert(value) if convert else None
    if table is None or table.schema.metadata[SHAPE] != b"table":
        kind = type(value).__name__
        raise TypeError(f"a transform gives back a table, not a value of type {kind}")
    return without_marks(table).to_reader()


def write_batches(reader, file) -> None:
    import pyarrow

    with pyarrow.ipc.new_stream(file, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


# A cell may have raised the limit so far that to pickle a deep value overflows the C stack.
MAX_RECURSION = 5000


WAITING_SIGNALS = frozenset(
    getattr(_signal, name)
    for name in ("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGINT")
)


def block_signals() -> None:
    """No alarm that the cell set may interrupt the writing of its results."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, WAITING_SIGNALS)


def report(**known) -> dict:
    result = {
        "success": True,
        "variables": {},
        "displays": [],
        "mutation_warnings": [],
        "error": None,
        "traceback": None,
        "build_env": build_env(),
    }
    result.update(known)
    return result


def build_env() -> str:
    """Which interpreter, on which machine: e.g. cpython-3.13-linux-x86_64."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{sys.implementation.name}-{version}-{sys.platform}-{os.uname().machine}"


def write_result(folder: str, result: dict) -> None:
    """Whoever sees result.json sees all of it: it is written under another name first."""
    path = os.path.join(folder, "result.json")
    try:
        with create(path + ".tmp") as file:
            file.write(json.dumps(result, allow_nan=False, default=text_of).encode("ascii"))
        os.replace(path + ".tmp", path)
    except OSError as error:
        raise FolderError(f"result.json could not be written: {error}") from error


def complain(message: str) -> None:
    os.write(2, f"harness: {message}\n".encode("utf-8", "backslashreplace"))


def run_cell(manifest_path: str) -> int:
    """Run the cell that *manifest_path* describes, in this process; returns the exit code.

    To be called once per process, which afterwards belongs to what the cell made of it: end it
    with `end_process`.
    """
    try:
        manifest = Manifest(manifest_path)
    except ManifestError as error:
        complain(text_of(error))
        return 2
    try:
        kind = Run if manifest.transform is None else Transform
        write_result(manifest.folder, kind(manifest).result())
        return 0
    except FolderError as error:
        complain(text_of(error))
    except BaseException as error:
        complain(f"the cell's result was lost to an error of the harness: {describe(error)}")
        show_own_error(error)
    return 1


def show_own_error(error: BaseException) -> None:
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)


# How long exit handlers may take.
EXIT_SECONDS = 1.0


def exit_handlers() -> int:
    import atexit

    return atexit._ncallbacks()


def end_process(code: int, inherited: int = 0) -> None:
    """End this process now, whatever threads the cell left running.

    The handlers that the cell or its libraries registered with atexit are run, as a log or an
    upload may depend on them; but the result is written, and one that waits (multiprocessing's
    waits for children that may never end) is not waited for.
    """
    try:
        if atexit._ncallbacks() > inherited:
            end_after(EXIT_SECONDS, code)
            atexit._run_exitfuncs()
    except BaseException:
        pass
    flush_everything()
    os._exit(code)


def end_after(seconds: float, code: int) -> None:
    def end() -> None:
        time.sleep(seconds)
        flush_everything()
        os._exit(code)

    _thread.start_new_thread(end, ())


def flush_everything() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        flush(stream)
    try:
        c_library().fflush(None)
    except BaseException:
        pass


# --------------------------------------------------------------------------------------------
# Fork server
# --------------------------------------------------------------------------------------------
# `python harness.py --fork-server FD` is asked for processes over a Unix socket, by a worker that
# has threads and secrets and so cannot fork them itself. It has neither: one thread, one selector.
#
# Orphans. The server and each cell are child subreapers: what a cell's children leave behind comes
# to the cell while it lives, and to the server afterwards. So every child of the server that is no
# cell belongs to a dead one, and is killed before that one's exit is reported.
#
# Kills. A tree is first frozen from its root down, so that it cannot outgrow the walk, then killed.
#
# A worker that dies, however it dies, closes its end of the socket; that ends the server and all of
# its cells.
#
# The spare. A fork of a process that has imported pandas takes milliseconds, and so do the faults on
# the pages that its child then touches. So one child is forked ahead, touches what a cell will, and
# waits: it takes the next launch, and the server forks another while that cell runs.


def serve_forks(fd: int, preload: list) -> None:
    """Serve launches on the inherited socket until it closes."""
    import socket

    control = socket.socket(fileno=fd)
    imported = import_all(preload)
    become_subreaper()
    gc_freeze()
    if preload:
        use_large_pages()
    try:
        control.sendall(json.dumps({"ready": True, **imported}).encode() + b"\n")
    except OSError:
        os._exit(0)  # the worker has gone meanwhile
    ForkServer(control, spares=bool(preload)).run()


def import_all(names: list) -> dict:
    import importlib

    preloaded, failed = [], {}
    for name in names:
        try:
            importlib.import_module(name)
            preloaded.append(name)
        except Exception as problem:  # not installed, or broken: the cells will see
            failed[name] = "%s: %s" % (type(problem).__name__, problem)
    return {"preloaded": preloaded, "failed": failed}


def gc_freeze() -> None:
    """Leave what is imported out of every collection: collecting would copy its pages."""
    import gc

    gc.collect()
    gc.freeze()


LARGE_PAGE = 2 * 1024 * 1024


def use_large_pages() -> None:
    """Have the kernel (6.1 or newer) keep what is imported in pages of 2 MiB where it can.

    A fork copies the table of pages and an exit takes it down, and that is most of what a small
    cell costs. Where a cell writes it gets small pages of its own as before.
    """
    HUGEPAGE, NOHUGEPAGE, COLLAPSE = 14, 15, 25
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    madvise = c_library().madvise
    madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for start, end in private_memory():
        madvise(start, end - start, HUGEPAGE)
        for page in range(start, end, LARGE_PAGE):
            madvise(page, LARGE_PAGE, COLLAPSE)
        madvise(start, end - start, NOHUGEPAGE)  # what is allocated later shall come in small ones


def private_memory() -> list:
    """The stretches of this process's own writable memory that hold whole large pages."""
    found = []
    with open("/proc/self/maps") as maps:
        for fields in map(str.split, maps):
            start, end = (int(place, 16) for place in fields[0].split("-"))
            start, end = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
            if fields[1].startswith("rw-p") and fields[5:] in ([], ["[heap]"]) and start < end:
                found.append((start, end))
    return found


def prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        c_library().prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


class ForkServer:
    """The loop: launches come in on ``control``, orders to kill as the end of a lifeline."""

    def __init__(self, control, spares: bool) -> None:
        import selectors
        import signal

        self.control = control
        self.spares = spares
        self.spare = 0  # its pid
        self.spare_socket = None
        self.cells = {}  # pid -> its lifeline
        self.request = b""
        self.fds = []
        self.selector = selectors.DefaultSelector()
        self.woken, waker = os.pipe()
        for end in (self.woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(control, selectors.EVENT_READ, self.on_control)
        self.selector.register(self.woken, selectors.EVENT_READ, self.on_child)

    def run(self) -> None:
        while True:
            if self.spares and not self.spare:
                self.fork_spare()
            for key, _ in self.selector.select():
                key.data() if key.fd in (self.control.fileno(), self.woken) else self.on_lifeline(key.data)

    # Launches

    def on_control(self) -> None:
        import socket

        data, fds, _, _ = socket.recv_fds(self.control, 65536, 16)
        if not data:
            self.end()
        self.request += data
        self.fds += fds
        while len(self.request) >= 4:
            size = 4 + int.from_bytes(self.request[:4], "big")
            if len(self.request) < size or len(self.fds) < 3:
                return
            message, self.request = self.request[4:size], self.request[size:]
            fds, self.fds = self.fds[:3], self.fds[3:]
            self.launch(message, *fds)

    def launch(self, message: bytes, out: int, err: int, lifeline_fd: int) -> None:
        import socket

        lifeline = socket.socket(fileno=lifeline_fd)
        try:
            launch = json.loads(message)
            pid = self.hand_to_spare(launch, message, out, err) or self.fork_cell(launch, out, err)
        except (OSError, ValueError) as problem:
            say(lifeline, {"error": str(problem)})
            lifeline.close()
        else:
            self.cells[pid] = lifeline
            self.selector.register(lifeline, 1, pid)
            say(lifeline, {"pid": pid})
        os.close(out)
        os.close(err)

    def fork_cell(self, launch: dict, out: int, err: int) -> int:
        pid = fork()
        if pid == 0:
            become_cell(launch, out, err)
        return pid

    def fork_spare(self) -> None:
        import socket

        ours, theirs = socket.socketpair()
        try:
            self.spare = fork()
        except OSError:  # then the launch that needs it says so
            self.spares = False
            return
        if self.spare == 0:
            become_spare(theirs)
        theirs.close()
        self.spare_socket = ours

    def hand_to_spare(self, launch: dict, message: bytes, out: int, err: int) -> int:
        """Give a launch to the waiting spare; its pid, or 0 when there is none to take it."""
        import socket

        if launch["argv"] or not self.spare:
            return 0
        pid, self.spare = self.spare, 0
        with self.spare_socket as spare:
            try:
                socket.send_fds(spare, [len(message).to_bytes(4, "big")], [out, err])
                spare.sendall(message)
            except OSError:  # it died
                return 0
        return pid

    # Ends

    def on_child(self) -> None:
        """Some child has died: report the cells among them, once nothing of theirs is left."""
        try:
            os.read(self.woken, 4096)
        except BlockingIOError:
            pass
        ended = self.reap()
        if ended:
            self.end_orphans(ended)
        for pid, code in ended.items():
            lifeline = self.cells.pop(pid)
            self.forget(lifeline)
            say(lifeline, {"exit": code})
            lifeline.close()

    def reap(self) -> dict:
        """Collect dead children; the exit codes of the cells among them."""
        ended = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if pid in self.cells:
                ended[pid] = exit_code(status)
            elif pid == self.spare:  # killed from outside; the next is forked by the next launch
                self.spare = 0

    def end_orphans(self, ended: dict) -> None:
        """Kill children that are no cells until there are none; cells may end meanwhile."""
        while True:
            orphans = [pid for pid in children_of(os.getpid()) if pid not in self.cells and pid != self.spare]
            if not orphans:
                return
            kill_trees(orphans)
            ended.update(self.reap_some())

    def reap_some(self) -> dict:
        """As reap, but waits for one child at least: what is killed takes a moment to die."""
        import select

        select.select([self.woken], [], [], 0.05)
        try:
            os.read(self.woken, 4096)
        except BlockingIOError:
            pass
        return self.reap()

    def on_lifeline(self, pid: int) -> None:
        """The worker sends nothing here; the end of it is the order to kill."""
        lifeline = self.cells[pid]
        try:
            if lifeline.recv(4096):
                return
        except OSError:
            pass
        self.forget(lifeline)
        kill_cell(pid)

    def forget(self, lifeline) -> None:
        try:
            self.selector.unregister(lifeline)
        except KeyError:
            pass

    def end(self) -> None:
        """The worker is gone, and so shall be all that runs for it."""
        while True:
            kill_trees(children_of(os.getpid()) or list(self.cells))
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                os._exit(0)


def fork() -> int:
    """os.fork without its warning of threads: those of a BLAS library, which is made for it."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def say(lifeline, report: dict) -> None:
    """Tell the worker. It is a line, so it fits; a worker that has hung up does not want it."""
    try:
        lifeline.sendall(json.dumps(report).encode() + b"\n")
    except OSError:
        pass


def exit_code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def children_of(pid: int) -> list:
    """The children of every thread of a process. Empty where there is no /proc."""
    found = []
    try:
        for task in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, task), "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        pass  # it is gone, and its children with it, to their subreaper
    return found


def kill_cell(pid: int) -> None:
    import signal

    kill_trees([pid])
    if not os.path.isdir("/proc/self/task"):  # no walking there: its group has to do
        send(os.killpg, pid, signal.SIGKILL)


def kill_trees(roots: list) -> None:
    """Freeze processes and all that descends from them, then kill them all."""
    import signal

    frozen, found = {}, list(roots)
    while found:
        for pid in found:
            send(os.kill, pid, signal.SIGSTOP)
            frozen[pid] = None
        # A process stops a moment after it was told: look again until nobody new turns up.
        found = [child for pid in frozen for child in children_of(pid) if child not in frozen]
    for pid in frozen:
        send(os.kill, pid, signal.SIGKILL)


def send(how, pid: int, number: int) -> None:
    try:
        how(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


# What follows runs in the forked child, which shall look like a fresh process.


def become_cell(launch: dict, out: int, err: int) -> None:
    """Turn a fork of the server into the process of one cell. Does not return."""
    with ends_here():
        detach()
        take_launch(launch, out, err)


def become_spare(waiting) -> None:
    """Turn a fork of the server into one that waits for its launch. Does not return."""
    import socket

    with ends_here():
        detach()
        os.dup2(waiting.detach(), 3)
        os.closerange(4, max_descriptor())
        reseed()
        rehearse()
        with socket.socket(fileno=3) as waiting:
            size, fds, _, _ = socket.recv_fds(waiting, 4, 2)
            if not size:
                os._exit(0)  # the server is gone
            message = waiting.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        take_launch(json.loads(message), *fds)


class ends_here:
    """A block at whose end the process ends."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, problem, traceback) -> None:
        os.write(2, ("the cell's process could not be set up: %s\n" % problem).encode())
        os._exit(127)


def detach() -> None:
    os.setsid()
    reset_signals()
    become_subreaper()
    be_first_to_go()


def take_launch(launch: dict, out: int, err: int) -> None:
    take_streams(out, err)
    limit_memory(launch.get("memory_mb"))
    os.chdir(launch["cwd"])
    if launch["argv"]:
        execute(launch)
    inherited = exit_handlers()
    refresh(launch)
    code = run_cell(launch["manifest"])
    end_process(code, inherited)


def execute(launch: dict) -> None:
    import signal

    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and what is ignored stays so
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execve(launch["argv"][0], launch["argv"], launch["env"])


def take_streams(out: int, err: int) -> None:
    """Standard streams on the console's files, and no other descriptor of the server's."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(fd, target)
    os.closerange(3, max_descriptor())


def max_descriptor() -> int:
    try:
        return max(map(int, os.listdir("/proc/self/fd"))) + 1
    except OSError:
        return os.sysconf("SC_OPEN_MAX")


def reset_signals() -> None:
    """As a program finds them that a shell has started, but for Python's own two."""
    import signal

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def be_first_to_go() -> None:
    """When memory runs out, the kernel shall take the cell and not the worker."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("800")
    except OSError:
        pass


def limit_memory(megabytes) -> None:
    if megabytes:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (megabytes * 2**20, megabytes * 2**20))


def refresh(launch: dict) -> None:
    """What a fresh interpreter would have: its environment, arguments and streams."""
    import time

    replace_environment(launch["env"])
    time.tzset()
    sys.argv[:] = [__file__, launch["manifest"]]
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # the others are the Console's


def replace_environment(env: dict) -> None:
    """Change what differs: each change is a call into the C library, and most are none."""
    for name in [name for name in os.environ if name not in env]:
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def rehearse() -> None:
    """Do, to no effect, what a cell's process does, so that its pages are there when it counts."""
    import time

    for name, value in list(os.environ.items()):
        os.environ[name] = value
    time.tzset()
    exec(compile_cell("x = 1\nx"), {})
    json.loads(json.dumps({"source": "x = 1", "inputs": {}, "size": [1, 1.5, None, True]}))
    with open(os.devnull, "w", encoding="utf-8") as stream:
        stream.write("x")


def reseed() -> None:
    """Python's random seeds itself after a fork; numpy's does not, and tempfile keeps a choice."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(list(os.urandom(32)))  # as good as none, and six times as quick
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None
        tempfile._name_sequence = None


# --------------------------------------------------------------------------------------------
# Main
# --------------------------------------------------------------------------------------------


def main(arguments: list) -> None:
    if len(arguments) == 4 and arguments[0] == "--fork-server":
        serve_forks(int(arguments[1]), [name for name in arguments[3].split(",") if name])
    elif len(arguments) == 2 and arguments[0] == "--kill-tree":
        kill_trees([int(arguments[1])])
    elif len(arguments) == 1:
        end_process(run_cell(arguments[0]))
    else:
        complain("usage: python harness.py MANIFEST")
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
