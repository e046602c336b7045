"""Processes: those of a job (also outside of its process tree), their memory and ports."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from rstar_lab.hardware.ends import wait_or_kill

JOB_VARIABLE = "RSTAR_LAB_JOB"
PR_SET_PDEATHSIG = 1
GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


def exit_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send a signal to this process when its parent ends, even if the parent is killed. Call it before exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def alive(pid: int, created: float) -> bool:
    """Return whether the process runs. created: its start time, because process ids are reused."""
    with contextlib.suppress(*GONE):
        process = psutil.Process(pid)
        return _runs(process) and abs(process.create_time() - created) < 1
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
    with contextlib.suppress(*GONE):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
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


def run_child(command: list[str], *, capture: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command as `subprocess.run` does. Ctrl-C in this process ends it by SIGTERM instead of SIGKILL, so that it cleans up."""
    pipe = subprocess.PIPE if capture else None
    with subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe, **options) as process:
        try:
            output, errors = process.communicate()
        except BaseException:
            process.terminate()
            wait_or_kill(process, 30.0)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def start_detached(command: list[str], log: Path, *, keeps: int | None = None) -> int:
    """Start a process that outlives this one, with its output at the end of the file `log`; return its id.

    keeps: a descriptor that it keeps open, with the lock of its file.
    """
    with log.open("ab") as output:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        kept = () if keeps is None else (keeps,)
        return subprocess.Popen(command, start_new_session=True, pass_fds=kept, **options).pid


def wait_until(condition: Callable[[], object], timeout_s: float, *, every_s: float = 0.5) -> bool:
    """Wait until a condition holds; return False after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port of an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def process_tree_bytes(pid: int, *, proportional: bool) -> int:
    """Return the memory of a process and its descendants in bytes. proportional: count shared pages once; slow."""
    total = 0
    with contextlib.suppress(*GONE):
        for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(*GONE):
                total += one.memory_full_info().pss if proportional else one.memory_info().rss
    return total


def release_free_heap() -> None:
    """Return free heap pages to the system. Batches of varying shape fragment the heap: without this, a process that trains
    the tiny model grows to three times its working set."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class PeakMemory:
    """Measures peak memory while its block runs. `gb`: the peak in 10^9 bytes, read when the resident size reaches a new maximum."""

    gb, _largest = 0.0, 0

    def _sample(self, pid: int) -> None:
        while True:
            if (size := process_tree_bytes(pid, proportional=False)) > self._largest:
                self._largest = size
                self.gb = max(self.gb, round(process_tree_bytes(pid, proportional=True) / 1e9, 2))
            if self._stop.wait(1.0):
                return

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(os.getpid(),), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
