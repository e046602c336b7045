"""The processes of a sandbox, for tests."""

import contextlib
from pathlib import Path

import psutil

import rstar_lab

ROOT = Path(rstar_lab.__file__).parent.parent


def sandbox_processes(parent: int) -> list[psutil.Process]:
    """Return the zygotes, supervisors and programs of all sandboxes of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(parent).children(recursive=True)
    return []
