"""`rstar-lab plan`."""

import json
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, ProfileName, RecipeName, examples, read_recipe
from rstar_lab.errors import UserError

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab plan qwen3_14b_mi300x --profile mi300x_8x8",
        "rstar-lab plan qwen3_14b_h100x8 --profile h100x8 --batches 64,128,256",
    )
)
def plan(
    recipe: RecipeName,
    profile: ProfileName = "mi300x_8x8",
    stage: Annotated[str | None, typer.Option(help="Stage of the recipe. Default: the first.")] = None,
    batches: Annotated[
        str, typer.Option(help="Values of problems_per_step to compare, such as 256,512. Default: the recipe's value.")
    ] = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Predict the step time of each training mode and split of the GPUs, and recommend one. Simulated, without a GPU."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from rstar_lab.hardware.profiles import load_profile
    from rstar_lab.resources import load_benchmark

    try:
        sizes = [int(size) for size in batches.split(",") if size]
    except ValueError:
        raise UserError(f"--batches {batches!r}: give numbers separated by commas, such as 256,512") from None
    if any(size < 1 for size in sizes):
        raise UserError("--batches: a batch has at least one problem")
    machine = load_profile(profile)
    made = load_benchmark("plan").make_plan(read_recipe(recipe, overrides, None), machine, stage=stage, batches=sizes)
    if as_json:
        print(json.dumps(made.to_json()))
        return
    table = Table(
        title=f"{made.recipe}, stage {made.stage}, on {made.profile}: predicted, not measured", box=SIMPLE_HEAD
    )
    for heading in ("mode", "GPUs", "batch", "step", "speed", "idle", ""):
        table.add_column(heading, no_wrap=True)
    best, runnable = made.recommended, made.runnable
    for row in sorted(made.rows, key=lambda row: -row.rollouts_per_s):
        notes = {"recommended": row is best, "does not fit": not row.fits, "not supported": not row.supported}
        table.add_row(
            row.label,
            row.gpus,
            str(row.problems_per_step),
            f"{row.step_s:.0f} s",
            f"{row.over_sync:.2f}x",
            f"{row.idle_generator:.0%}, {row.idle_trainer:.0%}",
            next((note for note, applies in notes.items() if applies), ""),
            style="bold" if row is best else None,
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "GPUs: trainer + generator; one number: both in turn. Speed: rollouts per second relative to sync. "
        "Idle: share of the time, generator and trainer."
    )
    if not best.supported:
        text = f"The {machine.trainer} trainer of this profile does not support {best.label} on {best.gpus} GPUs"
        if runnable:
            text += (
                f"; the fastest that it supports: {runnable.label} on {runnable.gpus} GPUs, {runnable.over_sync:.2f}x"
            )
        console.print(f"{text}.")
