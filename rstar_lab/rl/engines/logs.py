"""The end of an engine's log, for error messages."""

from pathlib import Path

TAIL_BYTES = 20_000


def end_of_log(log: Path | None, *, lines: int = 10) -> str:
    """Return the file and the last lines of a log that are not empty, to append to an error. Empty without a log."""
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    last = [f"  {line.rstrip()[:300]}" for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join([f"\nend of the log {log}:", *(last or ["  (empty)"])])
