"""The keys of recipes and profiles that the processes of a rehearsal read: how they are recorded, and the result."""

import os
from pathlib import Path

STARTUP = Path(__file__).parent / "startup"


def recording(folder: Path) -> dict[str, str]:
    """Return environment variables with which a process and its children record the keys that they read in `folder`.

    Python imports `startup/sitecustomize.py` at the start of each process.
    """
    paths = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
    return {"RSTAR_LAB_KEY_READS": str(folder), "PYTHONPATH": paths}


def recorded_reads(folder: Path) -> set[str]:
    """Return the fields that all processes have read, as `Class.field`."""
    return {line for path in folder.glob("*.txt") for line in path.read_text().splitlines()}
