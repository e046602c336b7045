"""Copy the transcripts of one step from the host of a run, when one of them is opened."""

from pathlib import Path

from rstar_lab.errors import UserError
from rstar_lab.jobs.ssh import agent
from rstar_lab.jobs.ssh.mirror import copy_files
from rstar_lab.runs.reader import read_mirror
from rstar_lab.runs.schema import step_range_of


def fetch_transcripts(run_dir: Path, step: int) -> int:
    """Copy messages and tokens of a step into a copied run; return the number of bytes.

    Raises ConnectionLost if the host cannot be reached, UserError if the run is not a copy or has no transcripts of this step.
    """
    mirror = read_mirror(run_dir)
    if mirror is None:
        raise UserError(f"{run_dir} is not a copy of a run on another host")
    files = agent(mirror["handle"]).request("files", run_id=run_dir.name)["files"]
    names = [
        name
        for name in files
        if name.startswith("transcripts/") and (span := step_range_of(Path(name))) and span[0] <= step <= span[1]
    ]
    if not names:
        raise UserError(f"run {run_dir.name} on {mirror['host']} has no transcripts of step {step}")
    copy_files(agent(mirror["handle"]), mirror["folder"], run_dir, names)
    return sum(files[name][0] for name in names)
