"""Read the progress of a job from the end of its log and of its run's metrics."""

import contextlib
from pathlib import Path
from typing import Any

from rstar_lab.untrusted.files import DataError, open_bytes, parse_json

TAIL_BYTES = 65_536  # longer than any line of metrics.jsonl
LARGEST = 1e15  # of a number in an event
NUMBERS = {"done", "total", "reward", "error_rate", "loss", "step_s"}


def last_metrics(run_dir: Path | None) -> dict[str, Any] | None:
    """Return the last complete line of a run's metrics.jsonl, without reading the rest of the file; None if it is damaged."""
    lines = _tail(run_dir / "metrics.jsonl") if run_dir is not None else []
    return parse_event(lines[-1]) if lines else None


def progress(log: Path) -> dict[str, Any]:
    """Return the last progress event in a job's log, and its last text line under the key "line".

    An event has the keys event (the phase), done, total, and metrics such as reward and error_rate.
    """
    event: dict[str, Any] = {}
    text = None
    for line in reversed(_tail(log)):
        parsed = parse_event(line)
        if parsed is None:
            text = text or line.strip() or None
        elif "done" in parsed and not event:
            event = parsed
        if event and text:
            break
    return event | {"line": text}


def progress_of_host(value: dict[str, Any]) -> dict[str, Any]:
    """Return what `progress` returned on another machine, without fields of other types."""
    event = _checked_event(value)
    line = event.get("line")
    return (event if "done" in event else {}) | {"line": line if isinstance(line, str) else None}


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the JSON object of a log line, or None if the line is text. Fields of an event that have another type than those
    that the trainers write are left out: any program of the job can print a JSON line."""
    try:
        return _checked_event(parse_json(line, "log", dict))
    except DataError:
        return None


def _checked_event(event: dict[str, Any]) -> dict[str, Any]:
    event = {key: value for key, value in event.items() if key not in NUMBERS or _is_number(value)}
    if "done" in event:
        event = {"total": None, **event} if isinstance(event.get("event"), str) else {}
    return event


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST


def _tail(path: Path) -> list[str]:
    """Return the complete lines among the last 64 KiB of a file; none if it cannot be read."""
    with contextlib.suppress(OSError), open_bytes(path) as file:
        start = max(0, path.stat().st_size - TAIL_BYTES)
        file.seek(start)
        lines = file.read().rpartition(b"\n")[0].decode(errors="replace").splitlines()
        return lines[1:] if start and len(lines) > 1 else lines
    return []
