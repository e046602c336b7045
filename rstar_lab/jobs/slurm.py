"""Jobs on Slurm: an sbatch script starts Ray on every node of the allocation, if there are several, and runs the recipe."""

import subprocess
import time
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.jobs.render import sbatch_script
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.profiles import load_profile

QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESV_DEL_HOLD", "REQUEUE_HOLD"}
RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}


def start(folder: JobFolder, spec: JobSpec) -> dict[str, Any]:
    """Write job.sbatch into the job's folder and submit it."""
    script = folder.path / "job.sbatch"
    script.write_text(sbatch_script(load_profile(spec.profile), spec, folder.path))
    # By default sbatch copies the whole environment, secrets included, into the job's record.
    output = _run("sbatch", "--parsable", "--export=NONE", str(script))
    return {"slurm_id": output.strip().split(";")[0]}


def state(folder: JobFolder, spec: JobSpec) -> str:
    """Return the state of a job that has no exit.json. Raises UserError if the controller does not answer."""
    slurm_state = _slurm_state(spec)
    if slurm_state in QUEUED:
        return "queued"
    if slurm_state in RUNNING:
        return "running"
    return "stopped" if slurm_state == "CANCELLED" else "failed"


def stop(folder: JobFolder, spec: JobSpec) -> None:
    """Cancel the job and wait until Slurm has ended it."""
    if "slurm_id" not in spec.handle:
        return
    _run("scancel", spec.handle["slurm_id"])
    deadline = time.monotonic() + 90
    while _slurm_state(spec) in QUEUED | RUNNING and time.monotonic() < deadline:
        time.sleep(0.5)


def logs(folder: JobFolder, spec: JobSpec) -> str | None:
    """Return the output of the batch script, which precedes the run's own log."""
    path = folder.path / "slurm.out"
    return path.read_text(errors="replace") if path.exists() else None


def _slurm_state(spec: JobSpec) -> str:
    # scontrol works without accounting. It forgets a job after MinJobAge; exit.json is written before.
    if "slurm_id" not in spec.handle:
        return "UNKNOWN"
    try:
        output = _run("scontrol", "show", "job", spec.handle["slurm_id"], "-o")
    except UserError as error:
        if "Invalid job id" in str(error):
            return "UNKNOWN"
        raise
    fields = dict(field.split("=", 1) for field in output.split() if "=" in field)
    return fields.get("JobState", "UNKNOWN")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is not installed here: submit from a login node of the Slurm cluster") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} did not answer within 60 s; check that the Slurm controller runs") from error
    if done.returncode:
        raise UserError(f"{' '.join(command[:3])}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
