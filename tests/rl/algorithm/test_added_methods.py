"""Added methods, each against an independent formula: overlong filter, repetition, task normalisation and samplers."""

import json
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.scripted_training import recipe_of
from helpers.trajectories import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import select_rollouts
from rstar_lab.rl.environments.mixture import Mixture
from rstar_lab.rl.methods.repetition import repeated_share
from rstar_lab.rl.methods.samplers import ProblemHistory, add_results
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.resolved import read_stage_problems
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.trajectory import StopReason, Turn

POOL = [Problem(problem_id=f"p{i}", question=f"q{i}", answer="1", difficulty=i / 8) for i in range(9)]


def section(*add, **keys):
    return RlSection(method={"roc": {"rule": "none"}, "add": list(add)}, **keys)


def group(rewards, name="g", **changes):
    return [
        replace(
            trajectory(i, 3, 8 + i), traj_id=f"{name}{i}", group_id=name, problem_id=name, reward=float(r), **changes
        )
        for i, r in enumerate(rewards)
    ]


@pytest.mark.slow  # verl takes seconds to import
@pytest.mark.parametrize("baseline", [True, False])
def test_reinforce_pp_equals_verls(baseline):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    rollouts = group([1, 0, 0, 1], "a") + group([0.5, 0, 1, 0], "b")
    method = {"type": "reinforce_pp", "baseline": baseline, "roc": {"rule": "none"}}
    ours = select_rollouts(rollouts, RlSection(method=method).hooks, 0).advantages
    width = max(len(t.loss_mask) for t in rollouts)
    mask = torch.tensor([[*t.loss_mask, *[False] * (width - len(t.loss_mask))] for t in rollouts]).float()
    rewards = torch.zeros_like(mask)
    for row, t in enumerate(rollouts):
        rewards[row, int(mask[row].nonzero()[-1])] = t.reward
    name = f"reinforce_plus_plus{'_baseline' if baseline else ''}"
    found, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards,
        response_mask=mask,
        index=[t.group_id for t in rollouts],
        config=SimpleNamespace(gamma=1.0),
    )
    np.testing.assert_allclose(
        ours, (found * mask).sum(1) / mask.sum(1), rtol=0.01
    )  # verl's deviation is that of a sample


def test_tokens_of_each_task_have_advantages_of_mean_0_and_deviation_1():
    rollouts = group([1, 0, 0, 0], "a") + group([1, 1, 1, 0], "b") + group([3, 0, 1, 0], "c", environment="other")
    plain = select_rollouts(rollouts, section().hooks, 0)
    found = select_rollouts(rollouts, section({"type": "task_normalisation"}).hooks, 0)
    for task in ("", "other"):
        of_task = [i for i, t in enumerate(found.trajectories) if t.environment == task]
        tokens, before = (
            np.concatenate([[s.advantages[i]] * rollouts[i].model_tokens for i in of_task]) for s in (found, plain)
        )
        assert tokens.mean() == pytest.approx(0, abs=1e-9) and tokens.std() == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(tokens, (before - before.mean()) / (before.std() + 1e-6))
    with pytest.raises(ValueError, match="task_normalisation cannot be combined with method otb"):
        RlSection(method={"type": "otb", "add": [{"type": "task_normalisation"}]})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 12), st.integers(1, 5))
def test_repetition_is_the_share_of_windows_that_occurred_before(ids, cut, ngram):
    turns = [Turn(start, end, "", 0, 0, 0) for start, end in ((0, min(cut, len(ids))), (min(cut, len(ids)), len(ids)))]
    windows = [tuple(ids[k : k + ngram]) for turn in turns for k in range(turn.start, turn.end - ngram + 1)]
    expected = 1 - len(set(windows)) / len(windows) if windows else 0.0
    assert repeated_share(replace(group([1])[0], response_ids=ids, turns=turns), ngram) == pytest.approx(expected)


def draw(state, rl, count=3, pool=POOL):
    return [problem.problem_id for problem in state.draw(pool, count, rl, seed=5, stage="s")]


def test_easy_first_draws_by_difficulty_and_then_again():
    state, rl = TrainerState(), section({"type": "easy_first"})
    shuffled = [POOL[i] for i in np.random.default_rng(1).permutation(9)]
    assert [draw(state, rl, pool=shuffled) for _ in range(4)] == [
        ["p0", "p1", "p2"], ["p3", "p4", "p5"], ["p6", "p7", "p8"], ["p0", "p1", "p2"]
    ]  # fmt: skip
    state.retired = ["p3"]
    assert draw(state, rl) == ["p4", "p5", "p6"]


