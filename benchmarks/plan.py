"""Predict the step time of each mode, split of the GPUs and batch by simulating whole steps: `rstar-lab plan`.

The costs come from the formulas of `estimate` for the GPUs that generate and for those that train; `step_simulator` runs the
pacing code of the trainer with them. Predictions, not measurements: docs/async.md compares them with published steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import plotly.graph_objects as go
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.step_simulator import Costs, Workload, simulate
from rstar_lab.analysis.figure_theme import COLOURS, apply_theme
from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import plain
from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.context import Architecture, architecture_of
from rstar_lab.rl.recipe import Recipe, RlSection
from rstar_lab.rl.recipe.rl import Mode

STALENESS = (1, 2)  # values of rl.schedule.max_staleness to try in mode async
MOST_SPLITS = 5


@dataclass(frozen=True)
class PlanRow:
    """One way to run a stage.

    trainer_gpus, generator_gpus: both are all GPUs if colocated (the same GPUs generate and train in turn). over_sync: rollouts per
    second divided by those of sync with the recipe's batch. supported: whether the profile's trainer has the mode and the split.
    """

    mode: Mode
    max_staleness: int
    trainer_gpus: int
    generator_gpus: int
    problems_per_step: int
    step_s: float
    rollouts_per_s: float
    over_sync: float
    idle_generator: float
    idle_trainer: float
    fits: bool
    supported: bool
    colocated: bool

    @property
    def label(self) -> str:
        """The mode, with the staleness bound of async."""
        return f"{self.mode} {self.max_staleness}" if self.mode == "async" else self.mode

    @property
    def gpus(self) -> str:
        """GPUs of the trainer and of the generator; one number if colocated."""
        return str(self.trainer_gpus) if self.colocated else f"{self.trainer_gpus} + {self.generator_gpus}"


@dataclass(frozen=True)
class Plan:
    """All rows, the fastest that fits, and the fastest that the profile's trainer supports."""

    recipe: str
    profile: str
    stage: str
    rows: tuple[PlanRow, ...]

    @property
    def recommended(self) -> PlanRow:
        return _fastest([row for row in self.rows if row.fits] or self.rows)

    @property
    def runnable(self) -> PlanRow | None:
        rows = [row for row in self.rows if row.fits and row.supported]
        return _fastest(rows) if rows else None

    def to_json(self) -> dict[str, Any]:
        runnable = self.runnable
        return {
            "recipe": self.recipe,
            "profile": self.profile,
            "stage": self.stage,
            "rows": [asdict(row) for row in self.rows],
            "recommended": asdict(self.recommended),
            "runnable": asdict(runnable) if runnable else None,
        }


def _fastest(rows: Sequence[PlanRow]) -> PlanRow:
    """Return the fastest row; of rows within 2% the one with the lowest staleness."""
    best = max(row.rollouts_per_s for row in rows)
    close = [row for row in rows if row.rollouts_per_s >= 0.98 * best]
    return min(close, key=lambda row: (row.max_staleness, -row.rollouts_per_s))


def make_plan(recipe: Recipe, profile: Profile, *, stage: str | None = None, batches: Sequence[int] = ()) -> Plan:
    """Predict the steps of a stage (default: the first) for every mode, split and batch.

    batches: values of problems_per_step; default: the recipe's. Raises UserError if the profile has no GPU, or the model's
    shape or the stage is unknown.
    """
    if not profile.hardware.gpus:
        raise UserError(
            f"profile {profile.name} has no GPU: plan predicts steps on GPUs; choose --profile one_gpu or mi300x_8x8"
        )
    model = architecture_of(recipe.model)
    if model is None:
        raise UserError(f"the shape of model {recipe.model} is unknown: give a folder with config.json")
    stages = {entry.name: entry for entry in recipe.stages}
    name = stage or next(iter(stages), "")
    if name not in stages:
        raise UserError(f"the recipe has no stage {name!r}; it has {', '.join(stages) or 'none'}")
    rl = recipe.settings(stages[name])
    rows: list[PlanRow] = []
    for batch in batches or (rl.problems_per_step,):
        for row in _rows(recipe, rl.model_copy(update={"problems_per_step": batch}), profile, model):
            rows.append(row)
    base = next(row.rollouts_per_s for row in rows if row.mode == "sync")
    rows = [_with_ratio(row, base) for row in rows]
    return Plan(recipe.name, profile.name, name, tuple(rows))


def _with_ratio(row: PlanRow, base: float) -> PlanRow:
    return PlanRow(**(asdict(row) | {"over_sync": row.rollouts_per_s / base}))


