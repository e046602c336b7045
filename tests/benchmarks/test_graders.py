"""The graders of microsoft/rStar as a reward, and the table that compares graders."""

import importlib.util
import json
import time
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import graders
from rstar_lab.common.errors import UserError
from rstar_lab.common.resources import benchmark_file
from rstar_lab.rl.reward import make_reward

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 42", "42", 1.0),  # prime_math needs no box
        ("\\boxed{x+1}", "1+x", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_the_released_reward_grades_the_complete_response(response, answer, expected):
    assert make_reward("released")(response, answer) == expected


@pytest.mark.slow
def test_verls_function_gives_the_same_results():
    from verl.utils.reward_score.prime_math import compute_score

    from rstar_lab.rl.reward.boxed import released_grade

    for response in ("so \\boxed{7}", "x is 3/4", "\\boxed{(1,2)}", "\\boxed{2\\pi}", "nothing"):
        for answer in ("7", "0.75", "(1, 2)", "6.28"):
            assert released_grade(response, answer, graders=("prime_math",)) == bool(compute_score(response, answer)[0])


@pytest.mark.slow
def test_an_endless_expression_ends_within_the_limit():
    started = time.monotonic()
    assert make_reward("released")("\\boxed{9^{9^{9^{9^9}}}}", "7") == 0.0
    assert time.monotonic() - started < 10


def test_without_verl_the_reward_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="requires verl"):
        make_reward("released")("1", "1")


def test_the_table_counts_agreement_per_set_and_kind(tmp_path, capsys):
    rows = [
        {"question": "a?", "answer": "It is half.\n#### 12"},
        {"question": "b?", "answer": "#### 1,234"},
        {"question": "c?", "answer": "so 5 and 7\n#### 12"},
    ]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    graders.main(tmp_path, tmp_path / "different.jsonl", tmp_path / "graders.csv")
    found = pd.read_csv(tmp_path / "graders.csv").set_index("kind")
    assert capsys.readouterr().out.startswith("| gsm8k | answer | 3 | 3 | 3 |")
    assert found.responses.to_dict() == {"answer": 3, "other answer": 2, "solution": 3}
    assert found.accepted_ours.to_dict() == {"answer": 3, "other answer": 0, "solution": 3}
    assert found.agree_released["answer"] == 3
    for line in (tmp_path / "different.jsonl").read_text().splitlines():
        accepted = json.loads(line)["accepted"]
        assert accepted["ours"] != accepted["released"]
    with pytest.raises(UserError, match="none of the files"):
        graders.main(tmp_path / "elsewhere")


def test_the_table_of_the_documentation_is_the_recorded_one():
    rows = pd.read_csv(benchmark_file("graders.csv"))
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    assert graders.markdown(graders.totals(rows)) in page
    differences = rows.responses.sum() - rows.agree_released.sum()
    assert f"Of {rows.responses.sum():,} responses, `verify` and `released` differ on {differences}." in page
    assert f"The {differences} differences:" in page
    other = rows.kind == "other answer"
    assert rows.accepted_ours[other].sum() == 0 and (rows.accepted_ours == rows.responses)[~other].all()
