"""Reading problems: any file, names mapped, and errors that name file, row and field."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.cases import read_cases
from typer.testing import CliRunner

from rstar_lab.cli.data import app as data_commands
from rstar_lab.common.errors import UserError
from rstar_lab.rl.data.lint import lint_problems
from rstar_lab.rl.data.sources import load_problems, parse_fields
from rstar_lab.rl.evaluate_command import load as load_for_evaluation
from rstar_lab.rl.problems import Problem, ProblemError, write_problems
from rstar_lab.untrusted.files import long_integers

CASES = read_cases(__file__, "problem_files.yaml")
ROWS = [
    {"problem_id": "a", "question": "1+1?", "answer": "2", "source": "s", "difficulty": 0.5},
    {"problem_id": "b", "question": "größer? ∑", "answer": "-7", "source": "t", "difficulty": None},
]


def jsonl(path: Path, rows) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_round_trip(tmp_path, suffix):
    info = {"tables": ["a"], "rows": 3, "nested": {"x": None}}
    other = Problem(problem_id="c", question="q", answer="1", source="s", info=info, environment="sql")
    problems = [*(Problem(**row) for row in ROWS), other]
    assert "info" not in problems[0].as_row()
    write_problems(tmp_path / f"p{suffix}", problems)
    assert load_problems(tmp_path / f"p{suffix}") == problems
    assert [path.name for path in tmp_path.iterdir()] == [f"p{suffix}"], "no temporary file is left"


def test_json_list_bom_blank_lines_and_packed_files(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(ROWS), encoding="utf-8-sig")
    (tmp_path / "p.jsonl").write_text("\ufeff" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]) + "\n", "utf-8")
    assert load_problems(tmp_path / "p.json") == load_problems(tmp_path / "p.jsonl") == [Problem(**row) for row in ROWS]
    (tmp_path / "p.csv").write_text("question,answer,,\n1+1?,2,,\n")  # a spreadsheet adds columns without a name
    for suffix in (".json", ".jsonl", ".csv"):
        plain = tmp_path / f"p{suffix}"
        (tmp_path / f"p{suffix}.gz").write_bytes(gzip.compress(plain.read_bytes()))
        assert load_problems(tmp_path / f"p{suffix}.gz") == load_problems(plain)


def test_fields_are_mapped_and_defaults_filled(tmp_path):
    rows = [{"problem": "1+1?", "reward_model": {"ground_truth": 2}, "id": 60, "extra": [1]}]
    fields = parse_fields("question=problem, answer=reward_model.ground_truth,problem_id=id")
    (problem,) = load_problems(jsonl(tmp_path / "real.jsonl", rows), fields=fields)
    assert problem == Problem(problem_id="60", question="1+1?", answer="2", source="real", difficulty=None)
    (problem,) = load_problems(
        jsonl(
            tmp_path / "at 12:00, lr=1.jsonl",
            [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": "1"}],
        ),
        fields={"question": "prompt"},
    )
    assert (problem.problem_id, problem.question) == ("at 12:00, lr=1-1", "q")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "real.parquet")
    assert load_problems(tmp_path / "real.parquet", fields=fields)[0].answer == "2"


def test_data_files_for_verl_need_no_column_names(tmp_path):
    """The rows that data_preprocess of microsoft/rStar writes. Names that are given, and our own columns, come first."""
    row = {
        "data_source": "rstar_HuggingFaceH4/MATH-500", "agent_name": "rstar2_agent", "ability": "math",
        "prompt": [{"role": "user", "content": "What is half?"}],
        "reward_model": {"style": "rule", "ground_truth": "\\frac{1}{2}"},
        "extra_info": {"split": "test", "index": 3, "question": "What is half?", "need_tools_kwargs": False},
    }  # fmt: skip
    pq.write_table(
        pa.Table.from_pylist([row, row | {"prompt": [{"role": "user", "content": "Other"}]}]), tmp_path / "test.parquet"
    )
    problems = load_problems(tmp_path / "test.parquet")
    assert [p.question for p in problems] == ["What is half?", "Other"] and problems[0].answer == "\\frac{1}{2}"
    (named,) = load_problems(jsonl(tmp_path / "n.jsonl", [row]), fields={"question": "prompt", "answer": "ability"})
    (own,) = load_problems(jsonl(tmp_path / "o.jsonl", [row | {"question": "Ours", "answer": "7"}]))
    assert (named.answer, own.question, own.answer) == ("math", "Ours", "7")


@pytest.mark.parametrize("text", ["question", "question=", "=problem", "prompt=question", "question=a,nonsense=b"])
def test_bad_mappings(text):
    with pytest.raises(UserError, match="--fields"):
        parse_fields(text)


@pytest.mark.parametrize(("row", "field", "words"), CASES["bad rows"])
def test_a_bad_row_is_named(tmp_path, row, field, words):
    path = jsonl(tmp_path / "p.jsonl", [ROWS[0], row])
    with pytest.raises(UserError) as error:
        load_problems(path)
    message = str(error.value)
    assert message.startswith(f"{path} row 2, field {field!r}") and words in message and "\n" not in message


BIG = "9" * 5000
# What people have: a row, columns that are named, and the fields that come out.
ROWS_OF_PEOPLE = [
    *CASES["files of people"],
    ({"answer": int(BIG[:4000])}, {}, {"answer": BIG[:4000]}),
]


@pytest.mark.parametrize(("row", "fields", "expected"), ROWS_OF_PEOPLE)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_that_people_have(tmp_path, suffix, row, fields, expected):
    path, row = tmp_path / f"p{suffix}", {"question": "q", "answer": "1", **row}
    if suffix == ".jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode())
    elif len(str(row["answer"])) < 20:  # Parquet has no such integer
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        return
    (problem,) = load_problems(path, fields=fields)
    assert {name: getattr(problem, name) for name in expected} == expected


def test_a_number_of_thousands_of_digits_is_read_and_written(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"question": "q", "answer": "1", "info": {{"n": {BIG}}}}}')
    for suffix in ("jsonl", "parquet"):
        write_problems(tmp_path / f"q.{suffix}", load_problems(path))
        with long_integers():
            assert str(load_problems(tmp_path / f"q.{suffix}")[0].info["n"]) == BIG


def test_values_that_are_too_long_or_too_many_are_no_other_answer(tmp_path):
    (tmp_path / "p.jsonl").write_text(f'{{"question": "q", "answer": {"7" * 5000}}}')
    assert load_problems(tmp_path / "p.jsonl")[0].answer == "7" * 5000
    (tmp_path / "p.csv").write_text("question,answer\nWhat, then, is it?,2\n")
    with pytest.raises(ProblemError, match="row 1: it has more values than the header"):
        load_problems(tmp_path / "p.csv")


def test_a_csv_field_of_a_megabyte(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("question,answer,info\nq,1," + "x" * 1_000_000)
    assert load_problems(path)[0].answer == "1"


def test_json_lines_under_another_name_are_named(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{"question": "q", "answer": "1"}\n{"question": "r", "answer": "2"}\n')
    with pytest.raises(UserError, match=r"p\.json: it has JSON lines: rename it to p\.jsonl"):
        load_problems(path)


def test_the_problems_of_an_environment_need_no_answer(tmp_path):
    rows = [{"problem_id": "a", "question": "Win.", "environment": "game"}]
    path = jsonl(tmp_path / "p.jsonl", rows)
    (problem,) = load_problems(path)
    assert problem.answer == "" and problem.environment == "game"
    for suffix in ("jsonl", "parquet"):
        write_problems(tmp_path / f"copy.{suffix}", [problem])
        assert load_problems(tmp_path / f"copy.{suffix}") == [problem]
    other = jsonl(tmp_path / "q.jsonl", [{"question": "Win.", "answer": ""}])
    assert load_problems(other, answers=False)[0].answer == ""


def test_bad_files(tmp_path):
    for name, content, words in CASES["bad files"]:
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(UserError, match="no such file"):
            load_problems(tmp_path / f"not-{name}")
        with pytest.raises(UserError) as error:
            load_problems(path)
        assert str(path) in str(error.value) and words in str(error.value)
    (tmp_path / "h.jsonl").write_bytes(b'{"question": "\xff", "answer": "1"}')
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        load_problems(tmp_path / "h.jsonl")
    with pytest.raises(UserError, match=r"\.csv"):
        write_problems(tmp_path / "p.csv", [])


def test_a_column_info_with_another_meaning_is_ignored(tmp_path):
    rows = [{"question": "q", "answer": "1", "info": "some text"}]
    assert load_problems(jsonl(tmp_path / "p.jsonl", rows))[0].info == {}
    with pytest.raises(ProblemError, match="field 'info'"):
        load_problems(tmp_path / "p.jsonl", fields={"info": "info"})


def test_a_failed_write_leaves_no_file(tmp_path):
    def problems():
        yield Problem(problem_id="a", question="1+1?", answer="2", source="s")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write .*x\.jsonl: No space left on device"):
        write_problems(tmp_path / "x.jsonl", problems())
    assert list(tmp_path.iterdir()) == []


def test_copies_without_id_are_one_problem_of_an_evaluation(tmp_path, caplog):
    """verl's AIME files repeat each problem once per sample; every copy would count as a problem of its own."""
    rows = [{"question": f"q{n % 30}?", "answer": str(n % 30)} for n in range(960)]
    file = jsonl(tmp_path / "aime.jsonl", [*rows, {"question": "q0?", "answer": "another"}])
    assert len(load_problems(file)) == 961
    name, problems = load_for_evaluation(str(file), "", None)
    assert (name, len(problems), len({problem.problem_id for problem in problems})) == ("aime", 31, 31)
    assert "930 of 961 problems are copies" in caplog.text
    jsonl(file, [row | {"problem_id": f"a{n}"} for n, row in enumerate(rows[:60])])
    assert len(load_for_evaluation(str(file), "", None)[1]) == 60  # ids of the file are kept


