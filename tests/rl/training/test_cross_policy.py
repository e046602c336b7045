"""Cross-policy sampling: turns of an older checkpoint in the rollouts of a run."""

import pytest
from helpers.scripted_training import Player, problem, train

from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.methods.cross_policy import OLDER, OLDER_SERVER, CrossPolicy
from rstar_lab.rl.recipe import RlSection
from rstar_lab.runs.reader import RunReader

ADD = {"type": "cross_policy", "url": "http://127.0.0.1:9", "share": 0.3}


class Fixed:
    def __init__(self, version):
        self.version = version

    async def generate(self, prompt_ids, sampling):
        return Completion([1], [0.0], FinishReason.STOP, policy_version=self.version)

    def on_turn(self, text, last): ...
    def leave(self): ...


async def test_each_turn_is_of_the_older_policy_with_probability_share():
    slot = CrossPolicy(**ADD).wrap_slots(lambda index, task: Fixed(7), [], {OLDER_SERVER: Fixed(3)})(0, None)
    versions = [(await slot.generate([1], Sampling(8, seed=seed))).policy_version for seed in range(3000)]
    assert set(versions) == {7, OLDER} and versions.count(OLDER) / 3000 == pytest.approx(0.3, abs=0.03)
    again = [(await slot.generate([1], Sampling(8, seed=seed))).policy_version for seed in range(50)]
    assert again == versions[:50], "the seed of the turn decides"


async def test_a_run_trains_on_turns_of_both_policies(tmp_path):
    older = Player()
    older.versions.append(0)
    method = {"roc": {"oversample": 1}, "add": [ADD | {"share": 0.5}]}
    pool = [problem(f"p{i}", 0.5) for i in range(6)]
    _, folder = await train(
        tmp_path, [{"name": "a", "steps": 3}], {"a": pool}, servers={OLDER_SERVER: older},
        method=method, schedule={"lockstep": False}, correction={"type": "tis"},
    )  # fmt: skip
    lines = RunReader(folder).metrics()
    assert any(line["kept"] for line in lines) and older.prompts
    for line in lines:
        if line["kept"]:
            assert 0 < line["stale_tokens"] < 1, "the share of trained tokens of the older policy"
            assert line["policy_gap"] > 0
    rows = RunReader(folder).read("trajectories", ["policy_version"]).to_pylist()
    assert {row["policy_version"] for row in rows} >= {OLDER}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "set correction"),
        ({"correction": {"type": "tis"}, "schedule": {"lockstep": True}}, "without lockstep"),
        ({"correction": {"type": "tis"}, "schedule": {"type": "async"}}, "requires schedule"),
    ],
)
def test_what_cannot_be_combined_is_refused(keys, words):
    with pytest.raises(ValueError, match=words):
        RlSection(method={"add": [ADD]}, **keys)
