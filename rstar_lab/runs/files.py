"""Files that are there whole or not at all: temporary file, fsync, rename, fsync of the folder."""

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
    """Make renames and removals inside `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Write `path` through a hidden temporary file; it takes its name only when the block ends without error."""
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
    """A full disk, a quota or missing rights in one line that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "steps finished before are kept; make room or give rights, then run the same command again"
        raise RunStoreError(f"cannot write {path}: {reason}; {hint}") from error


def write_json(path: Path, value: object) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(json_safe(value), indent=1, ensure_ascii=False) + "\n").encode())


def json_safe(value: Any) -> Any:
    """`value` as JSON can hold it: non-finite floats become null, numpy scalars plain numbers, paths text."""
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
    """Take a folder out of sight in one move, then delete what is in it."""
    hidden = folder.with_name(f".{folder.name}.removed")
    if hidden.exists():
        shutil.rmtree(hidden)
    if folder.exists():
        folder.replace(hidden)
        shutil.rmtree(hidden)
