"""Find and end all processes of a job, also those that have left its process tree."""

import contextlib
import ctypes
import os
import sys

import psutil

JOB_VARIABLE = "RSTAR_LAB_JOB"
PR_SET_CHILD_SUBREAPER = 36
GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, so that they can be found (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def alive(pid: int, created: float) -> bool:
    """Return whether the process runs. created: its start time, because process ids are reused."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - created) < 1
    except GONE:
        return False


def processes_of(job_id: str, *, root: int | None = None) -> list[psutil.Process]:
    """Return all processes of a job except the caller.

    A process belongs to the job if its environment has the job's variable, if it is in the session of `root`, or if it descends
    from such a process. The variable alone is not enough: programs that rename themselves (Ray, vLLM) overwrite their environment.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(*GONE, ProcessLookupError, PermissionError):
            in_session = root is not None and root in (process.pid, os.getsid(process.pid))
            if in_session or process.environ().get(JOB_VARIABLE) == job_id:
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
    """End every process of a job: SIGTERM, after `grace_s` seconds SIGKILL, repeated for processes that started meanwhile."""
    processes = processes_of(job_id, root=root)
    for process in processes:
        with contextlib.suppress(*GONE):
            process.terminate()
    psutil.wait_procs(processes, timeout=grace_s)
    for _ in range(5):
        remaining = processes_of(job_id, root=root)
        if not remaining:
            return
        for process in remaining:
            with contextlib.suppress(*GONE):
                process.kill()
        psutil.wait_procs(remaining, timeout=1)
