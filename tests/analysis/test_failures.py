"""Tests of the failure groups on rollouts written by hand and on the golden run."""

import json
from pathlib import Path

import pandas as pd
import pytest

from rstar_lab.analysis import open_runs
from rstar_lab.analysis.code_use import parse_code
from rstar_lab.analysis.failures import failed_rollouts, failure_groups, normalised, plot_failures
from rstar_lab.runs import RunStoreError, RunWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "runs" / "tiny_fast-rl"
TOOL = "execute_python_code_with_standard_io"
TRACE = "Traceback (most recent call last):\n  File \"main.py\", line {line}, in <module>\nNameError: name '{name}' is not defined\n"


def messages(calls: list[tuple[str, str, str]], answer: str | None) -> str:
    """calls: (code, output, outcome)."""
    written = [{"role": "user", "content": "q"}]
    for code, output, outcome in calls:
        call = json.dumps({"name": TOOL, "arguments": {"code": code, "input": ""}})
        written.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
        written.append({"role": "tool", "content": output, "tool": TOOL, "outcome": outcome})
    written.append({"role": "assistant", "content": f"<answer>{answer}</answer>" if answer else "I do not know"})
    return json.dumps(written)


def error(name: str, line: int) -> tuple[str, str, str]:
    return (f"print({name} + {line})", TRACE.format(name=name, line=line), "exception")


# traj_id -> (problem, reward, answer, stop_reason, kept, calls)
ROLLOUTS = {
    "a": ("sums-1", 0.0, "7", "answer", True, [error("x", 3)]),
    "b": ("sums-2", 0.0, "8", "answer", False, [error("total", 12)]),
    "c": ("products/7", 1.0, "42", "answer", True, [error("y", 1), ("print(6*7)", "42", "ok")]),
    "d": ("sums-1", 1.0, "42", "answer", True, [("print(6*7)", "42", "ok")]),
    "e": ("sums-1", 0.0, None, "length", False, []),
    "f": ("sums-3", 0.0, None, "answer", None, []),
    "g": ("sums-3", 0.0, None, "environment_error", False, []),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    with RunWriter.open(root, "a", kind="train", recipe={}, seed=0) as writer:
        for step in (1, 2):
            rows, transcripts = [], []
            for name, (problem, reward, answer, stop, kept, calls) in ROLLOUTS.items():
                row = {
                    "traj_id": f"{name}{step}",
                    "problem_id": problem,
                    "reward": reward,
                    "answer": answer,
                    "truth": "42",
                }
                rows.append(
                    row | {"kept": kept, "stop_reason": stop, "truncated": stop == "length", "calls": len(calls)}
                )
                text = messages(calls, answer)
                transcripts.append({"traj_id": f"{name}{step}", "question": "q", "truth": "42", "messages": text})
            writer.write_step("rl", step, trajectories=rows, calls=[], transcripts=transcripts, metrics={})
        writer.finish("finished")
    return open_runs(root)


def test_each_failed_or_odd_rollout_has_a_kind_and_its_last_error(runs):
    found = failed_rollouts(runs, {"step": 1}).set_index("traj_id")
    assert found.kind.to_dict() == {
        "a1": "wrong answer", "b1": "wrong answer", "c1": "correct after errors", "e1": "truncated", "f1": "no answer",
        "g1": "environment error",
    }  # fmt: skip
    assert set(found.kind) == {"environment error", "truncated", "no answer", "wrong answer", "correct after errors"}
    assert found.message["a1"] == found.message["b1"] == "NameError: name '…' is not defined"
    assert found.outcome["a1"] == "exception" and found.outcome["e1"] == ""


def test_groups_count_rollouts_problems_and_the_share_that_roc_kept(runs):
    groups = failure_groups(failed_rollouts(runs))
    first = groups.iloc[0]
    assert (first.kind, first.outcome, first.rollouts, first.problems, first.kept) == (
        "wrong answer", "exception", 4, 2, 0.5,
    )  # fmt: skip
    assert first.share == pytest.approx(4 / 12) and (first.first_step, first.last_step) == (1, 2)
    assert groups.rollouts.sum() == 12


def test_points_of_the_figure_open_their_rollouts(runs):
    figure = plot_failures(failed_rollouts(runs))
    kept = next(i for i, trace in enumerate(figure.data) if trace.name == "kept by RoC")
    assert set(runs.trajectories(figure.where(kept, [0])).traj_id) == {"a1", "a2"}
    line = next(i for i, trace in enumerate(figure.data) if trace.type == "scatter")
    assert set(runs.trajectories(figure.where(line, [1])).traj_id) == {"a2", "b2"}
    assert len(figure.frame) == 5
    with pytest.raises(RunStoreError, match="no selected rollout failed"):
        plot_failures(failed_rollouts(runs, "step = 9"))


def test_groups_with_the_same_beginning_of_the_message_are_drawn_apart():
    messages = [f"ValueError: the value <b> of this call is not in the table of {end}" for end in ("sums", "products")]
    same = {"run_id": "a", "step": 1, "problem_id": "p", "kept": True, "kind": "no answer", "outcome": "exception"}
    rows = [same | {"traj_id": f"t{i}", "message": messages[i % 2]} for i in range(3)]
    figure = plot_failures(pd.DataFrame(rows))
    assert len(set(figure.data[0].y)) == 2 and list(figure.data[0].x) == [2, 1]
    labels = figure.layout.yaxis.ticktext
    assert labels[0] == labels[1] == "no answer: exception<br>ValueError: the value &lt;b&gt; of this call …"


def test_messages_are_compared_without_names_and_numbers():
    assert normalised("ValueError: 12 is not in [0, 1.5]") == "ValueError: N is not in [N, N]"
    assert normalised("KeyError: 'a'\nduring handling\nKeyError: \"b\"") == "KeyError: '…'"
    assert normalised("") == "" and normalised("only text 5") == "only text N"


def test_the_golden_run_is_grouped():
    runs = open_runs(GOLDEN)
    found = failed_rollouts(runs)
    assert len(found) and found.traj_id.is_unique
    wrong = runs.sql("SELECT count(*) AS n FROM trajectories WHERE reward <= 0").n[0]
    assert (found.kind != "correct after errors").sum() == wrong
    assert failure_groups(found).rollouts.is_monotonic_decreasing
    assert plot_failures(found).frame.equals(failure_groups(found).head(10))


def test_code_is_parsed_without_warnings(recwarn):
    assert parse_code("print(1if True else 2)") and parse_code("1 +") is None and parse_code("1\n" * 20_000) is None
    assert not recwarn.list
