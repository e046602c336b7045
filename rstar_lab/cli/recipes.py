"""`rstar-lab recipes`."""

from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, examples, print_result

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

    if name is not None:
        text = recipe_file(name).read_text(encoding="utf-8")
        print_result(as_json, {"name": name, "text": text}, text.rstrip("\n"))
        return
    for recipe, summary in shipped_recipes().items():
        print_result(as_json, {"name": recipe, "summary": summary}, f"{recipe:22} {summary}")
