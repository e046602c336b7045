"""Copy the transcripts of one step from the host of a run, when one of them is opened."""

from pathlib import Path

from rstar_lab.errors import UserError
from rstar_lab.jobs.ssh import agent_of
from rstar_lab.jobs.ssh.mirror import checked, copy_files
from rstar_lab.jobs.store import JobFolder, check_name
from rstar_lab.runs.reader import read_mirror
from rstar_lab.runs.schema import step_range_of


def fetch_transcripts(run_dir: Path, step: int) -> int:
    """Copy messages and tokens of a step into a copied run; return the number of bytes.

    The run's mirror.json names a job, and the connection is that of the user's own job of this name beside the run.
    Raises ConnectionLost if the host cannot be reached, UserError if the run is not a copy, belongs to no job of the user,
    or has no transcripts of this step.
    """
    mirror = read_mirror(run_dir)
    if mirror is None:
        raise UserError(f"{run_dir} is not a copy of a run on another host")
    job_id = mirror.get("job")
    if not isinstance(job_id, str):
        raise UserError(
            f"the transcripts of run {run_dir.name} are not in this folder, and it names no job of yours from which they could be "
            "copied: ask whoever gave you the run for its transcripts"
        )
    folder = JobFolder.of(run_dir.absolute().parent, check_name(job_id, f"{run_dir / 'mirror.json'}: job"))
    spec = folder.spec()
    if "ssh" not in spec.handle:
        raise UserError(f"{run_dir / 'mirror.json'} names job {job_id}, which does not run on another host")
    agent = agent_of(spec)
    remote = agent.request("files", run_id=run_dir.name)
    names = [
        checked(name)
        for name in remote["files"]
        if name.startswith("transcripts/") and (span := step_range_of(Path(name))) and span[0] <= step <= span[1]
    ]
    if not names:
        raise UserError(f"run {run_dir.name} of job {job_id} has no transcripts of step {step}")
    copy_files(agent, remote["folder"], run_dir, names)
    return sum(remote["files"][name][0] for name in names)
