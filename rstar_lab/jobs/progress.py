"""How far a job is: the last step of its run."""

import json
from pathlib import Path
from typing import Any

TAIL_BYTES = 65_536  # longer than any line of metrics.jsonl


def last_metrics(run_dir: Path | None) -> dict[str, Any] | None:
    """Return the last complete line of a run's metrics.jsonl, without reading the rest of the file."""
    if run_dir is None or not (path := run_dir / "metrics.jsonl").exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    return json.loads(lines[-1]) if lines else None
