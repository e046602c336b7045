"""`rstar-lab inject`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, examples, run_async

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab inject",
        "rstar-lab inject stale-weights none --recipe tiny_fast",
        "rstar-lab inject adapter-lost fake-zeros",
        "rstar-lab inject --trainer trl",
    )
)
def inject(
    faults: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FAULT]...", help="Faults to inject. Default: those of the checks, and `none`."),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe to break: a file, or a name of `rstar-lab recipes`.")
    ] = "tiny_fast",
    trainer: Annotated[
        str, typer.Option(help="Trainer to break: rstar-lab, or trl (TRL's GRPOTrainer, installed at the first use).")
    ] = "rstar-lab",
    folder: Annotated[Path | None, typer.Option(help="Keep the runs here. Default: a temporary folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Break a short training run on purpose, one fault at a time, and report which check notices it.

    Faults of the checks: stale-weights, wrong-template, shifted-mask, no-log-probs, empty-outputs, wrong-reward-sign, repeated-problems,
    evaluation-in-training. The faults of docs/doctor.md run for 12 steps without the checks; the doctor must name them from
    the log. `none` is the control: nothing is broken, and no check may fire. Exits with 1 if a fault is
    not noticed, or if a check fires without a fault; with `--trainer trl`, only if TRL fails without a fault.
    """
    from benchmarks import faults as suite
    from rstar_lab.common.progress import Reporter

    names = faults or [*suite.FAULTS, suite.NONE.name]
    findings = run_async(suite.inject(recipe, names, Reporter(as_json), runs_dir=folder, trainer=trainer))
    raise typer.Exit(suite.print_findings(findings, trainer, as_json))
