"""Describe a job before it is submitted: time, GPU-hours, cost, disk, failed checks, and the state of the queue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rstar_lab.jobs.backends import choose
from rstar_lab.jobs.preflight import JobDescription

__all__ = ["JobDescription", "describe"]


def describe(
    recipe: str | Path,
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    host: str | None = None,
    command: str | None = None,
) -> JobDescription:
    """Run preflight and return the requirements of the job, without submitting it. The arguments are those of `submit`.

    With a host, or a profile with `backend: ssh`, preflight runs there. Raises UserError for an unknown profile or an
    unreachable host.
    """
    machine, backend = choose(profile, host=host)
    return backend.describe(recipe, profile, machine, dict(overrides or {}), host=host, command=command)