def test_improvement_potential_draws_problems_of_medium_difficulty_first():
    state, rl = TrainerState(), section({"type": "improvement_potential"})
    drawn = [name for _ in range(3) for name in draw(state, rl)]
    values = [POOL[int(name[1:])].difficulty for name in drawn]
    potential = [value * (1 - value) for value in values]
    assert sorted(drawn) == [p.problem_id for p in POOL] and potential == sorted(potential, reverse=True)


def test_a_sampler_refuses_problems_without_difficulty_before_the_run(tmp_path):
    write_problems(tmp_path / "p.jsonl", [POOL[1].model_copy(update={"difficulty": None})])
    stage = {"name": "a", "steps": 1, "problems": {"file": str(tmp_path / "p.jsonl")}}
    for filtered in ({}, {"filter": {"samples": 2}}):
        recipe = recipe_of([stage | filtered], method={"add": [{"type": "easy_first"}]})
        if filtered:
            assert len(read_stage_problems(recipe, recipe.stages[0])) == 1, "the filter measures the difficulty"
        else:
            with pytest.raises(UserError, match="easy_first requires problems with a difficulty"):
                read_stage_problems(recipe, recipe.stages[0])


def test_learnability_draws_in_proportion_to_p_times_1_minus_p():
    rl, pool = section({"type": "learnability"}), POOL[:3]
    history = {"p0": ProblemHistory(0, 7, 14), "p1": ProblemHistory(0, 13, 14), "p2": ProblemHistory(0, 0, 30)}
    rates = np.array([8 / 16, 14 / 16, 1 / 32])
    counts = Counter()
    for seed in range(4000):
        state = TrainerState(position=seed, history=dict(history))
        counts.update(draw(state, rl, 1, pool))
    weights = rates * (1 - rates)
    shares = np.array([counts[p.problem_id] for p in pool]) / 4000
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.03)
    assert len(set(draw(TrainerState(history=dict(history)), rl, 3, pool))) == 3, "without replacement"


def test_thompson_draws_what_the_posterior_puts_next_to_the_target():
    rl, pool = section({"type": "thompson", "target": 0.3}), POOL[:3]
    history = {"p0": ProblemHistory(0, 50, 100), "p1": ProblemHistory(0, 30, 100), "p2": ProblemHistory(0, 2, 4)}
    rng, wins = np.random.default_rng(0), Counter()
    for _ in range(4000):
        sampled = {n: rng.beta(1 + h.correct, 1 + h.total - h.correct) for n, h in history.items()}
        wins[min(sampled, key=lambda name: abs(sampled[name] - 0.3))] += 1
    counts = Counter()
    for position in range(4000):
        counts.update(draw(TrainerState(position=position, history=dict(history)), rl, 1, pool))
    for name in history:
        assert counts[name] / 4000 == pytest.approx(wins[name] / 4000, abs=0.03)


def test_results_of_a_problem_fade_with_each_group():
    state, rl = TrainerState(), section({"type": "thompson", "memory": 0.5})
    for rewards in ([1, 1, 0, 0], [1, 0, 0, 0]):
        state.add_rollouts(group(rewards, "p1"), rl)
    assert state.history == {"p1": ProblemHistory(0, 0.5 * 2 + 1, 0.5 * 4 + 4)}
    history = {}
    failed = [replace(t, stop_reason=StopReason.ENGINE_ERROR) for t in group([0, 0], "p2")]
    add_results(history, failed, 1.0)
    assert history == {}, "rollouts that failed through no fault of the model are not results"


def test_draws_depend_on_seed_position_and_results_only(tmp_path):
    """A state that was written and read again draws the same problems."""
    state, rl = TrainerState(), section({"type": "learnability"})
    for step in range(3):
        names = draw(state, rl)
        state.add_rollouts([t for name in names for t in group([step % 2, 0], name)], rl)
    (tmp_path / "trainer.json").write_text(json.dumps(asdict(state)))
    resumed = TrainerState.read(tmp_path)
    assert resumed == state and draw(resumed, rl) == draw(state, rl)
    assert draw(resumed, section()) != [] and TrainerState.read(tmp_path).history
    state.enter_stage(1)
    assert {one.drawn for one in state.history.values()} == {0}


def test_a_mixture_keeps_the_shares_of_its_environments():
    pool = [p.model_copy(update={"environment": "a" if i < 6 else "b"}) for i, p in enumerate(POOL)]
    state, rl = TrainerState(), section({"type": "easy_first"})
    mixture = Mixture(pool, {"a": 2.0, "b": 1.0})
    drawn = state.draw(mixture, 6, rl, seed=5, stage="s")
    assert Counter(p.environment for p in drawn) == {"a": 4, "b": 2}
    assert [p.problem_id for p in drawn if p.environment == "b"] == ["p6", "p7"]
