"""`rstar-lab rewind`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, RunsFolder, examples, find_run, print_result

app = typer.Typer()


@app.command(epilog=examples("rstar-lab rewind tiny-rl 30 runs-rewound --set rl.lr=1e-5"))
def rewind(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of an RL run, or its folder.")],
    step: Annotated[
        int, typer.Argument(metavar="STEP", help="A step to repeat; the newest checkpoint before it is used.")
    ],
    into: Annotated[Path, typer.Argument(metavar="INTO", help="New folder of runs, to which the run is copied.")],
    overrides: Overrides = None,
    functions: Annotated[
        list[str] | None,
        typer.Option("--functions", help="Function, command or address that the recipe may name. Repeatable."),
    ] = None,
    runs_dir: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Copy a run up to its newest checkpoint before STEP and write a recipe that continues from it. `--set` changes recipe keys.

    `rstar-lab train INTO/recipe.yaml` then trains the steps again. With --json: {"recipe"}.
    """
    from rstar_lab.rl.overrides import parse_overrides
    from rstar_lab.rl.training.rewind import rewind as prepare

    recipe = prepare(find_run(run, runs_dir), step, into, parse_overrides(overrides or []), functions or ())
    print_result(as_json, {"recipe": str(recipe)}, f"continue with: rstar-lab train {recipe}")
