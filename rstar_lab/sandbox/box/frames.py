"""What the sandbox and its keepers say to each other over a socket pair: a length, a kind, a body.

Requests come from the trusted side and are marshalled. Results hold bytes that a program wrote, so they are taken apart
by fixed lengths only.
"""

import marshal
import struct
from typing import NamedTuple

HEAD = struct.Struct("=Ic")
CALL, YIELD = b"c", b"y"
LONG, RESULT = b"l", b"r"
_RESULT = struct.Struct("=B?ddIII")

# Fixed by position: the outcomes a keeper can see.
OUTCOMES = ("ok", "syntax_error", "exception", "timeout", "memory", "output_limit", "killed", "sandbox_error")
HAS_VALUE = 1 << 31


class Request(NamedTuple):
    """One call as the keeper gets it; every limit is set."""

    code: bytes
    stdin: bytes
    seed: int | None
    timeout_s: float
    wall_slack_s: float
    memory_mb: int
    processes: int
    open_files: int
    file_mb: int
    output_bytes: int
    value_bytes: int
    session: bool


class Result(NamedTuple):
    """What the keeper saw. alive: the session's interpreter still runs."""

    outcome: str
    alive: bool
    duration_s: float
    cpu_s: float
    stdout: bytes
    stderr: bytes
    value: bytes | None


def pack_request(request: Request) -> bytes:
    body = marshal.dumps(tuple(request))
    return HEAD.pack(len(body), CALL) + body


def unpack_request(body: bytes) -> Request:
    return Request(*marshal.loads(body))


def pack_result(result: Result) -> bytes:
    value = result.value or b""
    head = _RESULT.pack(
        OUTCOMES.index(result.outcome),
        result.alive,
        result.duration_s,
        result.cpu_s,
        len(result.stdout),
        len(result.stderr),
        len(value) | (HAS_VALUE if result.value is not None else 0),
    )
    size = len(head) + len(result.stdout) + len(result.stderr) + len(value)
    return b"".join((HEAD.pack(size, RESULT), head, result.stdout, result.stderr, value))


def unpack_result(body: bytes) -> Result:
    outcome, alive, duration_s, cpu_s, stdout, stderr, value = _RESULT.unpack_from(body)
    out = _RESULT.size
    err, val = out + stdout, out + stdout + stderr
    return Result(
        OUTCOMES[outcome],
        alive,
        duration_s,
        cpu_s,
        bytes(body[out:err]),
        bytes(body[err:val]),
        bytes(body[val:]) if value & HAS_VALUE else None,
    )
