"""The command that writes the problems of a foreign task."""

import sys

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.problems import Problem, write_problem_file


def problems_of(target: str) -> list[Problem]:
    if target != "tasks:sums":
        raise UserError(f"task: {target}: not found")
    return [Problem(problem_id="1", question="1+1?", answer="2")]


def test_problems_are_written_and_errors_are_one_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "sums.jsonl"
    monkeypatch.setattr(sys, "argv", ["tasks", "tasks:sums", str(path)])
    write_problem_file("tasks", problems_of)
    assert capsys.readouterr().out == f"1 problem written to {path}\n"
    assert [problem.question for problem in load_problems(path)] == ["1+1?"]
    for arguments, message in (
        (["tasks:sum", str(path)], "error: task: tasks:sum: not found"),
        (["tasks:sums", str(tmp_path / "x.txt")], "error: .*problems are written as .jsonl or .parquet"),
        (["tasks:sums"], "usage: python -m tasks MODULE:NAME PROBLEMS.jsonl"),
    ):
        monkeypatch.setattr(sys, "argv", ["tasks", *arguments])
        with pytest.raises(SystemExit, match=message):
            write_problem_file("tasks", problems_of)
