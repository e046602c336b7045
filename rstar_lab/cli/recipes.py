"""`rstar-lab recipes`."""

from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, examples, print_shipped

app = typer.Typer()


@app.command(epilog=examples("rstar-lab recipes", "rstar-lab recipes tiny_fast > mine.yaml"))
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print the file of this recipe. Default: list all recipes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes in the package, or print one. Their names can be used as RECIPE."""
    from rstar_lab.rl.overrides import recipe_file, shipped_recipes

    print_shipped(name, recipe_file, as_json, shipped_recipes())
