"""Base class of errors that a user can fix. The command line prints their message without a traceback."""

import contextlib
import errno
import functools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # for all users, or for this one


class UserError(Exception):
    """Wrong input or a missing requirement. The message names it and says what to do."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows instead of a traceback, which would point into the package."""
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def exit_with_message() -> Iterator[None]:
    """End the program with one line if the block raises UserError. For modules that are started with `python -m`."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")


def install_hint(extra: str) -> str:
    """Return what installs an extra. No package index has the package, so it is installed from a clone."""
    return f"install it with `pip install '.[{extra}]'` in a clone of the repository"


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an exception, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def file_errors(place: Path | None = None, hint: str = "", before: str = "") -> Iterator[None]:
    """Convert an OSError of the block to a UserError: `before`, the file (else `place`), the reason, what to do, and `hint`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{before}{os_error_message(error, place)}{hint}") from error


@functools.cache
def program() -> str:
    """Return how this program is called: `rstar-lab` if that is on the PATH, else as it was called, such as .venv/bin/rstar-lab."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "rstar-lab" and shutil.which("rstar-lab") is None else "rstar-lab"


def as_called(text: str) -> str:
    """Return a message whose commands (`rstar-lab ...`) work as they are written in this shell."""
    return text.replace("`rstar-lab ", f"`{program()} ")


def os_error_message(error: OSError, place: Path | None = None) -> str:
    """Return one line with the file, the reason, and what to do if a disk or a quota is full or permissions are missing.

    place: file or folder to name if the error names none, as errors of writing to an open file.
    """
    reason = error.strerror or str(error)
    file = error.filename2 or error.filename or place  # of a copy, the target
    hint = ""
    if error.errno in DISK_FULL:
        hint = f" ({shutil.disk_usage(Path(file or '.').absolute().parent).free:,} bytes are free); free space or quota there"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = "; change the permissions of this file or of its folder"
    return f"{file}: {reason}{hint}" if file else f"{reason}{hint}"