def _rows(recipe: Recipe, rl: RlSection, profile: Profile, model: Architecture) -> Iterator[PlanRow]:
    gpus = profile.hardware.gpus
    response = estimate.MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens
    work = Workload(
        rl.problems_per_step,
        rl.rollouts_per_group,
        response,
        rl.limits.max_response_tokens,
        calls=estimate.CALLS_PER_ROLLOUT,
        tool_s=profile.sandbox.call_s,
    )
    choices: list[tuple[Mode, int, int, int]] = [("sync", 0, gpus, gpus)]
    choices += [("async", staleness, gpus, gpus) for staleness in STALENESS]
    for trainer in _splits(profile):
        choices.append(("one_step_off", 1, trainer, gpus - trainer))
        choices += [("async", staleness, trainer, gpus - trainer) for staleness in STALENESS]
    for mode, staleness, trainer, generator in choices:
        colocated = trainer + generator > gpus
        training = estimate.step_time(model, rl, _with_gpus(profile, trainer), recipe)
        costs = Costs(
            engines=max(1, generator // profile.engine.tensor_parallel),
            decode_s=estimate.decode_seconds(model, rl, profile),
            max_batch=int(estimate.replica_batch(model, recipe, rl, profile)),
            update_s=training.old_log_probs + training.update + training.checkpoint,
            weights_s=training.weights,
        )
        run = simulate(work, costs, mode, max_staleness=staleness, colocated=colocated)
        memory = estimate.memory(model, recipe, rl, _with_gpus(profile, trainer))
        fits = memory.fits if colocated else memory.training_peak <= memory.hbm and memory.kv_tokens >= memory.served
        yield PlanRow(
            mode=mode,
            max_staleness=staleness,
            trainer_gpus=trainer,
            generator_gpus=generator,
            problems_per_step=rl.problems_per_step,
            step_s=run.step_s,
            rollouts_per_s=rl.problems_per_step * rl.rollouts_per_group / run.step_s,
            over_sync=1.0,
            idle_generator=run.idle_generator,
            idle_trainer=run.idle_trainer,
            fits=fits,
            supported=mode == "sync" or colocated == (profile.trainer == "verl"),
            colocated=colocated,
        )


def _splits(profile: Profile) -> list[int]:
    """Return numbers of GPUs for training, around one half: whole nodes, or on one node multiples of the tensor-parallel
    size."""
    hardware = profile.hardware
    unit = hardware.gpus_per_node if hardware.nodes > 1 else profile.engine.tensor_parallel
    counts = [count for count in range(unit, hardware.gpus, unit) if (hardware.gpus - count) % unit == 0]
    middle = sorted(counts, key=lambda count: abs(count - hardware.gpus / 2))[:MOST_SPLITS]
    return sorted(middle)


def _with_gpus(profile: Profile, gpus: int) -> Profile:
    per_node = min(gpus, profile.hardware.gpus_per_node)
    hardware = profile.hardware.model_copy(update={"nodes": gpus // per_node, "gpus_per_node": per_node})
    return profile.model_copy(update={"hardware": hardware})


def print_plan(plan: Plan, trainer: str) -> None:
    """Print the rows, fastest first, and the recommendation. trainer: that of the profile."""
    table = Table(
        title=plain(f"{plan.recipe}, stage {plan.stage}, on {plan.profile}: predicted, not measured"), box=SIMPLE_HEAD
    )
    for heading in ("mode", "GPUs", "batch", "step", "speed", "idle", ""):
        table.add_column(heading, no_wrap=True)
    best, runnable = plan.recommended, plan.runnable
    chosen = runnable or best
    for row in sorted(plan.rows, key=lambda row: -row.rollouts_per_s):
        notes = {"recommended": row is chosen, "does not fit": not row.fits, "not supported": not row.supported}
        table.add_row(
            plain(row.label),
            plain(row.gpus),
            str(row.problems_per_step),
            f"{row.step_s:.0f} s",
            f"{row.over_sync:.2f}x",
            f"{row.idle_generator:.0%}, {row.idle_trainer:.0%}",
            next((note for note, applies in notes.items() if applies), ""),
            style="bold" if row is chosen else None,
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "GPUs: trainer + generator; one number: both in turn. Speed: rollouts per second relative to sync. "
        "Idle: share of the time, generator and trainer."
    )
    if not best.supported:
        text = f"The {trainer} trainer of this profile does not support {best.label} on {best.gpus} GPUs"
        if runnable:
            text += (
                f"; the fastest that it supports: {runnable.label} on {runnable.gpus} GPUs, {runnable.over_sync:.2f}x"
            )
        console.print(f"{text}.")


def plot_plan(plan: Plan, *, mode: str = "light") -> go.Figure:
    """Plot the predicted speed-up over sync of every row that fits; colours: modes. mode: "light" or "dark" page."""
    figure = go.Figure()
    rows = sorted((row for row in plan.rows if row.fits), key=lambda row: row.over_sync)
    for colour, name in zip(COLOURS, ("sync", "one_step_off", "async"), strict=False):
        chosen = [row for row in rows if row.mode == name]
        figure.add_bar(
            x=[row.over_sync for row in chosen],
            y=[f"{row.label}, {row.gpus} GPUs, batch {row.problems_per_step}" for row in chosen],
            name=name,
            orientation="h",
            marker_color=colour,
            customdata=[(row.step_s, row.idle_generator, row.idle_trainer) for row in chosen],
            hovertemplate=(
                "%{y}: %{x:.2f}x<br>step %{customdata[0]:.0f} s<br>idle: generator %{customdata[1]:.0%}, "
                "trainer %{customdata[2]:.0%}<extra></extra>"
            ),
        )
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=[f"{row.label}, {row.gpus} GPUs, batch {row.problems_per_step}" for row in rows],
    )
    figure.update_layout(
        title=f"predicted: {plan.recipe}, stage {plan.stage}, on {plan.profile}",
        xaxis_title="rollouts per second, relative to sync",
        height=160 + 22 * len(rows),
    )
    apply_theme(figure, mode)
    return figure
