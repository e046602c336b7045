"""The processes of a job, however far they have wandered from the one that was started."""

import contextlib
import ctypes
import os
import sys

import psutil

JOB_VARIABLE = "RSTAR_LAB_JOB"
PR_SET_CHILD_SUBREAPER = 36
GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


def adopt_orphans() -> None:
    """Make this process the parent of grandchildren whose parent died, so that none is out of reach (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def alive(pid: int, created: float) -> bool:
    """Does this very process run? The start time tells it from a later one with the same number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - created) < 1
    except GONE:
        return False


def processes_of(job_id: str, *, root: int | None = None) -> list[psutil.Process]:
    """All processes of a job but the caller: by the job's variable, by the session of `root`, and all descendants.

    The variable alone is not enough: programs that rename themselves (Ray, vLLM) overwrite their environment.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(*GONE, ProcessLookupError, PermissionError):
            mine = root is not None and root in (process.pid, os.getsid(process.pid))
            if mine or process.environ().get(JOB_VARIABLE) == job_id:
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except GONE:
        return False


def end_processes(job_id: str, *, root: int | None = None, grace_s: float = 3.0) -> None:
    """End every process of a job: politely, then by force, and again until none is left."""
    asked = processes_of(job_id, root=root)
    for process in asked:
        with contextlib.suppress(*GONE):
            process.terminate()
    psutil.wait_procs(asked, timeout=grace_s)
    for _ in range(5):
        left = processes_of(job_id, root=root)
        if not left:
            return
        for process in left:
            with contextlib.suppress(*GONE):
                process.kill()
        psutil.wait_procs(left, timeout=1)
