"""Cause, remedy and source of the rules, from `catalogue.toml`."""

import tomllib
from pathlib import Path

from rstar_lab.doctor.rule import Check, Rule

TEXTS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def listed(
    name: str, reads: tuple[str, ...], check: Check, *, steps: int = 1, rollouts: int = 1, evaluations: bool = False
) -> Rule:
    """Return the rule of this name with its texts in the catalogue; see `Rule` for the arguments."""
    return Rule(name, reads, **TEXTS[name], check=check, steps=steps, rollouts=rollouts, evaluations=evaluations)
