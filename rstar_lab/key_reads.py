"""Record which keys of recipes and profiles the processes of a job read. Used by `rstar-lab rehearse`.

With the environment variable RSTAR_LAB_KEY_READS=FOLDER, a process appends a line `Class.field` to FOLDER/<pid>.txt when it
reads a field of a section for the first time. Reads by validation, preflight and the list of unsupported keys do not count,
because they do not execute a key. A read in a property counts if the property is read elsewhere.
"""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

Model = TypeVar("Model", bound=type)

VARIABLE = "RSTAR_LAB_KEY_READS"
SECTIONS = (
    "rstar_lab.rl.recipe",
    "rstar_lab.rl.methods",
    "rstar_lab.rl.section",
    "rstar_lab.hardware.profiles",
    __name__,
)  # where sections and their properties are defined
CHECKS = ("pydantic", "rstar_lab.rl.preflight", "rstar_lab.rl.verl.unsupported")
DRY_RUN = "rstar_lab.rl.preflight.dry_run"  # it runs the trainer


def record_reads(model: Model) -> Model:
    """Class decorator for a base class of sections: record the reads of its fields. Without the variable it changes nothing."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return model
    seen: set[str] = set()
    path = Path(folder) / f"{os.getpid()}.txt"

    def getattribute(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in type(self).__pydantic_fields__:
            key = f"{type(self).__name__}.{name}"
            if key not in seen and _executes(sys._getframe(1)):
                seen.add(key)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(f"{key}\n")
        return value

    model.__getattribute__ = getattribute  # type: ignore[assignment,method-assign]
    return model


def _executes(frame: FrameType | None) -> bool:
    """Return whether a read comes from code that uses the key, and not from a section or from a check."""
    used = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(CHECKS) and not module.startswith(DRY_RUN):
            return False
        used = used or not module.startswith(SECTIONS)
        frame = frame.f_back
    return used


def recorded_reads(folder: Path) -> set[str]:
    """Return the fields that all processes have read, as `Class.field`."""
    return {line for path in folder.glob("*.txt") for line in path.read_text().splitlines()}
