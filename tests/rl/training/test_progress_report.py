"""The end of a run: each model against the one before it, and a finished run that goes on with more steps."""

import pytest

from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.pipeline import has_more_steps
from rstar_lab.rl.session import _difference, _only_more_steps
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.training.progress_report import compare_models, failed_calls
from rstar_lab.runs import TRAJECTORIES, RunWriter


def evaluation(folder, name, solved, failed, truncated=0):
    """Write an evaluation of ten problems, two rollouts each: how many problems are solved, how many of 20 calls fail."""
    rows = [
        {column.name: None for column in TRAJECTORIES}
        | {
            "traj_id": f"{name}-{n}", "step": 1, "problem_id": str(n // 2), "reward": float(n // 2 < solved), "calls": 1,
            "errors": int(n < failed), "truncated": n < truncated,
        }
        for n in range(20)
    ]  # fmt: skip
    with RunWriter.open(folder, name, kind="evaluate", recipe={}, seed=0) as run:
        run.write_step("evaluate", 1, trajectories=rows, calls=[], transcripts=[], metrics={})
    return folder / name


@pytest.mark.parametrize(
    ("solved", "failed", "truncated", "first", "second", "fails"),
    [
        (3, 17, 16, "pass@1 +10.0% [-12.6%, +32.6%] on 10 problems: not shown to differ",
         "failed calls 50% → 85%, truncated 0% → 80%", True),
        (9, 1, 0, "pass@1 +70.0%", "failed calls 50% → 5%, truncated 0% → 0%", False),
    ],
)  # fmt: skip
def test_a_model_is_compared_with_the_one_before(tmp_path, solved, failed, truncated, first, second, fails):
    before, after = evaluation(tmp_path, "x-sft", 2, 10), evaluation(tmp_path, "x-rl", solved, failed, truncated)
    lines, most_fail = compare_models(before, after)
    assert lines[0].startswith(f"x-rl against x-sft: {first}") and lines[1].strip() == second and most_fail is fails
    assert lines[0].endswith("better" if solved == 9 else "not shown to differ")
    assert failed_calls(before) == 0.5 and ["updates are too large" in line for line in lines[2:]] == [True] * fails


def test_more_steps_of_the_last_stage_continue_a_finished_run():
    short, long = (load_recipe("tiny_fast", {"stages.rl.steps": steps}) for steps in (7, 9))
    old, new = (recipe.model_dump(mode="json") for recipe in (short, long))
    assert _only_more_steps(old, new, "stages") and not _only_more_steps(new, old, "stages")
    assert not _only_more_steps(old, load_recipe("tiny_fast", {"stages.rl.lr": 1e-5}).model_dump(mode="json"), "stages")
    finished = TrainerState(step=7, stage=0, stage_step=7, finished=True)
    assert has_more_steps(long, finished) and not has_more_steps(short, finished)
    assert _difference(new["stages"], old["stages"], "stages") == "stages.0.steps: 9 then, 7 now"
