"""`rstar-lab demo`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, RunsDir, check_output, echo, examples, read_recipe, run_async
from rstar_lab.common.errors import UserError

app = typer.Typer()


@app.command(
    epilog=examples("rstar-lab demo --fast", "rstar-lab demo --real", "rstar-lab demo --runs-dir runs --out out")
)
def demo(
    fast: Annotated[
        bool, typer.Option("--fast", help="Train a shorter version, in about one and a half minutes.")
    ] = False,
    real: Annotated[
        bool,
        typer.Option("--real", help="Train SmolLM2-135M-Instruct, a pretrained chat model, on word problems instead."),
    ] = False,
    runs_dir: RunsDir = None,
    out: Annotated[Path, typer.Option(help="Folder for the executed notebook.")] = Path("out"),
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model to use the Python tool, and write a report.

    The model has random weights and learns to compute; with --real it is a pretrained one and learns to solve word problems.
    Runs SFT on executed traces, then GRPO-RoC against the sandbox, evaluates before and after, and executes a notebook with
    the results. The same command again resumes.
    """
    check_output(out, folder=True)
    from rstar_lab.common.progress import Reporter
    from rstar_lab.rl.demo import run_demo

    if real and fast:
        raise UserError("demo: --real cannot be combined with --fast")
    recipe = read_recipe("smollm2_laptop" if real else "tiny_fast" if fast else "tiny", overrides, runs_dir)
    result = run_async(run_demo(recipe, out, Reporter(as_json)))
    if as_json:
        echo(json.dumps(result))
