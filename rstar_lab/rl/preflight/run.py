"""Run all checks of a recipe on a profile, without using a GPU: `rstar-lab preflight RECIPE --profile P`."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import plain
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.preflight import estimate, machine
from rstar_lab.rl.preflight import recipe as recipe_checks
from rstar_lab.rl.preflight.context import CheckContext, NotNeeded, Skip, Warn
from rstar_lab.rl.verl.config import split_overrides
from rstar_lab.untrusted.text import counted


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    SKIP = "skip"
    FAIL = "fail"


# What a check raises.
STATUSES = {NotNeeded: Status.PASS, Skip: Status.SKIP, Warn: Status.WARN, UserError: Status.FAIL}


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    message: str
    numbers: dict[str, Any] = field(default_factory=dict)  # of the estimate, for programs


CHECKS: dict[str, Callable[[CheckContext], str | tuple[str, dict[str, Any]]]] = {
    "unread keys": recipe_checks.unread_keys,
    "verl configuration": recipe_checks.verl_configuration,
    "model": recipe_checks.model,
    "positions": recipe_checks.positions,
    "tokens": recipe_checks.token_contract,
    "data": recipe_checks.data,
    "sizes": recipe_checks.sizes,
    "repeated problems": recipe_checks.repeated_problems,
    "own functions": recipe_checks.own_functions,
    "sandbox": machine.sandbox,
    "memory": machine.gpu_memory,
    "batches": machine.batches,
    "parallelism": machine.parallelism,
    "container": machine.container,
    "programs": machine.programs,
    "disk": machine.disk,
    "GPU variables": machine.gpu_variables,
    "versions": machine.versions,
    "devices": machine.devices,
    "time": machine.duration,
}


def preflight(
    recipe: str, profile: str, overrides: Mapping[str, Any] | None = None, trainer: str | None = None
) -> Iterator[Finding]:
    """Yield the findings in order. A recipe or profile that cannot be read is a failure and ends the list.

    trainer: local or verl; default: that of the profile.
    """
    part = "profile"
    try:
        machine_profile = load_profile(profile)
        if trainer not in (None, "local", "verl"):
            raise UserError(f"--trainer {trainer}: choose local or verl")
        machine_profile = machine_profile.model_copy(update={"trainer": trainer or machine_profile.trainer})
        part = "recipe"
        ours, own = split_overrides(overrides or {}, machine_profile)
        loaded = load_recipe(recipe, ours, machine_profile)
    except UserError as error:
        yield Finding(part, Status.FAIL, str(error))
        return
    yield Finding("recipe", Status.PASS, f"{loaded.name}: {counted(len(loaded.stages), 'stage')}, all keys known")
    yield Finding("profile", Status.PASS, f"{machine_profile.name}: {machine_profile.description}")
    context = CheckContext(loaded, machine_profile, own, load_recipe(recipe, ours).model)
    for name, check in CHECKS.items():
        try:
            result = check(context)
            message, numbers = result if isinstance(result, tuple) else (result, {})
            yield Finding(name, Status.PASS, message, numbers)
        except (NotNeeded, Skip, Warn, UserError) as reason:
            status = next(status for kind, status in STATUSES.items() if isinstance(reason, kind))
            yield Finding(name, status, f"not needed: {reason}" if status is Status.PASS else str(reason))


def run_preflight(
    recipe: str, profile: str, overrides: Mapping[str, Any], *,
    trainer: str | None = None, strict: bool = False, as_json: bool = False,
) -> int:  # fmt: skip
    """Print the findings as a table, or as one JSON object per line. Returns 1 after a failure, with `strict` also after a skip.

    Raises UserError for a recipe or a profile that cannot be read. With `as_json`, this is a finding.
    """
    from rich.console import Console
    from rich.table import Table

    colours = {Status.PASS: "green", Status.WARN: "yellow", Status.SKIP: "cyan", Status.FAIL: "bold red"}
    table = Table("check", "status", "message", title=plain(f"preflight {recipe} on {profile}"))
    counts = dict.fromkeys(Status, 0)
    for finding in preflight(recipe, profile, overrides, trainer):
        counts[finding.status] += 1
        if finding.status == Status.FAIL and finding.check in ("recipe", "profile") and not as_json:
            raise UserError(finding.message)
        if as_json:
            row = {"check": finding.check, "status": str(finding.status), "message": finding.message}
            print(json.dumps(row | ({"numbers": finding.numbers} if finding.numbers else {})), flush=True)
        table.add_row(finding.check, plain(finding.status, colours[finding.status]), plain(finding.message))
    code = 1 if counts[Status.FAIL] or (strict and counts[Status.SKIP]) else 0
    if as_json:
        summary = {str(status): count for status, count in counts.items()}
        print(json.dumps(summary | {"exit": code, "formula": estimate.FORMULA}))
    else:
        console = Console()
        console.print(table)
        console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return code
