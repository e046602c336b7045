"""`rstar-lab sft` and `train`: run a part of a recipe."""

import typer

from rstar_lab.cli.run import run_parts
from rstar_lab.cli.shared import AsJson, Overrides, RecipeName, RunsDir, examples, read_recipe

app = typer.Typer()


@app.command(epilog=examples("rstar-lab sft tiny_fast"))
def sft(recipe: RecipeName, runs_dir: RunsDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Run the SFT of a recipe. The same command again resumes."""
    run_parts(read_recipe(recipe, overrides, runs_dir), as_json, stages=False, evaluations=False)


@app.command(epilog=examples("rstar-lab train tiny_fast", "rstar-lab train my_recipe.yaml --set rl.lr=1e-6"))
def train(recipe: RecipeName, runs_dir: RunsDir = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Run the RL stages of a recipe, and its SFT first if that is missing. The same command again resumes."""
    run_parts(read_recipe(recipe, overrides, runs_dir), as_json, stages=True, evaluations=False)
