"""`rstar-lab demo`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, RunsDir, examples, read_recipe, run_async

app = typer.Typer()


@app.command(epilog=examples("rstar-lab demo --fast", "rstar-lab demo --runs-dir runs --out out"))
def demo(
    fast: Annotated[
        bool, typer.Option("--fast", help="Train a shorter version, in about one and a half minutes.")
    ] = False,
    runs_dir: RunsDir = None,
    out: Annotated[Path, typer.Option(help="Folder for the executed notebook.")] = Path("out"),
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model from random weights to use the Python tool, and write a report.

    Runs SFT on executed traces, then GRPO-RoC against the sandbox, evaluates before and after, and executes a notebook with
    the results. The same command again resumes.
    """
    from rstar_lab.progress import Reporter
    from rstar_lab.rl.demo import run_demo

    recipe = read_recipe("tiny_fast" if fast else "tiny", overrides, runs_dir)
    result = run_async(run_demo(recipe, out, Reporter(as_json)))
    if as_json:
        print(json.dumps(result))
