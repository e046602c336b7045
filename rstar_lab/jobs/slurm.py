"""Jobs on Slurm: an sbatch script starts Ray on every node of the allocation, if there are several, and runs the recipe."""

import math
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import wait_until
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.jobs.backend import Backend
from rstar_lab.jobs.render import sbatch_script
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.untrusted.files import read_text

QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESV_DEL_HOLD", "REQUEUE_HOLD"}
RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}
STATES_S = 1.0  # maximum age in seconds of the states that are read with one squeue
_states: dict[str, str] = {}
_states_read = -math.inf


class Slurm(Backend):
    """Jobs of the Slurm cluster of this machine."""

    name = "slurm"

    def start(self, folder: JobFolder, spec: JobSpec) -> dict[str, Any]:
        """Write job.sbatch into the job's folder and submit it."""
        script = folder.path / "job.sbatch"
        script.write_text(sbatch_script(load_profile(spec.profile), spec, folder.path))
        # By default sbatch copies the whole environment, including secrets, into the job's record.
        output = _run("sbatch", "--parsable", "--export=NONE", str(script))
        return {"slurm_id": output.strip().split(";")[0]}

    def rendered(self, machine: Profile, spec: JobSpec, folder: Path) -> str:
        """Return the batch script."""
        return sbatch_script(machine, spec, folder)

    def state(self, folder: JobFolder, spec: JobSpec) -> str:
        """Return the state of a job that has no exit.json. Raises UserError if the controller does not answer."""
        slurm_state = _slurm_state(spec)
        if slurm_state in QUEUED:
            return "queued"
        if slurm_state in RUNNING:
            return "running"
        return "stopped" if slurm_state == "CANCELLED" else "failed"

    def stop(self, folder: JobFolder, spec: JobSpec) -> None:
        """Cancel the job and wait until Slurm has ended it."""
        if "slurm_id" not in spec.handle:
            return
        _run("scancel", spec.handle["slurm_id"])
        wait_until(lambda: _slurm_state(spec) not in QUEUED | RUNNING, 90)

    def logs(self, folder: JobFolder, spec: JobSpec) -> str | None:
        """Return the output of the batch script, which precedes the run's own log."""
        path = folder.path / "slurm.out"
        return read_text(path, errors="replace") if path.exists() else None


def _slurm_state(spec: JobSpec) -> str:
    if "slurm_id" not in spec.handle:
        return "UNKNOWN"
    slurm_id = str(spec.handle["slurm_id"])
    if state := _states_of_my_jobs().get(slurm_id):
        return state
    # scontrol works without Slurm's accounting. It forgets a job some time after its end, but exit.json is written at the end.
    output = _run("scontrol", "show", "job", slurm_id, "-o", unknown="Invalid job id")
    return dict(field.split("=", 1) for field in output.split() if "=" in field).get("JobState", "UNKNOWN")


def _states_of_my_jobs() -> dict[str, str]:
    """Return {job id: state} of the user's jobs, read at most STATES_S ago: one request however many jobs a board has."""
    global _states, _states_read
    if time.monotonic() - _states_read > STATES_S:
        options = ("--all", "--array", "--states=all", f"--user={os.getuid()}", "--noheader", "--format=%i %T")
        _states = dict(line.split() for line in _run("squeue", *options).splitlines())
        _states_read = time.monotonic()
    return _states


def _run(*command: str, unknown: str = "") -> str:
    """Return the output of a command of Slurm; nothing if its error contains `unknown`. Raises UserError."""
    if not shutil.which(command[0]):
        raise UserError(f"{command[0]} is not installed here: submit from a login node of the Slurm cluster")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} did not answer within 60 s; check that the Slurm controller runs") from error
    message = "; ".join(dict.fromkeys((done.stderr.strip() or done.stdout.strip()).splitlines()))
    if done.returncode and not (unknown and unknown in message):
        raise UserError(f"{' '.join(command[:3])}: {message}")
    return "" if done.returncode else done.stdout
