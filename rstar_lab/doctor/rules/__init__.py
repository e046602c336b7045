"""The rules of the doctor: entries of `catalogue.toml`, with a check in one of the modules of this folder."""

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from rstar_lab.doctor.rule import Rule

_CATALOGUE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text("utf-8"))


def _rule(name: str, check: str, reads: list[str], **others: Any) -> Rule:
    module, _, function = check.partition(".")
    return Rule(name, tuple(reads), check=getattr(import_module(f"{__name__}.{module}"), function), **others)


RULES: tuple[Rule, ...] = tuple(_rule(name, **entry) for name, entry in _CATALOGUE.items())
