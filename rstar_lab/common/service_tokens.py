"""Tokens of services that listen on a port: made when a service starts, and found by clients of the same user.

Other users of a machine can connect to its loopback addresses. So a service without a configured token makes one and stores it in a
file that only its user can read; clients of this user look there. The name of the file is that of the host and the port. The service
holds a lock on the file, so that the file of a service that was killed is not used, and the next service removes it.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from rstar_lab.common.errors import UserError

LISTENERS_S = 10.0
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def _folders() -> list[Path]:
    """Return the folders of token files: in the user's home, else (if that cannot be written) in the temporary folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return [Path(state, "rstar-lab", "tokens"), Path(tempfile.gettempdir(), f"rstar-lab-tokens-{os.getuid()}")]


def _is_private(path: Path) -> bool:
    """Return whether a file or folder belongs to this user, and no other user can access it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _name(host: str, port: int) -> str:
    everywhere = host in ("0.0.0.0", "::")
    return f"{socket.gethostname() if host in LOOPBACK or everywhere else host.replace(':', '_')}-{port}"


@lru_cache(maxsize=64)
def _listeners(port: int, period: int) -> set[int]:
    """Return the ids of the users who listen on a TCP port of this machine (Linux only; empty elsewhere).

    period: number of the current period of LISTENERS_S seconds. Reading the kernel's tables takes milliseconds.
    """
    users = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines():
                if f":{port:04X} " in line:
                    _, local, _, state, _, _, _, user, *_ = line.split()
                    if local.endswith(f":{port:04X}") and state == "0A":  # listens
                        users.add(int(user))
    return users


def _is_stale(path: Path) -> bool:
    """Return whether a token file belongs to a service of this host that has ended. Locks of other hosts may not be visible here."""
    if not path.name.startswith(f"{socket.gethostname()}-"):
        return False
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked, or a file system without locks
        return False
    return True


def find_token(url: str) -> str | None:
    """Return the token of a service that this user has started; None if there is none, or if another user listens on the port: a client
    of `localhost` may connect to ::1 although the service listens on 127.0.0.1.

    Args:
        url: address of the service. A loopback address means this host.
    """
    try:
        parts = urlsplit(url)
        name = _name(parts.hostname or "", parts.port or 0)
    except ValueError:
        return None
    for folder in _folders():
        path = folder / name
        if "/" not in name and _is_private(folder) and _is_private(path) and not _is_stale(path):
            if parts.hostname in LOOPBACK and _listeners(parts.port or 0, int(time.monotonic() // LISTENERS_S)) - {
                0,
                os.geteuid(),
            }:
                return None
            with contextlib.suppress(OSError, ValueError):
                return path.read_text().strip() or None
    return None


@contextlib.contextmanager
def published_token(host: str, port: int) -> Iterator[tuple[str, Path]]:
    """Make a token for a service and store it in a file; yield both. The file is removed at the end.

    Args:
        host: address that the service listens on.
        port: its port.

    Raises:
        UserError: no folder for the file can be created.
    """
    token = secrets.token_hex(24)
    with contextlib.ExitStack() as stack:
        path = _store(_name(host, port), token, stack)
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
    reasons = []
    for folder in _folders():
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            if not _is_private(folder):
                raise PermissionError(f"{folder} belongs to another user, or others can access it")
            fd, temporary = tempfile.mkstemp(prefix=".", dir=folder)  # mode 0600, never an existing file
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
        except OSError as error:
            reasons.append(str(error))
    raise UserError(f"no folder for the token file ({'; '.join(reasons)}); set XDG_STATE_HOME to a folder of yours")
