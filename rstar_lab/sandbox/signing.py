"""Signs calls and results in Redis, so that write access to Redis alone allows neither running code nor forging results."""

import hashlib
import hmac
import os

from rstar_lab.errors import UserError

KEY = "RSTAR_LAB_SANDBOX_KEY"
MIN_KEY = 16


class InvalidSignatureError(Exception):
    """A call or result was not signed with the key of this process."""


class Signer:
    """Signs with HMAC-SHA256 and the key in the environment variable RSTAR_LAB_SANDBOX_KEY. Without a key, nothing is checked.

    All services and workers of a Redis must have the same key. Raises UserError if the key is too short.
    """

    def __init__(self) -> None:
        self._key = os.environ.get(KEY, "").encode()
        if self._key and len(self._key) < MIN_KEY:
            raise UserError(f"{KEY}: the key must have at least {MIN_KEY} characters; `openssl rand -hex 32` makes one")

    def sign_call(self, call_id: str, client: str, body: bytes) -> str:
        return self._sign(b"call", call_id.encode(), client.encode(), body)

    def sign_result(self, call_id: bytes, body: bytes) -> str:
        return self._sign(b"result", call_id, body)

    def check_call(self, call_id: bytes, client: str, body: bytes, signature: bytes) -> None:
        """Raise InvalidSignatureError unless the signature was made for this call, and for results to this client."""
        self._check(signature, b"call", call_id, client.encode(), body)

    def check_result(self, call_id: bytes, body: bytes, signature: bytes) -> None:
        """Raise InvalidSignatureError unless the signature was made for this result of this call."""
        self._check(signature, b"result", call_id, body)

    def _sign(self, *parts: bytes) -> str:
        if not self._key:
            return ""
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            mac.update(len(part).to_bytes(8, "little") + part)
        return mac.hexdigest()

    def _check(self, signature: bytes, *parts: bytes) -> None:
        if self._key and not hmac.compare_digest(signature, self._sign(*parts).encode()):
            raise InvalidSignatureError(f"no valid signature: set the same {KEY} for all services and workers")
