"""Converts the result of a supervisor into a CallResult."""

import json

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.call import CallResult
from rstar_lab.sandbox.runtime import protocol


def to_call_result(result: protocol.Result, output_bytes: int, queue_s: float, note: str = "") -> CallResult:
    """Return the CallResult. output_bytes: limit of each output. note: text that precedes stderr."""
    return CallResult(
        Outcome(result.outcome),
        _text(result.stdout, result.stdout_cut, output_bytes),
        note + _text(result.stderr, result.stderr_cut, output_bytes),
        None if result.value is None else result.value.decode("utf-8", "backslashreplace"),
        result.duration_s,
        queue_s,
    )


def _text(data: bytes, cut: bool, output_bytes: int) -> str:
    """Decode an output. Invalid bytes become `\\xNN`; the text is cut so that it is at most 2 * output_bytes in JSON."""
    text = data.decode("utf-8", "backslashreplace")
    note = f"\n[output cut after {len(data)} bytes]\n" if cut else ""
    limit = 2 * output_bytes
    while 6 * len(text) > limit and (size := len(json.dumps(text))) > limit:
        text = text[: len(text) * limit // size]
        note = f"\n[output cut: it is larger than {limit} bytes in JSON]\n"
    return text + note


def without_output(outcome: Outcome, duration_s: float, queue_s: float, note: str = "") -> CallResult:
    """Return a result without output of the program. note: its stderr."""
    return CallResult(outcome, "", note, None, duration_s, queue_s)
