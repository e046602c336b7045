"""`rstar-lab report`: write the report of a run, or the figures of the paper."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, RunsFolder, check_output, examples, find_run, print_result
from rstar_lab.common.errors import UserError

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab report tiny_fast-rl",
        "rstar-lab report tiny-rl --compare tiny_fast-rl --out report.html",
        "rstar-lab report --paper runs",
    )
)
def report(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run id, as `runs list` shows it, or a run's folder.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another run, for curves of both and a paired comparison.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write. Default: out/RUN.html.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="Number of trajectories to include.")] = 60,
    runs_dir: RunsFolder = Path("runs"),
    paper: Annotated[
        bool,
        typer.Option(
            "--paper", help="Write the figures and tables of the paper, from a folder of runs (RUN, or --runs-dir)."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run as one HTML file that needs no kernel and no network.

    It has a summary, curves, intervals, a searchable sample of trajectories with token values, the recipe and its provenance.
    """
    if run is None and not paper:
        raise UserError("report: give a RUN to report, or --paper RUNS")
    from rstar_lab.analysis.report import paper_html, report_html
    from rstar_lab.runs.files import atomic_write

    folder = None if paper else find_run(str(run), runs_dir)
    target = out or Path("out") / f"{folder.name if folder else 'paper'}.html"
    check_output(target)
    other = find_run(compare, runs_dir) if compare else None
    if folder is None:
        page = paper_html(Path(run) if run else runs_dir)
    else:
        page = report_html(folder, compare_with=other, sample=sample)
    with atomic_write(target) as file:
        file.write(page.encode())
    size = target.stat().st_size
    print_result(as_json, {"report": str(target), "bytes": size}, f"{target} ({size / 1e6:.1f} MB)")
