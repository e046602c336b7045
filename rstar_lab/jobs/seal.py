"""Mark job files as written by this user. A runs folder may come from somebody else, and then its job files name hosts, ssh
options and token files that this user has not chosen."""

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError, os_error_message


def seal(content: dict[str, Any]) -> str:
    """Return the HMAC-SHA256 of JSON content under this user's key. Raises UserError if the key cannot be read or made."""
    text = json.dumps(content, sort_keys=True)
    return hmac.new(_key(), text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def is_sealed(content: dict[str, Any], value: object) -> bool:
    """Whether `value` is the seal that this user's key gives to the content. False if the key cannot be read."""
    try:
        return isinstance(value, str) and hmac.compare_digest(seal(content).encode(), value.encode())
    except UserError:
        return False


def key_file() -> Path:
    """Return the path of this user's key."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rstar-lab" / "key"


def _key() -> bytes:
    path = key_file()
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(temporary, path)  # does not replace the key that another process has made meanwhile
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        key = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot store the key that marks your jobs: {os_error_message(error, path)}") from error
    if len(key) < 32:
        raise UserError(
            f"{path}: damaged; delete it. Jobs over ssh that you submitted before must then be stopped on their host"
        )
    return key
