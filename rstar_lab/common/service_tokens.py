"""Tokens of services that listen on a port: made when a service starts, and found by clients of the same user.

Other users of a machine can connect to its loopback addresses. So a service without a configured token makes one and stores it in a
file that only its user can read; clients of this user look there. The name of the file is that of the host and the port. The service
holds a lock on the file, so that the file of a service that was killed is not used, and the next service removes it.

A client of `localhost` may connect to ::1 although the service listens on 127.0.0.1. So the service also holds the port of the other
address. If another process has that port already, only clients that name the address of the service find the token.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rstar_lab.common.errors import UserError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def _folder() -> Path:
    """Return the folder of token files."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser(), "rstar-lab", "tokens")


def _is_private(path: Path) -> bool:
    """Return whether a file or folder belongs to this user, and no other user can access it."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return False


def _name(host: str, port: int, *, exact: bool = False) -> str:
    """Return the name of the file. exact: for clients that name this loopback address."""
    address = host.replace(":", "_")
    if exact:
        return f"{socket.gethostname()}-{address}-{port}"
    return f"{socket.gethostname() if host in {*LOOPBACK, '0.0.0.0', '::'} else address}-{port}"


def _hold_other_loopback(host: str, port: int, stack: contextlib.ExitStack) -> bool:
    """Bind the port on the other loopback address, ::1 or 127.0.0.1, until the stack closes.

    Returns False if another process has it. No SO_REUSEADDR: with that option, another process could bind the port too.
    """
    family, address = (socket.AF_INET, "127.0.0.1") if ":" in host else (socket.AF_INET6, "::1")
    try:
        stack.enter_context(socket.socket(family)).bind((address, port))
    except OSError as error:  # a machine without this address cannot connect to it either
        return error.errno != errno.EADDRINUSE
    return True


def _is_stale(path: Path) -> bool:
    """Return whether a token file belongs to a service of this host that has ended. Locks of other hosts may not be visible here."""
    if not path.name.startswith(f"{socket.gethostname()}-"):
        return False
    with contextlib.suppress(OSError), path.open() as file:  # locked, or a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def find_token(url: str) -> str | None:
    """Return the token of a service that this user has started; None if there is none. A loopback address means this host."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:
        return None
    names = [_name(host, port, exact=True), _name(host, port)] if host in LOOPBACK else [_name(host, port)]
    for path in [_folder() / name for name in names]:
        if "/" not in path.name and _is_private(path.parent) and _is_private(path) and not _is_stale(path):
            with contextlib.suppress(OSError, ValueError):
                return path.read_text().strip() or None
    return None


@contextlib.contextmanager
def published_token(host: str, port: int) -> Iterator[tuple[str, Path]]:
    """Make a token for a service and store it in a file; yield both. The file is removed at the end.

    Raises UserError if no folder for the file can be created.
    """
    token = secrets.token_hex(24)
    with contextlib.ExitStack() as stack:
        shared = host not in LOOPBACK or _hold_other_loopback(host, port, stack)
        address = "127.0.0.1" if host == "localhost" else host
        path = _store(_name(host, port) if shared else _name(address, port, exact=True), token, stack)
        try:
            yield token, path
        finally:
            with contextlib.suppress(OSError):
                if path.read_text() == token:  # another service may use the port by now
                    path.unlink()


def _store(name: str, token: str, stack: contextlib.ExitStack) -> Path:
    """Write a token to a new file, remove those of services that were killed, and return the path.

    The file is open, and locked, until the stack closes.
    """
    folder = _folder()
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            raise PermissionError(f"{folder} belongs to another user, or others can access it")
        fd, temporary = tempfile.mkstemp(prefix=".", dir=folder)  # mode 0600, never an existing file
    except OSError as error:
        raise UserError(f"no folder for the token file ({error}); set XDG_STATE_HOME to a folder of yours") from error
    file = stack.enter_context(os.fdopen(fd, "w"))
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(token)
    file.flush()
    path = Path(temporary).replace(folder / name)
    for other in folder.iterdir():
        if _is_private(other) and _is_stale(other):
            other.unlink(missing_ok=True)
    return path
