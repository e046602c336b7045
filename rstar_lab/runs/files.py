"""Atomic file writes (temporary file, fsync, rename, fsync of the folder), and files in folders that others may have made.

A run folder can come from somebody else. Therefore no write follows a symbolic link, the names of temporary files cannot be
predicted, and only regular files are read.
"""

import contextlib
import fcntl
import glob
import io
import json
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from rstar_lab.common.errors import UserError
from rstar_lab.runs.errors import RunStoreError


def sync_path(path: Path) -> None:
    """Fsync a file, or a folder, so that renames and deletions in it survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces `path` when the block ends without error. The data goes to a hidden temporary file.

    The temporary file is new and has a random name. A symbolic link at `path` is replaced, not followed. Temporary files of
    killed writers are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with name_disk_errors(path):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(fd, "wb") as file:
                fcntl.flock(fd, fcntl.LOCK_EX)  # until the file is closed: see _remove_abandoned
                yield file
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)
            sync_path(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _remove_abandoned(path: Path) -> None:
    """Delete the temporary files of `path` that are older than a minute and that no living process locks."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):  # it is locked, or its writer has just renamed it
            fd = open_regular(left, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(fd).st_mtime > 60:
                    left.unlink()
            finally:
                os.close(fd)


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file without following a symbolic link, and return its descriptor. flags: of `os.open`.

    Raises OSError if the path cannot be opened, also for a link, a folder, a pipe and a device.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path.name} is not a regular file")
    return fd


# Bytes of a file that is read at once. A file with holes takes no disk, and reading it would take all memory.
MAX_BYTES, MAX_JSON_BYTES = 2**30, 2**28


def open_to_read(path: str | Path, most: float = math.inf) -> BinaryIO:
    """Open a regular file, or one that `path` links to, for reading bytes. Never waits for the writer of a pipe.

    Raises OSError if it cannot be opened, also for a folder, a pipe and a device, and if it has more than `most` bytes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        os.close(fd)
        regular = stat.S_ISREG(status.st_mode)
        raise OSError(f"{Path(path).name} is {f'larger than {most} bytes' if regular else 'not a regular file'}")
    return os.fdopen(fd, "rb")


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a regular file of at most MAX_BYTES. Raises OSError as `open_to_read`."""
    with open_to_read(path, MAX_BYTES) as file:
        return file.read()


def read_text(path: str | Path, errors: str = "strict", most: int = MAX_BYTES) -> str:
    """Return the text of a regular file of at most `most` bytes, with `\\n` as the line break. Raises OSError as `open_to_read`,
    and UnicodeDecodeError (a ValueError)."""
    with io.TextIOWrapper(open_to_read(path, most), encoding="utf-8", errors=errors) as file:
        return file.read()


_MAX_DEPTH = 100


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text from an untrusted source. Raises ValueError, also if it is nested more than 100 levels deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        if (depth := depth + 1) > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    return value


def read_json(path: Path, check: Callable[[Any], object], hint: str = "") -> Any:
    """Return the value of a JSON file from an untrusted source; None if there is no such file.

    check: raises ValueError, KeyError, TypeError or AttributeError for a value of the wrong form. hint: what to do, for the error.
    Raises RunStoreError, which names the file, if it cannot be read or has another form.
    """
    try:
        text = read_text(path, most=MAX_JSON_BYTES)
        value = encodable(parse_json(text)) if "\\u" in text else parse_json(text)
        check(value)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunStoreError(f"{path} cannot be read: {error}{hint}") from error
    return value


def encodable(value: Any) -> Any:
    """Return a JSON value with `?` for each lone surrogate (such as `\\ud800`), which neither UTF-8 nor a table can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [*map(encodable, value)] if isinstance(value, list) else value


class _BoundedLines(io.RawIOBase):
    def __init__(self, file: IO[bytes]):
        self._file, self._line = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        end = data.rfind(b"\n") + 1
        self._line = len(data) - end + (0 if end else self._line)
        if self._line > MAX_JSON_BYTES:
            raise OSError(f"it has a line of more than {MAX_JSON_BYTES:,} bytes")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def bounded_lines(file: IO[bytes]) -> BinaryIO:
    """Return a file whose reads raise OSError if a line has more than MAX_JSON_BYTES: a file with holes is one line of any size."""
    return io.BufferedReader(_BoundedLines(file), 2**20)


def open_lines(
    path: str | Path, errors: str = "replace", encoding: str = "utf-8", newline: str | None = None
) -> IO[str]:
    """Open a regular file for reading lines of text. Raises OSError as `open_to_read` and `bounded_lines`.

    errors, encoding, newline: as for `open`. By default bytes that are not UTF-8 are replaced.
    """
    return io.TextIOWrapper(bounded_lines(open_to_read(path)), encoding=encoding, errors=errors, newline=newline)


def check_no_links(folder: Path) -> None:
    """Raise OSError if a folder contains a link or a pipe, or is a link of another user.

    A program that writes into the folder would follow the link, and could change or delete files elsewhere. Links inside of
    its checkpoints, and those that W&B makes in `wandb`, are never written through.
    """
    if folder.is_symlink() and folder.lstat().st_uid != os.geteuid():
        raise OSError(f"{folder.name} is a link of another user; remove it")
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink() or (not entry.is_dir() and stat.S_ISFIFO(entry.stat().st_mode)):
                    raise OSError(f"{Path(entry.path).relative_to(folder)} is a link or a pipe; remove it")
                path = Path(entry.path)
                if entry.is_dir() and path.parent.name != "checkpoints" and path != folder / "wandb":
                    pending.append(path)


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if it does not exist. Its content stays unchanged.

    Raises RunStoreError if the file cannot be opened, for example because it is a symbolic link.
    """
    with name_disk_errors(path):
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


_FULL = (
    "No space left",
    "File too large",
    "Disk quota",
    "inline_container",
    "unexpected pos",
)  # in errors of torch and safetensors


@contextmanager
def name_disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Convert errors of a full disk, a quota and permissions to RunStoreError that names the file.

    needed: bytes that are written. Errors of torch and safetensors for a full disk are no OSError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not any(text in str(error) for text in _FULL):
            raise
        reason = getattr(error, "strerror", None) or (
            str(error) if isinstance(error, OSError) else "no space left on the device"
        )
        hint = "finished steps are kept; free disk space or fix the permissions, then run the same command again"
        raise RunStoreError(f"cannot write {path}: {reason}{space_of(path, needed)}; {hint}") from error


def space_of(path: Path, needed: int | None) -> str:
    """Return how many bytes are needed and free where `path` is, for an error; empty if `needed` is not known."""
    there = next((folder for folder in path.parents if folder.exists()), None)
    if needed is None or there is None:
        return ""
    return f" ({needed:,} bytes are needed, {shutil.disk_usage(there).free:,} are free)"


def write_json(path: Path, value: object) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(json_safe(value), indent=1, ensure_ascii=False) + "\n").encode())


def json_safe(value: Any) -> Any:
    """Return `value` as JSON types: non-finite floats become None, numpy scalars become numbers, paths become text."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, str):  # numpy or torch scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def remove_folder(folder: Path) -> None:
    """Rename a folder to a hidden name, then delete it, so that readers never see a partly deleted folder."""
    hidden = folder.with_name(f".{folder.name}.removed")
    if hidden.exists():
        shutil.rmtree(hidden)
    if folder.exists():
        folder.replace(hidden)
        shutil.rmtree(hidden)
