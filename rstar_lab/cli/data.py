"""`rstar-lab data`: generate problems, prepare problem sets, convert and check conversations."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, check_output, examples, print_result
from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.text import counted, echo

app = typer.Typer()

Fields = Annotated[str, typer.Option(help="Column names of files, as question=Q,answer=A.")]


@app.command(epilog=examples("rstar-lab data synthesize --seed 1 --count 2000 --out problems.jsonl"))
def synthesize(
    out: Annotated[Path, typer.Option(help="Output file (.jsonl or .parquet).")],
    count: Annotated[int, typer.Option(help="Number of problems.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same problems.")] = 0,
    levels: Annotated[list[int] | None, typer.Option("--level", help="Use only this level. Can be repeated.")] = None,
    families: Annotated[
        list[str] | None, typer.Option("--family", help="Use only this family. Can be repeated.")
    ] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Problem file whose questions are not used. Can be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate problems with integer answers, from the families that the tiny recipes train on."""
    from rstar_lab.rl.data.sources import load_problems
    from rstar_lab.rl.problems import write_problems
    from rstar_lab.rl.synthetic import families as tiny

    taken = [problem for path in exclude or [] for problem in load_problems(path)]
    problems = tiny.synthesize(seed, count, levels=levels, families=families, exclude=taken)
    write_problems(out, problems)
    result = {"out": str(out), "problems": len(problems), "seed": seed}
    print_result(as_json, result, f"{counted(len(problems), 'problem')} in {out}")