def test_lint_names_the_rows_with_faults(tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    rows = [
        {"question": "a?", "answer": "12"}, {"question": "b?", "answer": "$\\frac{1}{2}$"}, {"question": "a?", "answer": "12"},
        {"question": "c?", "answer": "It holds for 3 of the 4 cases, as shown in part 2."}, {"question": "d?"},
        {"question": "e?", "answer": "no solution"}, {"question": "f?", "answer": "$x=\\frac{1}{2$"},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, rows)))
    findings = {finding.row: finding for finding in lint_problems(file)}
    assert {row: finding.rule for row, finding in findings.items()} == {
        3: "repeated problem", 4: "answer", 5: "row", 7: "answer",
    }  # fmt: skip
    assert "only this text is correct" in str(findings[4]) and "field 'answer': missing" in str(findings[5])
    done = CliRunner().invoke(data_commands, ["lint", str(file), "--json"])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 1 and lines[-1] == {"problems": 7, "faulty": 4}
    assert {line["row"] for line in lines[:-1]} == {3, 4, 5, 7}
    file.write_text("\n".join(json.dumps({"problem": row["question"], "messages": []} | row) for row in rows[:2]))
    for more in ([], ["--fields", "question=problem"]):  # without column names, they are conversations
        assert CliRunner().invoke(data_commands, ["lint", str(file), *more]).exit_code == (not more)
