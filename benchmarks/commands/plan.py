"""`rstar-lab plan`."""

import json
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, ProfileName, RecipeName, echo, examples, read_recipe
from rstar_lab.common.errors import UserError

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
    from benchmarks.plan import make_plan, print_plan
    from rstar_lab.hardware.profiles import load_profile

    sizes = [size.strip() for size in batches.split(",") if size.strip()]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise UserError(f"--batches {batches!r}: give numbers separated by commas, such as 256,512")
    machine = load_profile(profile)
    made = make_plan(read_recipe(recipe, overrides, None), machine, stage=stage, batches=[int(size) for size in sizes])
    if as_json:
        echo(json.dumps(made.to_json()))
    else:
        print_plan(made, machine.trainer)
