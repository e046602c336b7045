"""Find the folder of runs for a notebook or command, independent of the current folder."""

import os
from pathlib import Path

from rstar_lab.runs.errors import RunStoreError


def find_runs_dir(runs_dir: str | Path = "", *, required: bool = False) -> Path:
    """Return the folder of runs as an absolute path; it may not exist yet. required: raise RunStoreError if it has no run.

    A given `runs_dir` is used as it is. Otherwise: the environment variable RSTAR_LAB_RUNS, else the nearest `runs`
    folder in the current folder or one above it, else `runs` beside the `notebooks` folder or in the current folder.
    """
    folder = _find(runs_dir)
    if required and not (folder / "run.json").exists() and not any(folder.glob("*/run.json")):
        raise RunStoreError(
            f"there is no run in {folder}: run `make demo` in the folder of the project, or set runs_dir"
        )
    return folder


def _find(runs_dir: str | Path) -> Path:
    if runs_dir:
        return Path(runs_dir).absolute()
    if configured := os.environ.get("RSTAR_LAB_RUNS"):
        return Path(configured).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if any((folder / "runs").glob("*/run.json")):
            return folder / "runs"
    return (here.parent if here.name == "notebooks" else here) / "runs"
