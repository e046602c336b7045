"""`rstar-lab rehearse`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, ProfileName, RecipeName, examples

app = typer.Typer()


@app.command(epilog=examples("rstar-lab rehearse qwen3_14b_mi300x --profile mi300x_8x8"))
def rehearse(
    recipe: RecipeName,
    profile: ProfileName = "laptop",
    folder: Annotated[Path | None, typer.Option(help="Keep all files here. Default: a temporary folder.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run all phases of a job at small size on this machine, including a kill and a resume.

    Prints a table of phases and the keys that only the real machine can test. Exits with 0 if no phase failed.
    """
    from benchmarks.rehearsal.run import rehearse as run
    from rstar_lab.rl.overrides import parse_overrides

    raise typer.Exit(run(recipe, profile, parse_overrides(overrides or []), folder=folder, as_json=as_json))
