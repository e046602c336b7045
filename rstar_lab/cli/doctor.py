"""`rstar-lab doctor`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, check_output, examples, fail
from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.text import echo, visible

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab doctor runs/tiny-rl",
        "rstar-lab doctor trl_output --html diagnosis.html",
        "rstar-lab doctor verl_rollouts verl_metrics.jsonl --profile h100x8 --json",
    )
)
def doctor(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="A run, a folder of runs, or a log of verl, TRL and others.")
    ],
    rule: Annotated[list[str] | None, typer.Option(help="A rule of your own, module:NAME. Can be repeated.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Hardware profile of the runs: lost compute in GPU-hours, and with its price.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the diagnosis to this HTML file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a run does not learn: cause, evidence and remedy of each fault, from its log alone.

    Reads logs of this project and of other trainers without configuration, network or GPU. Exits with 1 if a fault was found, with 2 if
    a log cannot be read.
    """
    from rich.console import Console
    from rich.text import Text

    from rstar_lab.doctor import doctor as diagnose
    from rstar_lab.runs.files import atomic_write

    if html:
        check_output(html)
    try:
        with Console(stderr=True).status(Text(visible(f"reading {', '.join(map(str, paths))}"))):  # on a terminal only
            diagnosis = diagnose(*paths, rules=rule or [], profile=profile)
    except UserError as error:
        fail(str(error), 2)
    if html:
        with atomic_write(html) as file:
            file.write(diagnosis.to_html().encode("utf-8", "replace"))
    echo(json.dumps(diagnosis.as_dict(), allow_nan=False, default=str) if as_json else diagnosis.to_text())
    raise typer.Exit(1 if diagnosis.findings else 0)
