"""Everything that can be known to go wrong, looked at before a GPU is touched. `rstar-lab preflight RECIPE --profile P`."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.profiles import load_profile
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.preflight import estimate, machine
from rstar_lab.rl.preflight import recipe as recipe_checks
from rstar_lab.rl.preflight.subject import NotNeeded, Skip, Subject, Warn


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    SKIP = "skip"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    message: str


CHECKS: dict[str, Callable[[Subject], str]] = {
    "unread keys": recipe_checks.unread_keys,
    "verl configuration": recipe_checks.verl_configuration,
    "tokens": recipe_checks.token_contract,
    "data": recipe_checks.data,
    "own functions": recipe_checks.own_functions,
    "sandbox": machine.sandbox,
    "memory": machine.gpu_memory,
    "batches": machine.batches,
    "disk": machine.disk,
    "GPU variables": machine.gpu_variables,
    "versions": machine.versions,
    "devices": machine.devices,
    "time": machine.duration,
}


def preflight(
    recipe: str, profile: str, overrides: Mapping[str, Any] | None = None, trainer: str | None = None
) -> Iterator[Finding]:
    """All findings, in order. A recipe or profile that cannot be read is a failure and ends the list."""
    own = {key.removeprefix("verl."): value for key, value in (overrides or {}).items() if key.startswith("verl.")}
    ours = {key: value for key, value in (overrides or {}).items() if not key.startswith("verl.")}
    machine_profile = recipe_error = None
    try:
        machine_profile = load_profile(profile)
        if trainer is not None:
            if trainer not in ("local", "verl"):
                raise UserError(f"--trainer {trainer}: choose local or verl")
            machine_profile = machine_profile.model_copy(update={"trainer": trainer})
    except UserError as error:
        recipe_error = error
    try:
        loaded = load_recipe(recipe, ours, machine_profile)
        yield Finding("recipe", Status.PASS, f"{loaded.name}: {len(loaded.stages)} stages, every key known")
    except UserError as error:
        yield Finding("recipe", Status.FAIL, str(error))
        return
    if machine_profile is None:
        yield Finding("profile", Status.FAIL, str(recipe_error))
        return
    yield Finding("profile", Status.PASS, f"{machine_profile.name}: {machine_profile.description}")
    subject = Subject(loaded, machine_profile, own)
    for name, check in CHECKS.items():
        try:
            yield Finding(name, Status.PASS, check(subject))
        except NotNeeded as reason:
            yield Finding(name, Status.PASS, f"not needed: {reason}")
        except Skip as reason:
            yield Finding(name, Status.SKIP, str(reason))
        except Warn as reason:
            yield Finding(name, Status.WARN, str(reason))
        except UserError as error:
            yield Finding(name, Status.FAIL, str(error))


def run_preflight(
    recipe: str,
    profile: str,
    overrides: Mapping[str, Any],
    *,
    trainer: str | None = None,
    strict: bool = False,
    as_json: bool = False,
) -> int:
    """Print the table, or one JSON object a line; returns the exit code: 1 for a failure, with `strict` for a skip too."""
    from rich.console import Console
    from rich.table import Table

    colours = {Status.PASS: "green", Status.WARN: "yellow", Status.SKIP: "cyan", Status.FAIL: "bold red"}
    table = Table("check", "status", "message", title=f"preflight {recipe} on {profile}")
    counts = dict.fromkeys(Status, 0)
    for finding in preflight(recipe, profile, overrides, trainer):
        counts[finding.status] += 1
        if as_json:
            print(
                json.dumps({"check": finding.check, "status": str(finding.status), "message": finding.message}),
                flush=True,
            )
        table.add_row(finding.check, f"[{colours[finding.status]}]{finding.status}[/]", finding.message)
    code = 1 if counts[Status.FAIL] or (strict and counts[Status.SKIP]) else 0
    if as_json:
        print(
            json.dumps(
                {str(status): count for status, count in counts.items()} | {"exit": code, "formula": estimate.FORMULA}
            )
        )
    else:
        console = Console()
        console.print(table)
        console.print(f"time: {estimate.FORMULA}", style="dim")
        console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return code
