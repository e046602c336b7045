"""Record which keys of recipes and profiles a process of a rehearsal reads.

Python imports this module when a process starts with this folder in PYTHONPATH (`benchmarks.rehearsal.key_reads`). The process
appends a line `Class.field` to FOLDER/<pid>.txt when it reads a field of a section for the first time; FOLDER is the variable
RSTAR_LAB_KEY_READS. Reads by validation, preflight and the list of unsupported keys do not count, because they do not execute a
key. A read in a property counts if the property is read elsewhere.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

BASES = {"rstar_lab.rl.section": "Section", "rstar_lab.hardware.profiles": "ProfileSection"}
SECTIONS = ("rstar_lab.rl.recipe", "rstar_lab.rl.methods", *BASES)  # where sections and their properties are defined
CHECKS = ("pydantic", "rstar_lab.rl.preflight", "rstar_lab.rl.verl.unsupported")


class Finder:
    """Finds the modules of BASES, and changes the base class of the sections after the import."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in BASES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            record_reads(getattr(module, BASES[name]))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def record_reads(model: type) -> None:
    """Record the reads of the fields of all subclasses of `model`."""
    seen: set[str] = set()

    def getattribute(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in type(self).__pydantic_fields__:
            key = f"{type(self).__name__}.{name}"
            if key not in seen and _executes(sys._getframe(1)):
                seen.add(key)
                path = Path(os.environ["RSTAR_LAB_KEY_READS"]) / f"{os.getpid()}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(f"{key}\n")
        return value

    model.__getattribute__ = getattribute  # type: ignore[assignment,method-assign]


def _executes(frame: FrameType | None) -> bool:
    """Return whether a read comes from code that uses the key, and not from a section or from a check."""
    used = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(CHECKS):
            return False
        used = used or not module.startswith(SECTIONS)
        frame = frame.f_back
    return used


if "RSTAR_LAB_KEY_READS" in os.environ:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
