"""The rules of the doctor, one file each: its function `check`."""

from importlib import import_module
from pkgutil import iter_modules

from rstar_lab.doctor.rule import Rule

RULES: tuple[Rule, ...] = tuple(import_module(f"{__name__}.{module.name}").check for module in iter_modules(__path__))
