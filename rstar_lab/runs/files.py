"""Atomic file writes (temporary file, fsync, rename, fsync of the folder), and files in folders that others may have made.

A run folder can come from somebody else. Therefore no write follows a symbolic link, the names of temporary files cannot be
predicted, and only regular files are read.
"""

import contextlib
import fcntl
import glob
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pydantic_core import to_jsonable_python

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
def atomic_write(path: Path, needed: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces `path` when the block ends without error. The data goes to a hidden temporary file.

    The temporary file is new and has a random name. A symbolic link at `path` is replaced, not followed. Temporary files of
    killed writers are removed. needed: see `name_disk_errors`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with name_disk_errors(path, needed, temporary):
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


# In errors of torch and safetensors.
_FULL = ("No space left", "File too large", "Disk quota", "inline_container", "unexpected pos")


@contextmanager
def name_disk_errors(path: Path, needed: int | None = None, part: Path | None = None) -> Iterator[None]:
    """Convert errors of a full disk, a quota and permissions to RunStoreError that names the file; of a full disk also the bytes.

    needed: bytes that are written, at most; if it is not known, more than those of the unfinished file or folder `part` are needed.
    Errors of torch and safetensors for a full disk are no OSError.
    """
    try:
        yield
    except Exception as error:
        full = any(text in str(error) for text in _FULL)
        if isinstance(error, UserError) or not (full or isinstance(error, OSError)):
            raise
        reason = getattr(error, "strerror", None) or ("no space left on the device" if full else error)
        hint = "finished steps are kept; free disk space or fix the permissions, then run the same command again"
        space = space_of(path, needed, part) if full else ""
        raise RunStoreError(f"cannot write {path}: {reason}{space}; {hint}") from error


def space_of(path: Path, needed: int | None, part: Path | None = None) -> str:
    """Return how many bytes are needed, if that is known, and free where `path` is, for an error. part: see `name_disk_errors`."""
    there = next(folder for folder in path.absolute().parents if folder.exists())
    wanted = "" if needed is None else f"{needed:,} bytes are needed, "
    if needed is None and part is not None:
        written = sum(file.lstat().st_size for file in (part, *part.rglob("*")) if file.is_file())
        wanted = f"more than {written:,} bytes are needed, "
    return f" ({wanted}{shutil.disk_usage(there).free:,} bytes are free)"


def write_json(path: Path, value: object) -> None:
    data = (json.dumps(json_safe(value), indent=1, ensure_ascii=False) + "\n").encode()
    with atomic_write(path, len(data)) as file:
        file.write(data)


def json_safe(value: Any) -> Any:
    """Return `value` as JSON types: non-finite floats become None, numpy scalars become numbers, paths become text."""
    return to_jsonable_python(value, inf_nan_mode="null", fallback=lambda scalar: scalar.item())


def remove_folder(folder: Path) -> None:
    """Rename a folder to a hidden name, then delete it, so that readers never see a partly deleted folder."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    if folder.exists():
        folder.replace(hidden)
        shutil.rmtree(hidden)
