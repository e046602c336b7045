"""`rstar-lab sft`, `train` and `run`: run a part of a recipe, or all of it."""

import json
from typing import TYPE_CHECKING

import typer

from rstar_lab.commands.shared import AsJson, Overrides, RecipeName, RunsDir, examples, read_recipe, run_async

if TYPE_CHECKING:
    from rstar_lab.rl.recipe import Recipe

app = typer.Typer()


@app.command(epilog=examples("rstar-lab sft tiny_fast"))
def sft(recipe: RecipeName, runs_dir: RunsDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Run the SFT of a recipe. The same command again resumes."""
    _run_parts(read_recipe(recipe, overrides, runs_dir), as_json, stages=False, evaluations=False)


@app.command(epilog=examples("rstar-lab train tiny_fast", "rstar-lab train my_recipe.yaml --set rl.lr=1e-6"))
def train(recipe: RecipeName, runs_dir: RunsDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Run the RL stages of a recipe, and its SFT first if that is missing. The same command again resumes."""
    _run_parts(read_recipe(recipe, overrides, runs_dir), as_json, stages=True, evaluations=False)


@app.command(epilog=examples("rstar-lab run tiny_fast", "rstar-lab run tiny_three_stage --runs-dir runs"))
def run(recipe: RecipeName, runs_dir: RunsDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Run a whole recipe: SFT, RL stages, evaluations. Finished parts are skipped; the same command again resumes."""
    _run_parts(read_recipe(recipe, overrides, runs_dir), as_json, stages=True, evaluations=True)


def _run_parts(recipe: "Recipe", as_json: bool, *, stages: bool, evaluations: bool) -> None:
    from rstar_lab.progress import Reporter
    from rstar_lab.rl.pipeline import run_recipe

    result = run_async(run_recipe(recipe, Reporter(as_json), stages=stages, evaluations=evaluations))
    if as_json:
        print(json.dumps(result))
        return
    if stages and not recipe.stages:
        print(f"recipe {recipe.name} has no stages: no RL was run")
    for name, path in result.items():
        if name.startswith("model_"):
            print(f"{name.removeprefix('model_')} model: {path}")
