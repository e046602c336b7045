"""`rstar-lab data`: make problems, prepare those of others, turn their conversations into ours."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Fields = Annotated[str, typer.Option(help="Names in plain files: question=problem,answer=final_answer.")]


@app.command()
def synthesize(
    out: Annotated[Path, typer.Option(help="Where the problems go (.jsonl or .parquet).")],
    count: Annotated[int, typer.Option(help="How many problems.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed makes the same problems.")] = 0,
    levels: Annotated[list[int] | None, typer.Option("--level", help="Only this level; may be repeated.")] = None,
    families: Annotated[list[str] | None, typer.Option("--family", help="Only this family; may be repeated.")] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="File of problems whose questions must not come up again; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make problems of the tiny recipe's families: integer answers, too hard for a tiny model's head."""
    from rstar_lab.rl.problems import load_problems, write_problems
    from rstar_lab.rl.synthetic import families as tiny

    taken = [problem for path in exclude or [] for problem in load_problems(path)]
    problems = tiny.synthesize(seed, count, levels=levels, families=families, exclude=taken)
    write_problems(out, problems)
    if as_json:
        print(json.dumps({"out": str(out), "problems": len(problems), "seed": seed}))
    else:
        print(f"{len(problems):,} problems in {out}")


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A name (dapo, openmathreasoning ...: from the hub), NAME=FILE (a file in that source's schema), "
            "FILE, or FILE:question=problem,answer=solution.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where the problems go (.parquet or .jsonl); the card goes beside it.")],
    against: Annotated[
        list[str] | None, typer.Option(help="Evaluation set to keep clear of, written as a source; may be repeated.")
    ] = None,
    fields: Fields = "",
    any_answer: Annotated[bool, typer.Option("--any-answer", help="Keep answers that are no integers, too.")] = False,
    similarity: Annotated[float, typer.Option(help="From which similarity a question is a near-duplicate.")] = 0.8,
    ngram: Annotated[int, typer.Option(help="Words in a row that count as contamination.")] = 8,
    answers: Annotated[
        Path | None, typer.Option(help="A strong model's answers: rows of problem_id (or question) and answers.")
    ] = None,
    min_agree: Annotated[int, typer.Option(help="How many of 16 such answers must confirm a label.")] = 2,
    difficulty: Annotated[
        Path | None,
        typer.Option(
            help="Rollouts of the current policy: a run folder, or rows of problem_id and reward or pass_rate."
        ),
    ] = None,
    drop_solved: Annotated[bool, typer.Option("--drop-solved", help="Leave out what every rollout solved.")] = False,
    drop_bad_rows: Annotated[
        bool, typer.Option("--drop-bad-rows", help="List bad rows in the card instead of stopping at the first.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Turn sources into a set of problems for RL, with a data card of what was dropped and why.

    Integer answers, one label a question, no duplicates and near-duplicates, clear of the evaluation sets, labels
    checked, difficulty measured.
    """
    from dataclasses import asdict

    from rstar_lab.rl.data.card import FilterCount
    from rstar_lab.rl.data.prepare import prepare as run
    from rstar_lab.rl.problems import parse_fields

    def show(count: FilterCount) -> None:
        if as_json:
            line = {name: value for name, value in asdict(count).items() if name in ("name", "before", "dropped")}
            print(json.dumps({"filter": line.pop("name"), **line}), flush=True)
        else:
            print(
                f"{count.name:>16} {count.before:>9,} - {count.dropped:>7,} = {count.before - count.dropped:>9,}",
                flush=True,
            )

    card = run(
        sources, out, against=against or [], fields=parse_fields(fields), any_answer=any_answer, similarity=similarity,
        ngram=ngram, answers=answers, min_agree=min_agree, difficulty=difficulty, drop_solved=drop_solved,
        drop_bad_rows=drop_bad_rows, on_filter=show,
    )  # fmt: skip
    for bad in [] if as_json else card.bad_rows:
        print(f"bad row: {bad}")
    if as_json:
        overlaps = {one["name"]: one["overlaps"] for one in card.against}
        print(json.dumps({"kept": card.kept, "overlaps": overlaps, "bad_rows": len(card.bad_rows), **card.output}))
    else:
        print(f"{card.kept:,} problems in {out}; the card is {out.stem}.card.md beside it")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="toolace, apigen_mt, glaive_v2, magicoder, tulu3_if or nemotron_chat.")],
    file: Annotated[Path, typer.Argument(help="The set as downloaded: .jsonl, .json or .parquet.")],
    out: Annotated[Path, typer.Option(help="Where the conversations go: .jsonl, or .parquet as verl's SFT reads it.")],
    as_json: AsJson = False,
) -> None:
    """Turn a public conversation set into SFT data: one message schema with tools, each conversation linted.

    What cannot be read is counted by reason and shown with a row to look at.
    """
    from rstar_lab.errors import UserError
    from rstar_lab.rl.chat_format.conversations import write_conversations
    from rstar_lab.rl.data.converters import CONVERTERS, ConversionReport, convert_file

    if source not in CONVERTERS:
        raise UserError(f"data convert: no converter {source!r}; choose from {', '.join(CONVERTERS)}")
    report = ConversionReport(source)
    write_conversations(out, convert_file(source, file, report))
    if as_json:
        line = {"source": source, "rows": report.rows, "converted": report.converted, "refused": report.refused}
        print(json.dumps({**line, "examples": report.examples, "file": str(out)}))
    else:
        print(f"{report.converted:,} of {report.rows:,} conversations in {out}")
        for reason, count in report.refused.most_common():
            print(f"{count:>9,} refused: {reason} (for one, {report.examples[reason]})")
    raise typer.Exit(0 if report.converted else 1)


@app.command()
def lint(
    file: Annotated[Path, typer.Argument(help="Conversations as `data convert` writes them.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model folder: check token by token that loss falls on the assistant only.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check conversations before a model imitates them: roles, tool calls, format, template, loss mask. Exit code 1
    for faults."""
    from rstar_lab.rl.chat_format.conversations import read_conversations
    from rstar_lab.rl.data.lint import lint as check

    loaded = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        from rstar_lab.errors import UserError

        if not tokenizer.is_dir():
            raise UserError(f"{tokenizer}: no such folder")
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    count = faulty = 0
    for conversation in read_conversations(file):
        count += 1
        findings = check(conversation, loaded)
        faulty += bool(findings)
        for finding in findings:
            line = {"conversation_id": conversation.conversation_id, "message": finding.message, "rule": finding.rule}
            text = (
                json.dumps({**line, "text": finding.text}) if as_json else f"{conversation.conversation_id}: {finding}"
            )
            print(text)
    print(json.dumps({"conversations": count, "faulty": faulty}) if as_json else f"{faulty:,} of {count:,} faulty")
    raise typer.Exit(1 if faulty else 0)
