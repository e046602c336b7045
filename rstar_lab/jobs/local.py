"""Jobs on this machine: a detached process that outlives the notebook."""

import contextlib
import os
import signal
import sys
from typing import Any

import psutil

from rstar_lab.hardware.processes import alive, end_processes, start_detached, wait_until
from rstar_lab.jobs.backend import Backend
from rstar_lab.jobs.store import GRACE_S, JobFolder, JobSpec


def _is_another(pid: int, created: float) -> bool:
    """Return whether another process has the id now: ids are reused."""
    with contextlib.suppress(psutil.Error):
        return abs(psutil.Process(pid).create_time() - created) >= 1
    return False


class Local(Backend):
    """Jobs as detached processes of this machine."""

    name = "local"

    def start(self, folder: JobFolder, spec: JobSpec) -> dict[str, Any]:
        """Start the supervisor in a new session; return its process id and start time."""
        pid = start_detached([sys.executable, "-m", "rstar_lab.jobs.supervisor", str(folder.path)], folder.log)
        return {"pid": pid, "created": psutil.Process(pid).create_time()}

    def state(self, folder: JobFolder, spec: JobSpec) -> str:
        """Return the state of a job that has no exit.json: "running", or "failed" if its supervisor was killed."""
        if not spec.handle:
            return "queued"
        return "running" if alive(**spec.handle) else "failed"

    def stop(self, folder: JobFolder, spec: JobSpec) -> None:
        """Ask the supervisor to end the job and wait for it. End the job's processes here if it does not."""
        supervisor = spec.handle
        if supervisor and alive(**supervisor):
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor["pid"], signal.SIGTERM)
            wait_until(lambda: not alive(**supervisor), GRACE_S + 20, every_s=0.05)
        root = supervisor["pid"] if supervisor and not _is_another(**supervisor) else None
        end_processes(spec.id, root=root, grace_s=0.5)
