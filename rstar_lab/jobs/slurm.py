"""Jobs on Slurm: an sbatch script brings up Ray over the allocation, where there are several nodes, and runs the recipe."""

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
    # The user's environment may hold secrets, which sbatch would keep in the job's record: only what it needs is exported.
    said = _run("sbatch", "--parsable", "--export=NONE", str(script))
    return {"slurm_id": said.strip().split(";")[0]}


def state(folder: JobFolder, spec: JobSpec) -> str:
    found = _state(spec)
    if found in QUEUED:
        return "queued"
    if found in RUNNING:
        return "running"
    return "stopped" if found == "CANCELLED" else "failed"


def stop(folder: JobFolder, spec: JobSpec) -> None:
    """Cancel the job and wait until Slurm has ended it."""
    _run("scancel", spec.handle["slurm_id"])
    deadline = time.monotonic() + 90
    while _state(spec) in QUEUED | RUNNING and time.monotonic() < deadline:
        time.sleep(0.5)


def logs(folder: JobFolder, spec: JobSpec) -> str | None:
    """What the batch script said before the run's own log began."""
    path = folder.path / "slurm.out"
    return path.read_text(errors="replace") if path.exists() else None


def _state(spec: JobSpec) -> str:
    # scontrol needs no accounting; it forgets a job after MinJobAge, by when exit.json says how it ended.
    try:
        said = _run("scontrol", "show", "job", spec.handle["slurm_id"], "-o")
    except UserError as error:
        if "Invalid job id" in str(error):
            return "UNKNOWN"
        raise
    fields = dict(field.split("=", 1) for field in said.split() if "=" in field)
    return fields.get("JobState", "UNKNOWN")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is not here: submit from a login node of the Slurm cluster") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} gave no answer in 60 s: is the Slurm controller up?") from error
    if done.returncode:
        raise UserError(f"{' '.join(command[:3])}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
