"""Tests of the first differing token and of the typical phrases of failed rollouts."""

import json

import pandas as pd
import pytest

from rstar_lab.analysis import add_first_difference, add_phrases, failed_rollouts, failure_groups, open_runs
from rstar_lab.analysis.failure_context import END, TOOL
from rstar_lab.analysis.failures import plot_failure_map
from rstar_lab.runs import RunStoreError, RunWriter

WORDS = ["", "We", " add", "\n", " one", " two", "Answer"]
# name: (group, reward, response ids, loss mask)
TOKENS = {
    "right": ("g", 1.0, [1, 2, 3, 4, 6], [True] * 5),
    "other": ("g", 1.0, [1, 5, 3, 4], [True] * 4),
    "late": ("g", 0.0, [1, 2, 3, 5, 6], [True] * 5),
    "near": ("g", 0.0, [1, 5, 4], [True] * 3),
    "short": ("g", 0.0, [1, 2, 3], [True] * 3),
    "tool": ("g", 0.0, [1, 2, 4, 4], [True, True, False, True]),
    "alone": ("h", 0.0, [1, 2], [True] * 2),
    "bare": ("g", 0.0, None, None),
}


def transcript(name: str, text: str, ids: list[int] | None = None, mask: list[bool] | None = None) -> dict:
    messages = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": text}])
    row = {"traj_id": name, "question": "q", "truth": "1", "messages": messages}
    return row | ({"response_ids": ids, "loss_mask": mask} if ids else {})


def test_the_first_token_that_differs_from_the_nearest_correct_rollout(tmp_path):
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        writer.write_vocabulary(WORDS)
        for step in (1, 2):
            rows = [
                {"traj_id": f"{name}{step}", "group_id": group, "sample": number, "problem_id": "p", "reward": reward}
                for number, (name, (group, reward, _, _)) in enumerate(TOKENS.items())
            ]
            texts = [transcript(f"{name}{step}", "text", ids, mask) for name, (_, _, ids, mask) in TOKENS.items()]
            writer.write_step("rl", step, trajectories=rows, calls=[], transcripts=texts, metrics={})
        writer.finish("finished")
    runs = open_runs(tmp_path)
    found = add_first_difference(runs, failed_rollouts(runs))
    columns = ["sibling", "position", "token", "correct_token"]
    first = found[found.step == 2].set_index("traj_id")[columns]
    assert first.loc["late2"].tolist() == ["right2", 3, "␣two", "␣one"]
    assert first.loc["near2"].tolist() == ["other2", 2, "␣one", "⏎"]
    assert first.loc["short2"].tolist() == ["right2", 3, END, "␣one"]
    assert first.loc["tool2"].tolist() == ["right2", 2, TOOL, "⏎"]
    for name in ("alone2", "bare2"):  # no correct rollout in the group; no token arrays
        assert pd.isna(first.loc[name].position) and first.loc[name].token == first.loc[name].sibling == ""
    groups = failure_groups(found, ["correct_token", "token"]).set_index(["correct_token", "token"])
    assert groups.rollouts.loc[("␣one", "␣two")] == 2


def test_phrases_are_typical_of_failures_and_not_of_code(tmp_path):
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        rows, texts = [], []
        for number in range(80):
            failed = number % 2 == 0
            text = "Let us see, the sum of 12 and 7 is clear."
            text += " I will just guess 5.</reason>" if failed and number % 4 == 0 else " I check it again."
            text += "<tool_call>print the bad word</tool_call>" if failed else ""
            rows.append({"traj_id": f"t{number}", "problem_id": "p", "reward": float(not failed)})
            texts.append(transcript(f"t{number}", text))
        writer.write_step("rl", 1, trajectories=rows, calls=[], transcripts=texts, metrics={})
        writer.finish("finished")
    runs = open_runs(tmp_path)
    found = add_phrases(runs, failed_rollouts(runs), words=2)
    assert (found.phrase != "").sum() == 20 and set(found.z.notna() == (found.phrase != "")) == {True}
    assert set(found.phrase) <= {"", "will just", "just guess", "guess N"} and "" in set(found.phrase)
    assert "other" in " ".join(plot_failure_map(found, ["kind", "phrase"]).data[0].labels)
    with pytest.raises(RunStoreError, match="words must be at least 1"):
        add_phrases(runs, found, words=0)
    assert list(add_phrases(runs, found.iloc[:0]).phrase) == []
