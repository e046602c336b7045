"""The rules of the doctor: entries of `catalogue.toml`, with a check in one of the modules of this folder."""

from importlib import import_module
from typing import Any

from rstar_lab.common.resources import package_toml
from rstar_lab.doctor.rule import Rule


def _rule(name: str, check: str, reads: list[str], **others: Any) -> Rule:
    module, _, function = check.partition(".")
    return Rule(name, tuple(reads), check=getattr(import_module(f"{__name__}.{module}"), function), **others)


RULES: tuple[Rule, ...] = tuple(
    _rule(name, **entry) for name, entry in package_toml(__file__, "catalogue.toml").items()
)
