"""`rstar-lab recipes`."""

import typer

from rstar_lab.cli.shared import AsJson, examples, print_result

app = typer.Typer()


@app.command(epilog=examples("rstar-lab recipes"))
def recipes(as_json: AsJson = False) -> None:
    """List the recipes in the package. Their names can be used as RECIPE."""
    from rstar_lab.rl.overrides import shipped_recipes

    for name, summary in shipped_recipes().items():
        print_result(as_json, {"name": name, "summary": summary}, f"{name:22} {summary}")
