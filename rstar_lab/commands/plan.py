"""`rstar-lab plan`."""

import json
from typing import Annotated

import typer

from rstar_lab.commands.shared import AsJson, Overrides, ProfileName, RecipeName, examples, read_recipe
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
    from rich.console import Console
    from rich.table import Table

    from rstar_lab.profiles import load_profile
    from rstar_lab.rl.preflight.plan import make_plan

    try:
        sizes = [int(size) for size in batches.split(",") if size]
    except ValueError:
        raise UserError(f"--batches {batches!r}: give numbers separated by commas, such as 256,512") from None
    if any(size < 1 for size in sizes):
        raise UserError("--batches: a batch has at least one problem")
    machine = load_profile(profile)
    made = make_plan(read_recipe(recipe, overrides, None), machine, stage=stage, batches=sizes)
    if as_json:
        print(json.dumps(made.to_json()))
        return
    table = Table(title=f"{made.recipe}, stage {made.stage}, on {made.profile}: predicted, not measured")
    for heading in ("mode", "GPUs", "batch", "step", "speed", "idle gen", "idle train", ""):
        table.add_column(heading, no_wrap=True)
    best = made.recommended
    for row in sorted(made.rows, key=lambda row: -row.rollouts_per_s):
        note = "recommended" if row is best else "" if row.fits else "does not fit"
        table.add_row(
            f"{row.mode} {row.max_staleness}" if row.mode == "async" else row.mode,
            "all in turn" if row.mode == "sync" else f"{row.trainer_gpus} + {row.generator_gpus}",
            str(row.problems_per_step),
            f"{row.step_s:.0f} s",
            f"{row.over_sync:.2f}x",
            f"{row.idle_generator:.0%}",
            f"{row.idle_trainer:.0%}",
            note,
            style="bold" if row is best else None,
        )
    console = Console(highlight=False)
    console.print(table)
    console.print("GPUs: trainer + generator. Speed: rollouts per second relative to sync. Idle: share of the time.")
    if not best.supported:
        console.print(f"The {machine.trainer} trainer of this profile does not support mode {best.mode}.")
