"""`rstar-lab ablation`: compare the arms of an ablation."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, check_output, examples
from rstar_lab.untrusted.text import echo

app = typer.Typer(no_args_is_help=True, help="Compare the arms of an ablation.")


@app.callback()
def ablation() -> None:
    """Keep `report` a subcommand while it is the only one."""


@app.command(epilog=examples("rstar-lab ablation report runs --prefix ablation-"))
def report(
    source: Annotated[
        Path, typer.Argument(metavar="RUNS", help="Folder of runs, or a Parquet file written with --save-data.")
    ],
    control: Annotated[str, typer.Option(help="Label of the arm that the others are compared with.")] = "2x at random",
    prefix: Annotated[str, typer.Option(help="Use only the runs whose id starts with this.")] = "",
    arm: Annotated[list[str] | None, typer.Option(help="Arms in the order of the table. Default: all.")] = None,
    save_data: Annotated[
        Path | None,
        typer.Option(help="Write the sums of each step to this Parquet file; the report can be computed from it."),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Write the figure of held-out pass@1 and tool errors over tokens: .html, .png, .svg or .pdf."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the table of an ablation: value per arm, difference to the control paired by seed, 95% interval.

    An arm is the recipe key `label`, as notebook 06_ablation sets it; without labels, the recipe keys that differ between the runs.
    """
    from rstar_lab.analysis.ablation import ablation_report, ablation_sums, load_sums, plot_frontier
    from rstar_lab.analysis.runs import open_runs
    from rstar_lab.runs.files import atomic_write, json_safe
    from rstar_lab.runs.reader import run_folders

    for output in filter(None, (save_data, figure)):
        check_output(output)
    if source.is_file():
        sums = load_sums(source)
    else:
        ids = [folder.name for folder in run_folders(source) if folder.name.startswith(prefix)]
        sums = ablation_sums(open_runs(source, run_ids=ids))
    if save_data:
        with atomic_write(save_data) as file:
            sums.to_parquet(file, index=False)
    if figure:
        plot_frontier(sums, arm).save(figure, width=1100)
    result = ablation_report(sums, control=control, arms=arm)
    if as_json:
        for row in result.table.to_dict("records"):
            echo(json.dumps(json_safe(row)))
    else:
        echo(result.to_markdown(), end="")
