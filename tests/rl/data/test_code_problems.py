"""Problems with hidden test cases: conversion of the public formats, and benchmarks that `data prepare` keeps complete."""

import base64
import json
import pickle
import zlib

import pytest
from helpers.cases import read_cases

from rstar_lab.rl.data.prepare import prepare
from rstar_lab.rl.data.sources import load_problems, parse_source, read_source
from rstar_lab.rl.problems import ProblemError
from rstar_lab.rl.reward.hidden_tests import hidden_tests_of

CASES = [{"input": "2\n3", "output": "5", "testtype": "functional"}]


def packed(cases):
    """As LiveCodeBench stores private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


FILE = read_cases(__file__, "code_problems.yaml")
ROWS = FILE["rows"]
ROWS["livecodebench"][0]["private_test_cases"] = packed(CASES)


@pytest.mark.parametrize("name", ROWS)
def test_prepared_problems_have_the_tests_of_the_row(tmp_path, name):
    row, expected, function = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for suffix in ("jsonl", "parquet"):
        source = f"{tmp_path / 'rows.jsonl'}"  # by name in one format, by its columns in the other
        prepare([f"{name}={source}" if suffix == "jsonl" else source], tmp_path / f"out.{suffix}", any_answer=True)
        (problem,) = load_problems(tmp_path / f"out.{suffix}")
        tests, named = hidden_tests_of(problem)
        assert [[test["input"], test["output"]] for test in tests] == expected and named == function
        assert problem.question.startswith("Add.") and problem.answer == ""


@pytest.mark.parametrize(("name", "changes", "reason"), FILE["refused"])
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
    report = prepare([f"{tmp_path / 'rows.jsonl'}:question=problem"], tmp_path / "train.parquet")
    assert report.kept == 1, "training problems are filtered"


def test_tests_with_numbers_of_thousands_of_digits(tmp_path):
    big = "9" * 5000
    pairs = f'{{"fn_name": "f", "inputs": [[{big}]], "outputs": [[{big}]]}}'
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "q", "input_output": pairs}) + "\n")
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out.jsonl")
    ((test,), _) = hidden_tests_of(load_problems(tmp_path / "out.jsonl")[0])
    assert test["input"] == f"[{big}]" and test["output"] == big
