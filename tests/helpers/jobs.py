"""Jobs whose command is a small program instead of a training run."""

import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rstar_lab.jobs.store import JobSpec


def job_spec(runs_dir: Path, job_id: str = "job", /, *, code: str = "", **fields: Any) -> JobSpec:
    """Return the description of a local job. code: program of its command. fields: what differs."""
    return JobSpec(**{
        "id": job_id, "recipe": "toy", "profile": "laptop", "backend": "local", "cwd": str(runs_dir), "runs_dir": str(runs_dir),
        "command": [sys.executable, "-c", textwrap.dedent(code)], "overrides": {}, "created": "2026-01-01T00:00:00",
    } | fields)  # fmt: skip


def until(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Wait until a condition is true and return its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)
    return value
