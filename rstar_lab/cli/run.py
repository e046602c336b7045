"""`rstar-lab run`."""

import json
from typing import TYPE_CHECKING

import typer

from rstar_lab.cli.shared import AsJson, Overrides, RecipeName, RunsDir, examples, read_recipe, run_async
from rstar_lab.untrusted.text import echo

if TYPE_CHECKING:
    from rstar_lab.rl.recipe import Recipe

app = typer.Typer()


@app.command(epilog=examples("rstar-lab run tiny_fast", "rstar-lab run tiny_three_stage --runs-dir runs"))
def run(recipe: RecipeName, runs_dir: RunsDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Run a whole recipe: SFT, RL stages, evaluations. Finished parts are skipped; the same command again resumes."""
    run_parts(read_recipe(recipe, overrides, runs_dir), as_json, stages=True, evaluations=True)


def run_parts(recipe: "Recipe", as_json: bool, *, stages: bool, evaluations: bool) -> None:
    """Run parts of a recipe and print where the models are."""
    from rstar_lab.common.progress import Reporter
    from rstar_lab.rl.pipeline import run_recipe
    from rstar_lab.rl.resolved import resolve

    resolved = resolve(recipe, stages=recipe.stages if stages else (), model=True)
    result = run_async(run_recipe(resolved, Reporter(as_json), stages=stages, evaluations=evaluations))
    if as_json:
        echo(json.dumps(result))
        return
    if stages and not recipe.stages:
        echo(f"recipe {recipe.name} has no stages: no RL was run")
    for name, path in result.items():
        if name.startswith("model_"):
            echo(f"{name.removeprefix('model_')} model: {path}")
    for line in result.get("progress", ()):
        echo(line)
    if "nothing_learnt" in result:
        echo(result["nothing_learnt"])
