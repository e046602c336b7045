"""Training in several environments with real updates: statistics, failures and resume."""

import pytest
from helpers.scripted_training import problem, right, train, weights

from rstar_lab.analysis import open_runs, plot_curves
from rstar_lab.common.errors import UserError
from rstar_lab.rl.environments.base import Environment, RewardPart
from rstar_lab.rl.environments.loading import EnvironmentClass
from rstar_lab.rl.environments.mixture import Mixture, RunEnvironment, make_environments
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.recipe.rl import EnvironmentEntry
from rstar_lab.runs.reader import RunReader

STAGES = [{"name": "rl", "steps": 2}]


class Asking(Environment):
    def reset(self, problem, seed):
        if problem.problem_id == "b3":
            raise LookupError("no data")
        return problem.question

    def score(self, trajectory):
        return {"won": right(trajectory.text, trajectory.truth), "length": RewardPart(len(trajectory.text), 0)}


def environments() -> dict[str, RunEnvironment]:
    asking = EnvironmentClass("asking", Asking, 20.0)
    return {"asking": RunEnvironment(asking.tools, right, asking), "plain": RunEnvironment({}, right)}


def pool() -> Mixture:
    named = {"a": "plain", "b": "asking"}
    problems = [
        problem(f"{letter}{i}", 0.5).model_copy(update={"environment": environment})
        for letter, environment in named.items()
        for i in range(4)
    ]
    return Mixture(problems, {"asking": 2.0, "plain": 1.0})


@pytest.mark.slow
async def test_a_mixture_is_trained_stored_and_resumed(tmp_path):
    rl = {"problems_per_step": 6}
    _, run = await train(tmp_path / "a", STAGES, {"rl": pool()}, environments=environments(), **rl)
    lines = RunReader(run).metrics()
    assert [line["env/asking/rollouts"] for line in lines] == [16, 16]
    assert [line["env/plain/rollouts"] for line in lines] == [8, 8]
    assert [line["environment_failures"] for line in lines] == [4, 4]  # of problem b3, drawn once in each step
    assert all(0 <= line["env/asking/correct"] <= 1 and line["metrics/length"] > 0 for line in lines)
    table = RunReader(run).read("trajectories").to_pandas()
    failed = table[table.stop_reason == "environment_error"]
    assert set(failed.problem_id) == {"b3"} and not failed.kept.any() and len(failed) == 8
    runs = open_runs(tmp_path / "a")
    frame = plot_curves(runs, ["rewarded", "metrics.length"], by="environment").frame
    assert set(frame.group[frame.metric == "rewarded"]) == {"asking", "plain"}
    assert set(frame.group[frame.metric == "metrics.length"]) == {"asking"}
    assert runs.count(frame["where"].iloc[0]) in (8, 16)
    assert "b3: reset raised LookupError: no data" in runs.transcript(failed.traj_id.iloc[0]).content.iloc[-1]

    _, stopped = await train(tmp_path / "b", STAGES, {"rl": pool()}, environments=environments(), stop_after=1, **rl)
    await train(tmp_path / "b", STAGES, {"rl": pool()}, environments=environments(), **rl)
    assert weights(stopped / "checkpoints" / "step=000002") == weights(run / "checkpoints" / "step=000002")


async def test_a_run_stops_if_every_rollout_fails(tmp_path):
    broken = problem("b3", 0.5).model_copy(update={"environment": "asking"})
    with pytest.raises(UserError, match="all 8 rollouts of the step failed; the first: environment asking, problem b3"):
        await train(tmp_path, STAGES, {"rl": [broken]}, environments=environments())


def test_entries_of_a_recipe_become_environments():
    rl = RlSection(
        environments=(
            EnvironmentEntry(name="plain", weight=2, limits={"max_turns": 3}, roc_penalties=("errors",)),
            EnvironmentEntry(name="own", environment="x:Y"),
        )
    )
    made = make_environments(rl, {"own": EnvironmentClass("own", Asking, 1.0)}, lambda names: {})
    assert made["plain"].limits == {"max_turns": 3} and made["plain"].environment is None
    assert made["own"].environment.name == "own" and made["own"].tools == {}
    assert rl.method.roc.bound(rl)._environment_penalties == {"plain": ("errors",)}
