"""Run `rstar-lab preflight` for a job, and summarize what the job requires: time, GPU-hours, cost and disk."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import run_child
from rstar_lab.hardware.profiles import Profile
from rstar_lab.untrusted.text import counted, duration, html, joined


class Stage(TypedDict):
    """Steps of a stage, and the estimated seconds of one."""

    name: str
    steps: int
    step_s: float


@dataclass(frozen=True)
class JobDescription:
    """Requirements of a job. Estimates are None if the profile has no peak rates.

    parts_h: hours of the SFT, filters and evaluations. not_counted: parts of the job that `hours` leaves out, because their
    files are missing. cost: GPU-hours times the profile's `hardware.price_per_gpu_hour`. disk_gb: checkpoints and run store.
    failed, warnings, skipped: messages of preflight. queue: output of Slurm's commands.
    """

    recipe: str
    profile: str
    host: str | None
    backend: str
    gpus: int
    stages: list[Stage] = field(default_factory=list)
    parts_h: dict[str, float] = field(default_factory=dict)
    not_counted: list[str] = field(default_factory=list)
    hours: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    disk_gb: float | None = None
    failed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    queue: str = ""

    @property
    def ready(self) -> bool:
        """Whether no check failed, so that `submit` accepts the job."""
        return not self.failed

    def rows(self) -> list[tuple[str, str]]:
        """Return the card's lines as (label, text)."""
        where = f"{self.profile} ({self.backend})" + (f" on {self.host}" if self.host else "")
        rows = [("recipe", self.recipe), ("profile", where)]
        for stage in self.stages:
            steps = f"{counted(stage['steps'], 'step')} of {stage['step_s']:.0f} s"
            rows.append((f"stage {stage['name']}", f"{steps}: {duration(stage['steps'] * stage['step_s'])}"))
        rows += [(part, duration(3600 * hours)) for part, hours in self.parts_h.items()]
        rows += [("not counted", part) for part in self.not_counted]
        if self.hours is not None and self.gpu_hours is not None:
            rows.append(("time", f"{duration(3600 * self.hours)} on {self.gpus} GPUs: {self.gpu_hours:,.0f} GPU-hours"))
        if self.cost is not None:
            rows.append(("cost", f"{self.cost:,.0f}"))
        if self.disk_gb is not None:
            rows.append(("disk", f"{self.disk_gb:,.1f} GB"))
        rows += [("queue", line) for line in self.queue.splitlines() if line.strip()]
        rows += [("failed", message) for message in self.failed]
        rows += [("warning", message) for message in self.warnings]
        return [*rows, *(("not checked", message) for message in self.skipped)]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {text}" for label, text in self.rows())

    def _repr_html_(self) -> str:
        row = "<tr><th style='text-align:left;vertical-align:top'>{}</th><td style='text-align:left'>{}</td></tr>"
        return html("<table>{}</table>", joined(html(row, *line) for line in self.rows()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ready": self.ready}


def summarize(recipe: str, profile: Profile, rows: list[dict[str, Any]], queue: str) -> JobDescription:
    """Return the description of a job from the rows of its preflight."""
    numbers = {row["check"]: row.get("numbers", {}) for row in rows if "check" in row}
    messages = {status: messages_of(rows, status) for status in ("fail", "warn", "skip")}
    time, disk, price = numbers.get("time", {}), numbers.get("disk", {}), profile.hardware.price_per_gpu_hour
    return JobDescription(
        recipe=recipe, profile=profile.name, host=None, backend=profile.backend, gpus=profile.hardware.gpus,
        stages=time.get("stages", []), parts_h=time.get("parts_h", {}), not_counted=time.get("not_counted", []),
        hours=time.get("hours"), gpu_hours=time.get("gpu_hours"),
        cost=time["gpu_hours"] * price if time and price is not None else None,
        disk_gb=disk["checkpoints_gb"] + disk["store_gb"] if disk else None,
        failed=messages["fail"], warnings=messages["warn"], skipped=messages["skip"], queue=queue,
    )  # fmt: skip


def run_preflight(
    recipe: str | Path,
    profile: str,
    overrides: Mapping[str, Any],
    trainer: str,
    log: Callable[[str], None] = print,
    *,
    runs_here: bool = False,
) -> None:
    """Run `rstar-lab preflight` for the trainer that will run. Raises UserError with the failed checks.

    runs_here: the job runs on this machine, so that missing GPUs are a failure.
    """
    rows = preflight_rows(recipe, profile, overrides, trainer)
    for message in messages_of(rows, "warn"):
        log(f"preflight: {message}")
    failed = messages_of(rows, "fail")
    if runs_here:
        failed += messages_of([row for row in rows if row.get("check") == "devices"], "skip")
    if failed:
        raise UserError("preflight failed: " + "; ".join(failed))


def messages_of(rows: list[dict[str, Any]], status: str) -> list[str]:
    """Return the messages of the checks with a status."""
    return [f"{row['check']}: {row['message']}" for row in rows if row.get("status") == status]


def preflight_rows(
    recipe: str | Path, profile: str, overrides: Mapping[str, Any], trainer: str
) -> list[dict[str, Any]]:
    """Run `rstar-lab preflight` and return its rows. Raises UserError if it prints none."""
    command = [sys.executable, "-m", "rstar_lab.cli", "preflight", str(recipe), "--profile", profile]
    command += ["--trainer", trainer, *set_options(overrides), "--json"]
    done = run_child(command)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise UserError("preflight failed: " + done.stderr.strip()[-800:])
    return rows


def set_options(overrides: Mapping[str, Any]) -> list[str]:
    """Return overrides as options of the command line."""
    return [
        part
        for key, value in overrides.items()
        for part in ("--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    ]


def queue_state(backend: str) -> str:
    """Return Slurm's lists of partitions and of this user's jobs; empty for another backend or without Slurm."""
    commands = [["sinfo", "-o", "%P %a %l %D %t %G"], ["squeue", "--me", "-o", "%i %j %T %M %l %D %R"]]
    outputs = []
    if backend == "slurm":
        with contextlib.suppress(FileNotFoundError, subprocess.TimeoutExpired):
            outputs = [subprocess.run(c, capture_output=True, text=True, timeout=30).stdout.strip() for c in commands]
    return "\n".join(outputs)
