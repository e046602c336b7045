"""Tests of the panel that forks a rollout, without a browser, and of the figure of a fork."""

import json
from pathlib import Path

import pandas as pd
import pytest

from rstar_lab.analysis.forks import Fork, model_argument, turn_text
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.analysis.inspector.transcript import segments
from rstar_lab.common.errors import UserError

ROWS = [
    (1, 0, 1.0, "answer"), (1, 1, 1.0, "answer"), (2, 0, 0.0, "answer"), (2, 1, 1.0, "engine_error"), (2, 2, 0.0, "undecided"),
]  # fmt: skip


class StoredRuns:
    def trajectories(self, columns: list[str], order_by: str) -> pd.DataFrame:
        frame = pd.DataFrame(ROWS, columns=["step", "sample", "reward", "stop_reason"])
        frame["traj_id"] = "a@" + frame.step.astype(str) + "-" + frame["sample"].astype(str)
        return frame.reindex(columns=columns)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Fork:
    """A fork of a wrong rollout at its two turns. Two of the five continuations have no valid reward."""
    monkeypatch.setattr(Fork, "runs", property(lambda self: StoredRuns()))
    return Fork(Path("runs/base-fork-1"), "a", 0.0, "stateless", 0, "model")


def test_the_figure_numbers_turns_as_the_inspector(forked: Fork):
    assert list(forked.values.turn) == [0, 1] and forked.lost_at == 0
    assert list(forked.figure.data[0].x) == [1, 2]


def test_a_fork_is_sent_to_the_page_as_json(forked: Fork):
    payload = json.loads(json.dumps(forked.payload(), allow_nan=False))
    assert [(row["turn"], row["value"], row["n"]) for row in payload["values"]] == [(0, 1.0, 2), (1, 0.0, 1)]
    assert [row["traj_id"] for row in payload["tree"]] == ["a@1-0", "a@1-1", "a@2-0", "a@2-1", "a@2-2"]
    assert payload["lost_at"] == 0 and payload["run"] == "base-fork-1" and payload["tree"][0]["answer"] is None


def test_a_run_without_checkpoint_names_what_to_enter(source: Source):
    traj_id = source.page("TRUE", [], 0, 1)[0]["traj_id"]
    with pytest.raises(UserError, match="has no checkpoint: enter a model folder or the URL"):
        model_argument("", source, traj_id)
    for weights in ("", "http://host:8000"):
        with pytest.raises(UserError, match=r"has no checkpoint: .*enter a model folder"):
            model_argument(weights, source, traj_id, fork=True)
    assert model_argument("model", source, traj_id, fork=True) == {"model": "model"}
    assert model_argument("http://host:8000", source, traj_id) == {"url": "http://host:8000"}


def test_the_original_text_of_a_turn_can_be_edited(inspector: Inspector):
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "first"},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "<answer>2</answer><|im_end|>"},
    ]
    texts = [turn_text({"messages": messages}, turn) for turn in range(3)]
    assert texts == ["first", "<answer>2</answer>", ""]
    traj_id = inspector.source.page("TRUE", [], 0, 1)[0]["traj_id"]
    record = inspector.source.record(inspector.source.row(traj_id))
    assert inspector._turn_text([], traj_id, 0) == turn_text(record, 0) != ""


def test_edited_text_is_shown_as_the_start_of_its_turn():
    """The loss mask excludes the edit, as it excludes the tool response before it."""
    between = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>"
    call, edit, rest = "<tool_call>x</tool_call><|im_end|>", "It says ", "5.</reason><answer>5</answer><|im_end|>"
    messages = [
        {"role": "assistant", "content": "<tool_call>x</tool_call>"},
        {"role": "tool", "content": "4", "outcome": "ok"},
        {"role": "assistant", "content": "It says 5.</reason><answer>5</answer>"},
    ]
    record = {"messages": messages, "token_texts": [call, between, edit, rest], "loss_mask": [True, False, False, True]}
    parts = [(part.kind, part.turn, part.text, part.first) for part in segments(record)]
    assert parts == [("call", 1, "x", 0), ("tool", 1, "4", 1), ("reason", 2, "It says 5.", 2), ("answer", 2, "5", 3)]
    first = {"messages": messages[2:], "token_texts": [edit, rest], "loss_mask": [False, True]}
    assert [(part.kind, part.text) for part in segments(first)] == [("reason", "It says 5."), ("answer", "5")]
    unedited = record | {"messages": [*messages[:2], {"role": "assistant", "content": "5.</reason>"}]}
    assert [part.text for part in segments(unedited)][2] == "5."