@app.command(epilog=examples("rstar-lab data prepare dapo --against aime24 --against aime25 --out train.parquet"))
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Name of a data set (dapo, openmathreasoning, ...; downloaded from the Hugging Face hub), NAME=FILE (a file "
            "with the columns of that data set), FILE, or FILE:question=problem,answer=solution.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output file (.parquet or .jsonl). A report is written beside it.")],
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluation set, written like a SOURCE. Problems that overlap with it are removed. Can be repeated."
        ),
    ] = None,
    fields: Fields = "",
    any_answer: Annotated[bool, typer.Option("--any-answer", help="Also keep answers that are not integers.")] = False,
    ngram: Annotated[
        int, typer.Option(help="Number of consecutive shared words that counts as contamination.", min=1)
    ] = 8,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="Answers of a strong model: the folder of an evaluation run (runs/NAME), or rows with problem_id (or question) "
            "and answers."
        ),
    ] = None,
    difficulty: Annotated[
        Path | None,
        typer.Option(
            help="Rollouts of the current policy: a run folder (runs/NAME), or rows with problem_id and reward."
        ),
    ] = None,
    drop_bad_rows: Annotated[
        bool,
        typer.Option(
            "--drop-bad-rows",
            help="Skip invalid rows and list them in the report. Default: stop at the first invalid row.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a problem set for RL. A report beside it lists how many problems each filter dropped, with examples.

    Keeps integer answers and one label per question, removes duplicates, near-duplicates and problems of evaluation sets,
    checks labels against answers of a strong model, and stores the difficulty. Benchmarks (aime24, aime25, hmmt25, math500,
    livecodebench) are kept complete, so that results stay comparable. apps, taco, code_contests and livecodebench give
    problems with hidden test cases for the reward `tests`.
    """
    from rstar_lab.rl.data.prepare import FilterCount, report_path
    from rstar_lab.rl.data.prepare import prepare as run
    from rstar_lab.rl.data.sources import parse_fields

    def show(count: FilterCount) -> None:
        line = {"filter": count.name, "before": count.before, "dropped": count.dropped}
        text = f"{count.name:>16} {count.before:>9,} - {count.dropped:>7,} = {count.before - count.dropped:>9,}  {count.note}".rstrip()
        print_result(as_json, line, text)

    check_output(out)
    report = run(
        sources, out, against=against or [], fields=parse_fields(fields), any_answer=any_answer, ngram=ngram,
        answers=answers, difficulty=difficulty, drop_bad_rows=drop_bad_rows, on_filter=show,
    )  # fmt: skip
    for bad in [] if as_json else report.bad_rows:
        echo(f"bad row: {bad}")
    overlaps = {entry["name"]: entry["overlaps"] for entry in report.against}
    result = {"kept": report.kept, "overlaps": overlaps, "bad_rows": len(report.bad_rows), **report.output}
    print_result(as_json, result, f"{counted(report.kept, 'problem')} in {out}; report: {report_path(out)}")


@app.command(epilog=examples("rstar-lab data convert toolace toolace.json --out sft/toolace.jsonl"))
def convert(
    source: Annotated[str, typer.Argument(help="toolace, apigen_mt, glaive_v2, magicoder, tulu3_if or nemotron_chat.")],
    file: Annotated[Path, typer.Argument(help="The downloaded file: .jsonl, .json or .parquet.")],
    out: Annotated[Path, typer.Option(help="Output file: .jsonl, or .parquet in the format of verl's SFT.")],
    as_json: AsJson = False,
) -> None:
    """Convert a public conversation data set to SFT data and check each conversation.

    Prints the number of rejected rows for each reason, with an example.
    """
    from rstar_lab.rl.data.converters import CONVERTERS, ConversionReport
    from rstar_lab.rl.data.converters import convert as converted
    from rstar_lab.rl.problems import read_rows
    from rstar_lab.rl.renderers.conversations import write_conversations

    if source not in CONVERTERS:
        raise UserError(f"data convert: no converter {source!r}; choose from {', '.join(CONVERTERS)}")
    report = ConversionReport(source)
    write_conversations(out, converted(source, read_rows(file), str(file), report))
    result = {"source": report.source, "rows": report.rows, "converted": report.converted, "refused": report.refused}
    result |= {"examples": report.examples, "file": str(out)}
    lines = [f"{report.converted:,} of {report.rows:,} conversations in {out}"]
    for reason, count in report.refused.most_common():
        lines.append(f"{count:>9,} rejected: {reason} (example: {report.examples[reason]})")
    print_result(as_json, result, "\n".join(lines))
    raise typer.Exit(0 if report.converted else 1)


@app.command(epilog=examples("rstar-lab data lint sft/toolace.jsonl"))
def lint(
    file: Annotated[Path, typer.Argument(help="File of conversations, as `data convert` writes it, or of problems.")],
    fields: Fields = "",
    as_json: AsJson = False,
) -> None:
    """Check SFT conversations (roles, tool calls, format, control tokens) or problems (rows, repeated questions, answers).

    The exit code is 1 if there are faults.
    """
    from rstar_lab.rl.data.lint import lint as check
    from rstar_lab.rl.data.lint import lint_problems
    from rstar_lab.rl.data.sources import parse_fields
    from rstar_lab.rl.problems import read_rows
    from rstar_lab.rl.renderers.conversations import read_conversations

    first = next(read_rows(file), None)
    if first is None:
        raise UserError(f"{file}: no rows")
    if fields or not isinstance(first[1], dict) or "messages" not in first[1]:
        rows = set()
        for fault in lint_problems(file, parse_fields(fields)):
            rows.add(fault.row)
            print_result(as_json, asdict(fault), str(fault))
        count = sum(1 for _ in read_rows(file))
        print_result(as_json, {"problems": count, "faulty": len(rows)}, f"{len(rows):,} of {count:,} rows faulty")
        raise typer.Exit(1 if rows else 0)
    count = faulty = 0
    for conversation in read_conversations(file):
        count += 1
        findings = check(conversation)
        faulty += bool(findings)
        for finding in findings:
            line = {"conversation_id": conversation.conversation_id, "message": finding.message, "rule": finding.rule}
            print_result(as_json, {**line, "text": finding.text}, f"{conversation.conversation_id}: {finding}")
    print_result(as_json, {"conversations": count, "faulty": faulty}, f"{faulty:,} of {count:,} faulty")
    raise typer.Exit(1 if faulty else 0)
