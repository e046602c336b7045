"""Base class of errors that a user can fix. The command line prints their message without a traceback."""

import errno
from pathlib import Path

# A disk that is full, for all users or for this one.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class UserError(Exception):
    """Wrong input or a missing requirement. The message names it and says what to do."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows instead of a traceback, which would point into the package."""
        return [f"{type(self).__name__}: {self}"]


def os_error_message(error: OSError, place: Path | None = None) -> str:
    """Return one line with the file, the reason, and what to do if a disk or a quota is full or permissions are missing.

    place: file or folder to name if the error names none, as errors of writing to an open file.
    """
    reason = error.strerror or str(error)
    file = error.filename2 or error.filename or place  # of a copy, the target
    hint = ""
    if error.errno in DISK_FULL:
        hint = "; free space or quota there"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = "; change the permissions of this file or of its folder"
    return f"{file}: {reason}{hint}" if file else f"{reason}{hint}"
