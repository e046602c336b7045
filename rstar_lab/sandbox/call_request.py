"""Converts a call into the request that a supervisor receives."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.call import Call, CallResult, OnOutput
from rstar_lab.sandbox.limits import MAX_STDIN_BYTES, Limits, check_memory, check_timeout
from rstar_lab.sandbox.runtime import protocol
from rstar_lab.sandbox.runtime.zygote import PRELOAD


def tier_of(code: str, preload: Sequence[str] = (), *, session: bool = False) -> str:
    """Return the name of the zygote that has imported the libraries of this code.

    Searches the code for the names of the libraries. A wrong zygote only costs time: the program imports what is missing.
    preload: modules of the additional zygote. session: whether the code is a cell; later cells may import more libraries.
    """
    if preload and (session or any(module.partition(".")[0] in code for module in preload)):
        return PRELOAD
    if "scipy" in code:
        return "scipy"
    if session or "sympy" in code or "mpmath" in code:
        return "sympy"
    return "numpy" if "numpy" in code or "pandas" in code else "bare"


def make_request(call: Call, limits: Limits, *, stream: bool = False) -> protocol.Request:
    """Return the seed and limits of a call as a request; `limits` has the defaults. stream: send output while the call runs.

    Raises ValueError for a value out of its range.
    """
    return protocol.Request(
        seed=call.seed,
        session=call.session is not None,
        stream=stream,
        timeout_s=limits.timeout_s if call.timeout_s is None else check_timeout(call.timeout_s),
        wall_slack_s=limits.wall_slack_s,
        memory_mb=limits.memory_mb if call.memory_mb is None else check_memory(call.memory_mb),
        processes=limits.processes,
        open_files=limits.open_files,
        file_mb=limits.file_mb,
        output_bytes=limits.output_bytes,
        value_bytes=limits.value_bytes,
    )


class Job(NamedTuple):
    """A call and the message that sends it to a supervisor.

    wall_s: seconds after which the supervisor ends the call. on_output: receives the output while the call runs.
    """

    call: Call
    message: bytes
    wall_s: float
    on_output: OnOutput | None


def make_job(call: Call, limits: Limits, on_output: OnOutput | None) -> Job:
    """Return the job of a call. Raises ValueError for a value out of its range, and for code or input that is too large."""
    request = make_request(call, limits, stream=on_output is not None)
    code, stdin = (text.encode("utf-8", "surrogatepass") for text in (call.code, call.stdin))
    for name, data in (("code", code), ("stdin", stdin)):
        if len(data) > MAX_STDIN_BYTES:
            raise ValueError(f"{name}: {len(data)} bytes; at most {MAX_STDIN_BYTES} are allowed")
    message = protocol.pack_request(request, code, stdin)
    return Job(call, message, request.timeout_s + request.wall_slack_s, on_output)


class Answer(NamedTuple):
    """What a supervisor returns. alive: the session's interpreter still runs. dying: killed processes are not gone yet."""

    result: CallResult
    alive: bool
    dying: bool


def unpack_answer(body: bytes, output_bytes: int) -> Answer:
    """Return the answer of a supervisor. output_bytes: limit of each output."""
    outcome, alive, dying, has_value, *cut, duration_s, value, stdout, _ = protocol.RESULT_HEAD.unpack_from(body)
    start = protocol.RESULT_HEAD.size
    middle, end = start + value, start + value + stdout
    result = CallResult(
        Outcome(protocol.OUTCOMES[outcome]),
        _text(body[middle:end], cut[0], output_bytes),
        _text(body[end:], cut[1], output_bytes),
        body[start:middle].decode("utf-8", "backslashreplace") if has_value else None,
        duration_s,
    )
    return Answer(result, alive, dying)


def _text(data: bytes, cut: bool, output_bytes: int) -> str:
    """Decode an output. Invalid bytes become `\\xNN`; the text is cut so that it is at most 2 * output_bytes in JSON."""
    text = data.decode("utf-8", "backslashreplace")
    note = f"\n[output cut after {len(data)} bytes]\n" if cut else ""
    limit = 2 * output_bytes
    while 6 * len(text) > limit and (size := len(json.dumps(text))) > limit:
        text = text[: len(text) * limit // size]
        note = f"\n[output cut: it is larger than {limit} bytes in JSON]\n"
    return text + note
