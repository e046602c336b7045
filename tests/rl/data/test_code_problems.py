"""Problems with hidden test cases: conversion of the public formats, and benchmarks that `data prepare` keeps complete."""

import base64
import json
import pickle
import zlib

import pytest

from rstar_lab.rl.data.prepare import prepare
from rstar_lab.rl.data.sources import load_problems, parse_source, read_source
from rstar_lab.rl.problems import ProblemError
from rstar_lab.rl.reward.hidden_tests import hidden_tests_of

CASES = [{"input": "2\n3", "output": "5", "testtype": "functional"}]


def packed(cases):
    """As LiveCodeBench stores private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


ROWS = {
    "apps": (
        {"problem_id": 7, "question": "Add.", "starter_code": "",
         "input_output": json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]})},
        [("1 2\n", "3\n"), ("3\n4", "7")], None,
    ),
    "taco": (
        {"question": "Add.", "starter_code": "def add(a, b):",
         "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]})},
        [("[1, 2]", "3")], "add",
    ),
    "code_contests": (
        {"name": "1_A", "description": "Add.", "public_tests": {"input": ["1 2"], "output": ["3"]},
         "private_tests": {"input": ["3 4"], "output": ["7"]}, "generated_tests": {"input": ["1 2"], "output": ["3"]}},
        [("1 2", "3"), ("3 4", "7")], None,
    ),
    "codeforces": (
        {"id": "1/A", "description": "Add.", "input_format": "Two numbers.", "input_mode": "stdio", "generated_checker": None,
         "examples": [{"input": "1 2", "output": "3"}], "official_tests": [{"input": "1 2", "output": "3"}, {"input": "", "output": "0"}]},
        [("1 2", "3"), ("", "0")], None,
    ),
    "synthetic_code": (
        {"problem_id": "s", "prompt": "Add.", "verification_info": str({"language": "python", "test_cases": [
            {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]})},
        [("[1, 2]", "3")], "add",
    ),
    "rstar_coder": (
        {"question_id": "r1", "question": "Add.", "starter_code": "", "func_name": None, "inputs": '["1 2", "3 4"]',
         "outputs": ["3", "7"]},
        [("1 2", "3"), ("3 4", "7")], None,
    ),
    "livecodebench": (
        {"question_id": "a", "question_content": "Add.", "starter_code": "class Solution:\n    def add(self, a, b):",
         "public_test_cases": "[]", "private_test_cases": packed(CASES), "metadata": '{"func_name": "add"}'},
        [("[2, 3]", "5")], "add",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_prepared_problems_have_the_tests_of_the_row(tmp_path, name):
    row, expected, function = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for suffix in ("jsonl", "parquet"):
        source = f"{tmp_path / 'rows.jsonl'}"  # by name in one format, by its columns in the other
        prepare([f"{name}={source}" if suffix == "jsonl" else source], tmp_path / f"out.{suffix}", any_answer=True)
        (problem,) = load_problems(tmp_path / f"out.{suffix}")
        tests, named = hidden_tests_of(problem)
        assert [(test["input"], test["output"]) for test in tests] == expected and named == function
        assert problem.question.startswith("Add.") and problem.answer == ""


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "apps",
            {"input_output": ""},
            "row 1: input_output is empty, .* `data prepare --drop-bad-rows` leaves such rows out",
        ),
        ("apps", {"input_output": "{"}, "row 1: input_output: not JSON"),
        ("apps", {"input_output": '{"inputs": [], "outputs": []}'}, "no tests with an output"),
        ("taco", {"input_output": '{"inputs": ["1"], "outputs": []}'}, "of equal length"),
        ("code_contests", {"input_file": "input.txt"}, "reads or writes a file"),
        ("codeforces", {"generated_checker": "import sys"}, "several outputs are right"),
        ("codeforces", {"interaction_format": "Print ?"}, "talks to another program"),
        ("codeforces", {"input_mode": "file"}, "reads or writes a file"),
        ("codeforces", {"examples": [], "official_tests": None}, "no tests with an output"),
        ("codeforces", {"examples": [{"input": "1 2\n", "output": "4"}]}, "an input has two different outputs"),
        ("synthetic_code", {"verification_info": "open('x')"}, "neither JSON nor a Python literal"),
        ("synthetic_code", {"verification_info": "{}"}, "no test_cases"),
        ("livecodebench", {"metadata": "{}"}, "no func_name"),
        ("livecodebench", {"private_test_cases": "AAAA"}, "neither JSON nor compressed"),
        ("apps", {"question": None}, "no question"),
    ],
)
def test_a_row_that_cannot_be_graded_names_the_reason(tmp_path, name, changes, reason):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[name][0] | changes) + "\n")
    with pytest.raises(ProblemError, match=reason):
        list(read_source(parse_source(f"{name}={tmp_path / 'rows.jsonl'}")))


def test_the_second_form_of_synthetic_has_lists_of_inputs_and_outputs(tmp_path):
    cases = {"inputs": ["1 2\n", None], "outputs": ["3\n", True]}
    row = {"prompt": "Add.", "verification_info": json.dumps({"test_cases": json.dumps(cases), "fn_name": None})}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_source(parse_source(f"synthetic_code={tmp_path / 'rows.jsonl'}"))
    tests, function = hidden_tests_of(found.problem)
    assert [tuple(test.values()) for test in tests] == [("1 2\n", "3\n"), ("", "True")] and function is None


def test_rows_without_tests_can_be_left_out(tmp_path):
    row = ROWS["apps"][0]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"input_output": ""}) + "\n")
    card = prepare([f"apps={tmp_path / 'rows.jsonl'}"], tmp_path / "out.parquet", drop_bad_rows=True)
    assert card.kept == 1 and "row 2: input_output is empty" in card.bad_rows[0]


class Payload:
    def __reduce__(self):
        return (open, ("/tmp/should-not-exist", "w"))


def test_a_pickle_with_code_is_refused_and_not_executed(tmp_path):
    for value in (Payload(), ["text"], {"a": "b"}):
        data = base64.b64encode(zlib.compress(pickle.dumps(value))).decode()
        row = ROWS["livecodebench"][0] | {"private_test_cases": data}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(ProblemError, match="not one text"):
            list(read_source(parse_source(f"livecodebench={tmp_path / 'rows.jsonl'}")))


def test_a_benchmark_is_prepared_complete(tmp_path):
    rows = [
        {"unique_id": "a", "problem": "Find the value of x in the equation below.", "answer": r"\frac{5}{6}"},
        {"unique_id": "b", "problem": "Find the value of x in the equations below.", "answer": "9"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([f"math500={tmp_path / 'rows.jsonl'}"], tmp_path / "out.parquet")
    assert [p.answer for p in load_problems(tmp_path / "out.parquet")] == [r"\frac{5}{6}", "9"]
    card = prepare([f"{tmp_path / 'rows.jsonl'}:question=problem"], tmp_path / "train.parquet")
    assert card.kept == 1, "training problems are filtered"


def test_tests_with_numbers_of_thousands_of_digits(tmp_path):
    big = "9" * 5000
    pairs = f'{{"fn_name": "f", "inputs": [[{big}]], "outputs": [[{big}]]}}'
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "q", "input_output": pairs}) + "\n")
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out.jsonl")
    ((test,), _) = hidden_tests_of(load_problems(tmp_path / "out.jsonl")[0])
    assert test["input"] == f"[{big}]" and test["output"] == big
