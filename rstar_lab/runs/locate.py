"""Find the folder of runs for a notebook or command, independent of the current folder."""

import os
from pathlib import Path


def find_runs_dir(runs_dir: str | Path = "") -> Path:
    """Return the folder of runs as an absolute path; it may not exist yet.

    A given `runs_dir` is used as it is. Otherwise: the environment variable RSTAR_LAB_RUNS, else the nearest `runs`
    folder in the current folder or one above it, else `runs` beside the `notebooks` folder or in the current folder.
    """
    if runs_dir:
        return Path(runs_dir).absolute()
    if configured := os.environ.get("RSTAR_LAB_RUNS"):
        return Path(configured).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if any((folder / "runs").glob("*/run.json")):
            return folder / "runs"
    return (here.parent if here.name == "notebooks" else here) / "runs"
