"""Read files, texts and answers that others may have made: of a known type, of bounded size and depth, with one exception.

Only regular files are opened, so that no reader waits for a pipe or reads a device. `kind` of a function is any type that pydantic can
validate: `dict[str, int]`, a TypedDict (of typing_extensions), a dataclass, a model. The value that is returned has this type.
"""

import ast
import csv
import gzip
import io
import json
import math
import os
import re
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import yaml
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypeVar

from rstar_lab.common.errors import UserError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T", default=Any)
_ANY: Any = Any  # the default of `kind`: any JSON value

# Bytes that are read at once. A file with holes takes no disk, and reading it would take all memory.
MAX_BYTES, MAX_JSON_BYTES = 2**30, 2**28
# A file may unpack to this many bytes, and to this many times its size beyond them.
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 256 * 2**20, 50
MAX_DEPTH = 100  # levels of JSON
MAX_DIGITS = 100_000  # of an integer; its conversion takes 0.05 s
MAX_YAML_VALUES = 100_000
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class DataError(UserError):
    """Data from others cannot be read, or have another form. The message names the file or the server, and the place in it."""


# What parsing data can raise, apart from errors of HTTP and YAML.
_ERRORS = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, NotImplementedError, OSError, RecursionError, TypeError,
    ValueError, csv.Error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@contextmanager
def reading(
    where: object, hint: str = "", error: type[Exception] = DataError, errors: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Convert every error that data can cause in the block to one that names its place.

    Args:
        where: File, server, or place in it, with which the message begins.
        hint: What to do, with which the message ends.
        error: Class of the exception.
        errors: More exceptions that the reader of a format raises.
    """
    known: tuple[type[Exception], ...] = (*_ERRORS, *errors) if error is DataError else (DataError, *_ERRORS, *errors)
    try:
        yield
    except known as caught:
        raise error(f"{where}{_reason(caught)[:300]}{hint}") from caught


def _reason(error: BaseException) -> str:
    match error:
        case ValidationError():
            first = error.errors(include_url=False)[0]
            parts = (".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, "))
            return "".join(f": {part}" for part in parts if part)
        case DataError():
            return f": {error}"
        case RecursionError():
            return " is nested too deeply"
        case MemoryError():
            return " takes more than the free memory"
        case OSError():
            return f" cannot be read: {error.strerror or error}"
        case json.JSONDecodeError():
            return f": not JSON: {error}"
        case UnicodeDecodeError():
            return f": not UTF-8: {error}"
        case ValueError() | csv.Error() if str(error):
            return f": {str(error).splitlines()[0]}"
    return f": {type(error).__name__}: {error}"


def open_bytes(path: str | Path, max_bytes: float = math.inf) -> BinaryIO:
    """Open a regular file, or one that `path` links to, for reading bytes. Use it in `reading(path)`.

    Raises OSError if it cannot be opened, also for a folder, a pipe and a device, and if it has more than `max_bytes` bytes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
        os.close(fd)
        regular = stat.S_ISREG(status.st_mode)
        raise OSError(f"it is {f'larger than {max_bytes:,} bytes' if regular else 'not a regular file'}")
    return os.fdopen(fd, "rb")


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file, unpacked if its name ends in `.gz`. Raises DataError."""
    with reading(path), open_bytes(path, max_bytes) as file:
        # A file that is not packed is read without `max_bytes`: that many bytes would be allocated.
        data = gzip.GzipFile(fileobj=file).read(max_bytes + 1) if Path(path).suffix == ".gz" else file.read()
        if len(data) > max_bytes:  # files of /proc have no size
            raise OSError(f"it is larger than {max_bytes:,} bytes")
        return data


def read_text(path: str | Path, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    r"""Return the text of a regular file in UTF-8, with `\n` as the line break. errors: as for `open`. Raises DataError."""
    data = read_bytes(path, max_bytes)
    with reading(path):
        return data.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes, where: object, kind: type[T] = _ANY) -> T:
    """Return the value of JSON text, at most 100 levels deep. A lone surrogate in a text becomes `\ufffd`.

    Args:
        text: The JSON text, which the caller has bounded.
        where: File, server, or place in it, for the error.
        kind: Type of the value.

    Raises:
        DataError: The text is no JSON, or its value has another type.
    """
    with reading(where), long_integers():
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(value)
        if "\\u" in text:
            value = without_surrogates(value)
    return value if kind is _ANY else check_type(value, kind, where)


def parse_value(text: str, where: object) -> Any:
    """Return the value of JSON text, or else of a Python literal, of which nothing is executed. Raises DataError."""
    with suppress(DataError):
        return parse_json(text, where)
    with reading(where, error=DataError, errors=(SyntaxError,)), long_integers():
        return ast.literal_eval(text.strip())


@contextmanager
def long_integers() -> Iterator[None]:
    """Let the block convert integers of up to 100,000 digits to and from text; Python's limit is 4,300. Test cases have such ones."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MAX_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        if (depth := depth + 1) > MAX_DEPTH:
            raise RecursionError
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]


