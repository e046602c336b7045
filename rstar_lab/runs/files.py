"""Atomic file writes: temporary file, fsync, rename, fsync of the folder."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rstar_lab.runs.errors import RunStoreError


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that renames and deletions in it survive a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces `path` when the block ends without error. The data goes to a hidden temporary file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with name_disk_errors(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def name_disk_errors(path: Path) -> Iterator[None]:
    """Convert OSError (full disk, quota, permissions) to RunStoreError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "finished steps are kept; free disk space or fix the permissions, then run the same command again"
        raise RunStoreError(f"cannot write {path}: {reason}; {hint}") from error


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
