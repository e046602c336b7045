"""Tests of the analysis of tool use on transcripts written by hand."""

import json
import time

import numpy as np
import pandas as pd
import pytest

from rstar_lab.analysis import open_runs
from rstar_lab.analysis.code_use import METRICS, plot_tool_use, tool_calls, tool_use
from rstar_lab.runs import RunWriter

TOOL = "execute_python_code_with_standard_io"


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': TOOL, 'arguments': {'code': code, 'input': ''}})}</tool_call>"


def conversation(*turns: tuple[str, list[tuple[str, str]]]) -> str:
    """turns: (text of the model, [(output, outcome) of each call])."""
    messages = [{"role": "user", "content": "What is 6 * 7?"}]
    for text, outputs in turns:
        messages.append({"role": "assistant", "content": text})
        messages += [
            {"role": "tool", "content": output, "tool": TOOL, "outcome": outcome} for output, outcome in outputs
        ]
    return json.dumps(messages)


FIRST = call("import math\nfrom sympy.core import S\nprint(6*7)")
AGAIN = call("import math\nfrom sympy.core import S\nprint( 6 * 7 )  # again")
ANSWER = ("</reason><answer>\\boxed{42}</answer>", [])
CHECKS = conversation(
    (f"I compute.</reason>{FIRST}", [("42", "ok")]),
    (f"Wait.</reason>{call('assert 6*7 == 42')}{AGAIN}",
     [("", "ok"), ("42", "ok")]),
    ANSWER,
)  # fmt: skip
FAILS = conversation(
    ("I think first.", []),
    (f"12345{call('print(6*')}<tool_call>not json</tool_call>", [("SyntaxError at 421", "syntax_error"), ("", "malformed_call")]),
    ANSWER,
)  # fmt: skip
SILENT = conversation(ANSWER)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    with RunWriter.open(root, "a", kind="train", recipe={}, seed=0) as writer:
        for step in (1, 2):
            texts = [CHECKS, FAILS, SILENT] if step == 1 else [CHECKS, CHECKS, SILENT]
            rows = [
                {
                    "traj_id": f"a/{step}/{i}",
                    "problem_id": f"p{i}",
                    "reward": 1.0,
                    "answer": "42",
                    "truth": "42",
                    "calls": 0,
                }
                for i in range(3)
            ]
            transcripts = [
                {"traj_id": row["traj_id"], "question": "q", "truth": "42", "messages": text}
                for row, text in zip(rows, texts, strict=True)
            ]
            writer.write_step("rl", step, trajectories=rows, calls=[], transcripts=transcripts, metrics={})
        writer.finish("finished")
    return open_runs(root)


def test_calls_have_the_facts_of_their_code(runs):
    table = tool_calls(runs, {"step": 1})
    assert list(table.traj_id) == ["a/1/0"] * 3 + ["a/1/1"] * 2
    first, checked, again, broken, malformed = table.to_dict("records")
    assert (first["turn"], first["lines"], first["outcome"]) == (0, 3, "ok")
    assert (first["repeated"], first["answer_known"], first["asserts"]) == (False, False, False)
    assert (checked["turn"], checked["asserts"], checked["answer_known"], checked["repeated"]) == (1, True, True, False)
    assert again["repeated"] is True, "the same code with other spaces and a comment"
    assert broken["outcome"] == "syntax_error" and broken["lines"] == 1 and broken["answer_known"] is False
    assert pd.isna(malformed["code"]) and malformed["outcome"] == "malformed_call"


def test_metrics_are_means_over_calls_or_rollouts(runs):
    found = tool_use(runs, {"step": 1}).set_index("metric")
    assert set(found.index) == set(METRICS)
    expected = {
        "code_lines": (3 + 1 + 3 + 1) / 4, "asserts": 1 / 4, "repeated_calls": 1 / 4, "calls_after_answer": 2 / 5,
        "rollouts_with_call": 2 / 3, "turns_before_call": 1 / 2,
        "reasoning_before_call": (len("I compute.</reason>") + len("I think first.") + len("12345")) / 2,
    }  # fmt: skip
    for name, value in expected.items():
        assert found.loc[name, "value"] == pytest.approx(value), name
    assert found.loc["rollouts_with_call", "clusters"] == 3 and found.loc["asserts", "n"] == 4
    assert found.loc["asserts", "low"] <= 0.25 <= found.loc["asserts", "high"]


def test_an_answer_inside_a_longer_number_is_not_known(runs):
    assert not tool_calls(runs, {"step": 1}).query("traj_id == 'a/1/1'").answer_known.any()


def test_the_figure_shows_every_metric(runs):
    figure = plot_tool_use(runs)
    shown = [trace for trace in figure.data if trace.name == "a"]
    assert len(shown) == len(METRICS) and list(shown[0].x) == [1, 2]


def test_without_rollouts_the_tables_are_empty(runs):
    assert tool_calls(runs, "step = 99").empty and tool_use(runs, "step = 99").empty


def test_hostile_code_is_not_executed_and_not_slow(tmp_path):
    codes = ["print(" * 5000, "x = " + "-" * 50_000 + "1", "\0", "import os; os.abort()"]
    text = conversation(*((call(code), [("", "exception")]) for code in codes))
    with RunWriter.open(tmp_path, "b", kind="train", recipe={}, seed=0) as writer:
        row = {"traj_id": "b/1", "problem_id": "p", "reward": 0.0, "answer": None, "truth": "1", "calls": 4}
        transcript = {"traj_id": "b/1", "question": "q", "truth": "1", "messages": text}
        writer.write_step("rl", 1, trajectories=[row], calls=[], transcripts=[transcript], metrics={})
    started = time.process_time()
    table = tool_calls(open_runs(tmp_path))
    assert len(table) == 4
    assert time.process_time() - started < 10
    assert np.isnan(tool_use(open_runs(tmp_path)).set_index("metric").loc["asserts", "low"]), (
        "one problem has no interval"
    )
