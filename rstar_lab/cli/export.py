"""`rstar-lab export` and `rstar-lab import`: rollouts for other programs, and rollouts of other programs as a run."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, RunName, RunsFolder, examples, find_run, print_result
from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.text import counted

app = typer.Typer()
FORMATS = ("sft", "sft-tokens", "preference")
SOURCES = ("inspect", "messages", "trl", "verl")


@app.command(
    epilog=examples(
        "rstar-lab export tiny_fast-rl --format preference",
        "rstar-lab export tiny_fast-rl --format sft --where 'reward > 0 AND errors = 0 AND p_format = 0' --out out/clean.jsonl",
    )
)
def export(
    run: RunName,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="sft (messages with tools), sft-tokens (exact tokens and labels) or preference (pairs of one group).",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="New .jsonl or .parquet file. Default: in out/.")] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="FILTER",
            help="Rollouts to export: an SQL expression over the columns, or a filter as a JSON object. Default: sft and "
            "sft-tokens, those with a reward that were not truncated; preference, those not truncated.",
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Problem file of an evaluation; rollouts that share 13 words in a row with it are left out.",
        ),
    ] = None,
    runs_dir: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Write the rollouts of a run for other programs, with their provenance, and print what was left out.

    A card is written beside the file. `rstar-lab sft` reads the format sft: name the file in `sft.conversations`.
    """
    from rstar_lab.analysis import export_preferences, export_sft, open_runs
    from rstar_lab.untrusted.files import parse_json

    if format not in FORMATS:
        raise UserError(f"--format {format}: choose from {', '.join(FORMATS)}")
    folder = find_run(run, runs_dir)
    runs, out = open_runs(folder), out or Path("out") / f"{folder.name}-{format}.jsonl"
    chosen = parse_json(where, "--where", dict) if where and where.lstrip().startswith("{") else where
    if format == "preference":
        exported = export_preferences(runs, out, chosen, against=_questions(against))
    else:
        exported = export_sft(runs, out, chosen, tokens=format == "sft-tokens", against=_questions(against))
    lines = [f"{exported.path}: {exported.written:,} written"]
    lines += [f"left out: {count:,} ({reason})" for reason, count in exported.left_out.most_common()]
    print_result(as_json, exported.as_dict(), "\n".join([*lines, *(f"note: {note}" for note in exported.notes)]))


def _questions(files: list[Path] | None) -> dict[str, list[str]]:
    """Return the questions of problem files, by the name of the file."""
    from rstar_lab.rl.data.sources import load_problems

    return {file.stem: [problem.question for problem in load_problems(file)] for file in files or ()}


@app.command("import", epilog=examples("rstar-lab import rollouts.jsonl --format messages"))
def import_run(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="File or folder of the other program.")],
    format: Annotated[str, typer.Option("--format", help="inspect, messages, trl or verl.")],
    run_id: Annotated[str | None, typer.Option(help="Id of the new run. Default: from the source.")] = None,
    runs_dir: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Import rollouts of another program as a run, for the inspector, the curves and the reports."""
    from rstar_lab import analysis

    if format not in SOURCES:
        raise UserError(f"--format {format}: choose from {', '.join(SOURCES)}")
    if not source.exists():
        raise UserError(f"import: {source} does not exist")
    folder = getattr(analysis, f"import_{format}")(source, runs_dir, run_id=run_id)
    count = len(analysis.open_runs(folder).trajectories())
    result = {"run": folder.name, "path": str(folder), "rollouts": count}
    print_result(as_json, result, f"{folder}: {counted(count, 'rollout')}")
