"""`rstar-lab report`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.commands.shared import examples
from rstar_lab.errors import UserError

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab report tiny_fast-rl", "rstar-lab report tiny-rl --compare tiny_fast-rl --out report.html"
    )
)
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, as `runs list` shows it, or a run's folder.")],
    compare: Annotated[
        str | None, typer.Option(help="Another run, for curves of both and a paired comparison.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write. Default: out/RUN.html.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="Number of trajectories to include.")] = 60,
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Folder of runs.")] = Path("runs"),
) -> None:
    """Write a run as one HTML file that needs no kernel and no network.

    It has a summary, curves, intervals, a searchable sample of trajectories with token values, the recipe and its provenance.
    """
    from rstar_lab.analysis.report import report_html

    folder = _folder(run, runs_dir)
    other = _folder(compare, runs_dir) if compare else None
    target = out or Path("out") / f"{folder.name}.html"
    page = report_html(folder, compare_with=other, sample=sample)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page)
    print(f"{target} ({len(page) / 1e6:.1f} MB)")


def _folder(run: str, runs_dir: Path) -> Path:
    folder = Path(run) if (Path(run) / "run.json").exists() else runs_dir / run
    if not (folder / "run.json").exists():
        raise UserError(f"no run {run} in {runs_dir}/: `rstar-lab runs list` shows the runs")
    return folder
