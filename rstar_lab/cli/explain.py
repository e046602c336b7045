"""`rstar-lab explain`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, examples, find_run, print_result

app = typer.Typer()


@app.command(
    epilog=examples("rstar-lab explain tiny_fast-eval-sft tiny_fast-eval-rl", "rstar-lab explain runs/a runs/b --json")
)
def explain(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="Run id, or a run's folder.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run that is compared with it.")],
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Folder of runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Explain why two evaluations of the same problems differ.

    Compares problems, model, prompt and settings, grades the rollouts of both runs with both graders, and compares the rest with
    the noise of the samples. Names what the runs do not hold. Needs no model and no GPU.
    """
    from rstar_lab.doctor.explain import explain as compute

    found = compute(find_run(run_a, runs_dir), find_run(run_b, runs_dir))
    print_result(as_json, found.as_dict(), found.to_text())