def without_surrogates(value: Any) -> Any:
    """Return a JSON value with `\ufffd` for each lone surrogate, which neither UTF-8 nor a table can hold."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return [*map(without_surrogates, value)] if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check_type(value: object, kind: type[T], where: object) -> T:
    """Return a value, for example a row of a table, as a type. Raises DataError."""
    with reading(where):
        return cast(T, _adapter(cast(Any, kind)).validate_python(value))


def read_json(path: str | Path, kind: type[T] = _ANY, *, hint: str = "") -> T:
    """Return the value of a JSON file.

    kind: type of the value. hint: what to do, with which an error ends. Raises DataError, also if there is no such file.
    """
    try:
        return parse_json(read_text(path, MAX_JSON_BYTES).removeprefix("\ufeff"), path, kind)
    except DataError as error:
        raise DataError(f"{error}{hint}") from error


def answer_json(answer: "httpx.Response", kind: type[T] = _ANY) -> T:
    """Return the JSON value of an HTTP answer. Raises DataError, which names the server and the status."""
    return parse_json(answer.content, f"the answer of {answer.url} (status {answer.status_code})", kind)


def error_message(answer: "httpx.Response | SimpleNamespace") -> str:
    """Return what an HTTP answer says about its error: `error.message` or `detail` of JSON, else its text; at most 500 characters."""
    text = answer.content[:10_000].decode("utf-8", "replace")
    try:
        value = parse_json(text, answer.url, dict)
    except DataError:
        return text[:500]
    error = value.get("error", value)
    found = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return str(text if found is None else found)[:500]


# --- lines and archives


class _Bounded(io.RawIOBase):
    """Bytes that `source` reads from `file`, at most `most`, in lines of at most MAX_JSON_BYTES. Closing it closes the file."""

    def __init__(self, source: IO[bytes] | gzip.GzipFile, file: BinaryIO, most: float):
        self._source, self._file, self._left = source, file, most
        self._line = 0  # bytes of the line so far

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        end = data.rfind(b"\n") + 1
        self._line = len(data) - end + (0 if end else self._line)
        self._left -= len(data)
        if self._left < 0:
            raise OSError("it unpacks to far more than its size")
        if self._line > MAX_JSON_BYTES:
            raise OSError(f"it has a line of more than {MAX_JSON_BYTES:,} bytes")
        buffer[: len(data)] = data
        return len(data)


def max_unpacked(packed_bytes: int) -> int:
    """Return how many bytes a compressed file may unpack to."""
    return MAX_UNPACKED_BYTES + MAX_UNPACKED_RATIO * packed_bytes


def open_stream(path: str | Path) -> BinaryIO:
    """Open a regular file, unpacked if its name ends in `.gz`. Use it in `reading(path)`.

    Raises OSError if it cannot be opened, and when it is read, if a line is too long or it unpacks to far more than its size.
    """
    file = open_bytes(path)
    if Path(path).suffix != ".gz":
        return io.BufferedReader(_Bounded(file, file, math.inf), 2**20)
    most = max_unpacked(os.fstat(file.fileno()).st_size)
    return io.BufferedReader(_Bounded(gzip.GzipFile(fileobj=file), file, most), 2**20)


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of a file of JSON lines in UTF-8, also of a `.gz`. Empty lines are left out.

    Raises DataError, which names the line.
    """
    with reading(path), open_stream(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, parse_json(line, f"{path}, line {number}")


def check_zip(path: str | Path) -> None:
    """Raise DataError if a file is not regular, or is a ZIP archive that unpacks to far more than its size."""
    with reading(path), open_bytes(path) as file:
        if zipfile.is_zipfile(file):
            unpacked = sum(member.file_size for member in zipfile.ZipFile(file).infolist())
            if unpacked > max_unpacked(os.fstat(file.fileno()).st_size):
                raise ValueError(f"it unpacks to {unpacked / 1e9:.1f} GB")


# --- YAML


class YamlLoader(yaml.SafeLoader):
    """Loader of YAML that refuses merge keys (`<<`) for more than 10,000 keys: a few lines of them can stand for billions."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge" and isinstance(value, yaml.SequenceNode) and len(value.value) > 100:
                raise yaml.YAMLError("more than 100 mappings are merged")
        super().flatten_mapping(node)
        if len(node.value) > 10_000:
            raise yaml.YAMLError("more than 10,000 keys in a mapping")


def parse_yaml(text: str, where: object, loader: type[yaml.SafeLoader] = YamlLoader) -> Any:
    """Return the value of YAML text. Raises DataError.

    A few lines of aliases can stand for billions of values, or for one that contains itself; both are refused.
    """
    with reading(where):
        try:
            value = yaml.load(text, Loader=loader)
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error
        pending, seen = [value], 0
        while pending:
            if (seen := seen + 1) > MAX_YAML_VALUES:
                raise ValueError(f"with its aliases it has more than {MAX_YAML_VALUES:,} values")
            item = pending.pop()
            pending += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        return value
