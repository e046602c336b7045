"""Tests of problem preparation: every filter drops the problems that it should and reports their number."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cases import read_cases
from typer.testing import CliRunner

from rstar_lab.cli.data import app
from rstar_lab.common.errors import UserError
from rstar_lab.rl.data.prepare import prepare, read_pass_rates
from rstar_lab.rl.data.sources import SOURCES, load_problems, parse_source, read_source
from rstar_lab.runs import TRAJECTORIES, RunWriter

LONG = (
    "Ann walks {n} kilometres to the market, buys apples and pears, "
    "and comes home by another road that is longer. How many steps?"
)


def jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def problem(number, question, answer, **more):
    return {"problem_id": str(number), "question": question, "answer": answer, **more}


def dropped(report) -> dict[str, int]:
    return {one.name: one.dropped for one in report.filters if one.dropped}


def kept(path: Path) -> list[str]:
    return [one.problem_id for one in load_problems(path)]


def test_the_funnel(tmp_path):
    rows = [
        problem(0, LONG.format(n=3), "$1,000$"),
        problem(1, LONG.format(n=3), "$1,000$"),  # letter by letter
        problem(2, LONG.format(n=3).upper().replace(",", " ,"), "1000"),  # the same words
        problem(3, LONG.format(n=3).replace("pears", "plums"), "1000"),  # nearly the same
        problem(4, LONG.format(n=4), "1000"),  # another number: another problem
        problem(5, "What is half of $x$ when $x = 1$?", "\\frac{1}{2}"),
        problem(6, "Which number do I think of, you who know everything?", "7"),
        problem(7, "Which number do I think of,  you who know everything?", "8"),
        problem(8, "Let f be the function that maps every prime to its square; find f(2) + f(3) + f(5).", "038"),
        problem(9, "A question that needs no words of others.", "12", answers=["12", "$12$", "13"]),
        problem(10, "Another one, whose label a strong model doubts.", "12", answers=["13", "14", "12"]),
    ]
    held_out = [
        problem("e", "Suppose that f be the function that maps every prime to its square, and g its inverse.", "1")
    ]
    out = tmp_path / "out" / "train.jsonl"
    report = prepare([jsonl(tmp_path / "rows.jsonl", rows)], out, against=[jsonl(tmp_path / "exam.jsonl", held_out)])
    assert dropped(report) == {
        "repeated row": 1, "answer": 1, "conflict": 2, "duplicate": 1, "near-duplicate": 1, "contamination": 1,
        "label": 1,
    }  # fmt: skip
    assert kept(out) == ["0", "4", "9"] and report.kept == 3
    assert [one.answer for one in load_problems(out)] == ["1000", "1000", "12"], "answers in plain digits"
    for earlier, later in zip(report.filters, report.filters[1:], strict=False):
        assert earlier.before - earlier.dropped == later.before, "the counts of the filters add up"
    written = json.loads((out.parent / "train.jsonl.json").read_text())
    assert written["kept"] == 3 and written["against"][0]["overlaps"] == 1
    whys = {one["name"]: [example["why"] for example in one["examples"]] for one in written["filters"]}
    assert whys["contamination"] == ['exam: "f be the function that maps every prime"']
    assert whys["label"] == ["1 of 3 answers agree with 12"]
    assert "rows.jsonl row 1" in whys["near-duplicate"][0] and "7 and 8" in whys["conflict"][0]
    assert all(len(one["sha256"]) == 64 for one in [written["output"], *written["sources"], *written["against"]])
    assert sorted(path.name for path in out.parent.iterdir()) == ["train.jsonl", "train.jsonl.json"]


def test_an_environment_and_its_metadata_distinguish_equal_questions(tmp_path):
    places = [("sql", "a"), ("sql", "b"), ("shell", "a"), ("sql", "a")]
    rows = [{"question": "Count the rows.", "environment": name, "info": {"table": table}} for name, table in places]
    tests = [{"question": "Write it.", "info": {"tests": [{"input": "", "output": text}]}} for text in "12"]
    votes = jsonl(tmp_path / "votes.jsonl", [{"question": "Write it.", "answers": ["print(1)", "print(2)"]}])
    report = prepare([jsonl(tmp_path / "p.jsonl", [*rows, *tests])], tmp_path / "o.jsonl", answers=Path(votes))
    assert dropped(report) == {"repeated row": 1, "duplicate": 1}
    assert kept(tmp_path / "o.jsonl") == ["p-1", "p-2", "p-3", "p-5"]


def test_openmathreasoning_is_one_row_a_problem_without_label_check(tmp_path):
    row = {"problem_type": "has_answer_extracted", "problem_source": "aops_c4", "expected_answer": "4"}
    rows = [{**row, "problem": "2+2?", "generated_solution": f"\\boxed{{{n}}}"} for n in (5, 5, 6)]
    rows += [{**row, "problem": "4+4?", "problem_type": "converted_proof"}]
    report = prepare([f"openmathreasoning={jsonl(tmp_path / 'omr.jsonl', rows)}"], tmp_path / "o.parquet")
    assert dropped(report) == {"repeated row": 2} and "fewer than 2 answers: 1" in report.filters[-1].note
    assert [one.question for one in load_problems(tmp_path / "o.parquet")] == ["2+2?"]


def test_answers_and_rollouts_from_files(tmp_path):
    rows = jsonl(tmp_path / "p.jsonl", [problem(n, f"What is {n} + 1?", n + 1) for n in range(4)])
    by_id = [{"problem_id": "0", "answers": ["1", "1"]}, {"problem_id": "3", "answers": [None, "5"]}]
    votes = jsonl(tmp_path / "votes.jsonl", [*by_id, {"question": "What is 1 + 1?", "answers": ["3", "2", "4"]}])
    rollouts = jsonl(
        tmp_path / "rollouts.jsonl",
        [{"problem_id": str(n), "reward": float(k < n)} for n in range(3) for k in range(2)],
    )
    out = tmp_path / "o.jsonl"
    report = prepare([rows], out, answers=Path(votes), difficulty=Path(rollouts))
    assert dropped(report) == {"label": 1}
    assert {one.problem_id: one.difficulty for one in load_problems(out)} == {"0": 1.0, "2": 0.0, "3": None}
    assert report.difficulty == {"measured": 2, "not measured": 1, "mean": 0.5, "never solved": 1, "always solved": 1}
    assert "fewer than 2 answers: 2" in next(one.note for one in report.filters if one.name == "label")
    for bad in ({"reward": 1}, {"problem_id": "a", "reward": float("nan")}):
        with pytest.raises(UserError, match="row 1: expected problem_id"):
            read_pass_rates(Path(jsonl(tmp_path / "bad.jsonl", [bad])))


def test_difficulty_of_a_run(tmp_path):
    empty = dict.fromkeys(TRAJECTORIES.names)
    rows = [
        empty | {"traj_id": f"t{n}", "problem_id": str(n % 2), "reward": float(n == 0), "answer": answer}
        for n, answer in enumerate((None, "7", "1", "7"))
    ]
    rows += [rows[0] | {"traj_id": f"x{n}", "reward": 0.0, "stop_reason": "undecided"} for n in range(2)]
    with RunWriter.open(tmp_path, "r", kind="evaluate", recipe={}, seed=0) as run:
        run.write_step("evaluate", 1, trajectories=rows, calls=[], transcripts=[], metrics={})
    assert read_pass_rates(tmp_path / "r") == {"0": 0.5, "1": 0.0}
    # The answers of the run check the labels: t1 and t3 answer 7 to problem 1; one of problem 0 has no answer.
    problems = jsonl(tmp_path / "p.jsonl", [problem(n, f"What is {n} + 1?", n + 1) for n in range(3)])
    report = prepare([problems], tmp_path / "o.jsonl", answers=tmp_path / "r")
    assert dropped(report) == {"label": 1} and {p.problem_id for p in load_problems(tmp_path / "o.jsonl")} == {"0", "2"}


def test_bad_rows_stop_or_are_listed(tmp_path):
    rows = [problem(0, "What is 1 + 1?", "2"), {"question": "no answer"}, problem(1, "What is 2 + 2?", "4")]
    path = jsonl(tmp_path / "p.jsonl", rows)
    with pytest.raises(UserError, match=r"p\.jsonl row 2, field 'answer': missing"):
        prepare([path], tmp_path / "o.jsonl")
    assert not (tmp_path / "o.jsonl").exists()
    report = prepare([path], tmp_path / "o.jsonl", drop_bad_rows=True)
    assert report.kept == 2 and len(report.bad_rows) == 1 and "row 2" in report.bad_rows[0]
    assert "row 2" in (tmp_path / "o.jsonl.json").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sources": ["nonsense"]}, "no such file; give a file, ORG/NAME on the hub, or one of dapo"),
        ({"sources": ["project_euler"]}, "project_euler=FILE"),
        ({"sources": ["missing.jsonl"]}, "no such file"),
        ({"against": ["missing.parquet"]}, "no such file"),
        ({"out": "o.csv"}, r"\.csv"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, options, words):
    options = {
        "sources": [jsonl(tmp_path / "p.jsonl", [problem(0, "q 1 2?", "2")])],
        "out": tmp_path / "o.jsonl",
    } | options
    with pytest.raises(UserError, match=words):
        prepare(**{**options, "out": Path(options["out"])})


def test_nothing_left_is_an_error(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", [problem(0, "q?", "one half")])
    with pytest.raises(UserError, match=r"no problem is left of 1; dropped: answer 1"):
        prepare([path], tmp_path / "o.jsonl")


def test_ids_of_different_sources_do_not_clash(tmp_path):
    paths = [
        jsonl(tmp_path / f"{name}.jsonl", [problem(1, f"{name} asks for the number {name}", "1")])
        for name in ("one", "two")
    ]
    prepare(paths, tmp_path / "o.jsonl")
    assert kept(tmp_path / "o.jsonl") == ["1", "two/1"]


def test_each_source_has_its_own_count(tmp_path):
    """Sources that read the same file, and files of the same name, are counted separately."""
    both = jsonl(tmp_path / "both.jsonl", [{"a": f"ask {n}?", "b": f"request {n}!", "answer": n} for n in range(3)])
    (tmp_path / "other").mkdir()
    other = jsonl(tmp_path / "other" / "both.jsonl", [problem(9, "a question of the other file", "9")])
    sources = [f"{both}:question=a,answer=answer", f"{both}:question=b,answer=answer", other]
    exams = [
        jsonl(tmp_path / name / "exam.jsonl", [problem(0, question, "1")])
        for name, question in (("other", "Not in any source, not at all?"), (".", "request 2!"))
    ]
    report = prepare(sources, tmp_path / "o.jsonl", against=exams)
    assert [source["name"] for source in report.sources] == ["both", "both-2", "both-3"]
    assert [source["kept"] for source in report.sources] == [3, 2, 1]
    assert [(entry["name"], entry["overlaps"]) for entry in report.against] == [("exam", 0), ("exam-2", 1)]
    assert {one.source for one in load_problems(tmp_path / "o.jsonl")} == {"both"}


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.convert is None])
def test_named_sources_read_files_of_their_schema(tmp_path, name):
    row, problem_id = read_cases(__file__, "sources.yaml")[name]
    reading = parse_source(f"{name}={jsonl(tmp_path / 'x.jsonl', [row])}")
    (candidate,) = read_source(reading)
    assert (candidate.problem.question, candidate.problem.source) == ("q?", name)
    assert problem_id in (None, candidate.problem.problem_id)
    prepare([f"{name}={tmp_path / 'x.jsonl'}"], tmp_path / "o.parquet")
    assert load_problems(tmp_path / "o.parquet")[0].answer == "34"


def test_source_arguments(tmp_path):
    assert parse_source("dapo").source is SOURCES["dapo"] and parse_source("dapo").path is None
    assert parse_source("open-r1/DAPO-Math-17k-Processed").source == SOURCES["dapo"]
    plain = parse_source("a/b.parquet", {"question": "q"})
    assert (plain.source.name, plain.source.fields, plain.path) == ("b", {"question": "q"}, Path("a/b.parquet"))
    own = parse_source("a/b.jsonl:question=problem,answer=solution", {"question": "q"})
    assert own.source.fields == {"question": "problem", "answer": "solution"} and own.path == Path("a/b.jsonl")


@pytest.mark.slow
def test_the_hub_is_named_when_it_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = (
        "from pathlib import Path; from rstar_lab.rl.data.prepare import prepare; prepare(['aime25'], Path('o.jsonl'))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert "math-ai/aime25: could not be read from the hub" in ended.stderr and "aime25=FILE" in ended.stderr


# --- the command ------------------------------------------------------------------------------------------------------


def test_synthesize_and_prepare_from_the_command_line(tmp_path):
    train, exam = tmp_path / "train.jsonl", tmp_path / "exam.parquet"
    run = CliRunner().invoke
    assert run(app, ["synthesize", "--seed", "1", "--count", "40", "--out", str(exam), "--level", "2"]).exit_code == 0
    ended = run(app, ["synthesize", "--count", "300", "--out", str(train), "--exclude", str(exam), "--json"])
    assert json.loads(ended.stdout) == {"out": str(train), "problems": 300, "seed": 0}
    exam_problems, train_problems = load_problems(exam), load_problems(train)
    assert {one.difficulty for one in exam_problems} == {2.0}
    assert not {one.question for one in train_problems} & {one.question for one in exam_problems}
    flags = ["--against", str(exam), "--out", str(tmp_path / "o.parquet"), "--ngram", "100", "--json"]
    ended = run(app, ["prepare", str(train), str(exam), *flags])
    *counts, last = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["filter"] for line in counts][:2] == ["repeated row", "answer"]
    assert last["overlaps"] == {"exam": 40} and last["kept"] == len(load_problems(tmp_path / "o.parquet")) <= 300
    plain = run(app, ["prepare", str(train), "--out", str(tmp_path / "o2.parquet")])
    assert plain.exit_code == 0 and "o2.parquet.json" in plain.stdout
