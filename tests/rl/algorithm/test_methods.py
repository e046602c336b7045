"""Methods and streams: each hook against an independent formula."""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.cases import read_cases
from helpers.trajectories import BATCH, trajectory
from pydantic import ValidationError

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.algorithm.selection import Selection, cut_mini_batches, select_rollouts
from rstar_lab.rl.algorithm.streams import Streams, trained_mask
from rstar_lab.rl.methods.control_tokens import ControlTokens
from rstar_lab.rl.methods.echo import Echo
from rstar_lab.rl.methods.grpo import Grpo
from rstar_lab.rl.methods.maxrl import Maxrl
from rstar_lab.rl.methods.overlong_buffer import OverlongBuffer
from rstar_lab.rl.methods.roc import Roc, warn_of_partial_credit
from rstar_lab.rl.methods.tool_budget import ToolBudget
from rstar_lab.rl.methods.user import user_hooks
from rstar_lab.rl.methods.void_turns import VoidTurns
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.step import rollout_metrics, selection_metrics, stale_tokens
from rstar_lab.rl.training.group_stream import trim
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Turn

ALL = Roc(rule="none").bound(RlSection())
ROC = Roc().bound(RlSection(group_size=4))


def overlong(tokens, limit):
    return OverlongBuffer(tokens=tokens).bound(RlSection(limits={"max_response_tokens": limit}))


def group(rewards, name="g", length=8):
    return [
        replace(trajectory(i, 3, length), traj_id=f"{name}{i}", group_id=name, problem_id=name, reward=float(r))
        for i, r in enumerate(rewards)
    ]


def released(text):
    """The format penalty of microsoft/rStar on the text of a response, written from its description."""
    opened, closed = text.count("<answer>"), text.count("</answer>")
    pairs = len(re.findall(r"<answer>.*?</answer>", text, re.DOTALL))
    turns = len(re.findall(r"<\|im_start\|>assistant.*?<\|im_end\|>", text, re.DOTALL))
    if opened == 0 or closed == 0 or opened != pairs or closed != pairs or turns == 0:
        return 1.0
    return min((pairs - 1) / turns, 1.0)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("turns", read_cases(__file__)["turns"])
@pytest.mark.parametrize("response", ["4", "No <answer> here", "<answer>4</answer>"])
def test_the_released_format_penalty_is_that_of_the_text(turns, cut, response):
    """The response contains the headers of all turns but the first; a turn that was cut off has no end."""
    between = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{response}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    text = between.join(turns) + ("" if cut else "<|im_end|>")
    calls = tuple(ToolCallRecord(i, 0, "python", "", Outcome.OK, response, 0, 0, 0) for i in range(len(turns) - 1))
    rollout = replace(
        BATCH[0],
        turns=tuple(Turn(0, 1, turn, 0, 0, 0) for turn in turns),
        calls=calls,
        stop_reason=StopReason.LENGTH if cut else StopReason.ANSWERED,
        p_format=0.25,
    )
    assert Roc(rule="released", penalties=("format",)).bound(RlSection()).penalty(rollout) == released(text)
    assert Roc(penalties=("format",)).bound(RlSection()).penalty(rollout) == 0.25


def outputs(t, *spans):
    return replace(t, turns=(Turn(0, 3, "", 0, 0, 0, outputs=spans),))


def test_echo_keeps_groups_with_equal_rewards_for_the_cross_entropy_only():
    mixed, failed = group([1, 0, 0, 1], "mixed"), group([0, 0, 0, 0], "failed")
    rollouts = [outputs(t, (3, 4)) for t in mixed + failed]
    without = select_rollouts(rollouts, (ALL, Grpo()), 0)
    kept = select_rollouts(rollouts, (ALL, Grpo(), Echo(weight=0.3)), 0)
    assert [t.group_id for t in without.trajectories] == ["mixed"] * 4
    assert [t.group_id for t in kept.trajectories] == ["mixed"] * 4 + ["failed"] * 4
    assert kept.advantages == without.advantages + [0.0] * 4
    assert (kept.groups, kept.equal_groups) == (without.groups, without.equal_groups) == (1, 1)
    for t, streams in zip(kept.trajectories, kept.streams, strict=True):
        assert streams.ce_weight_T.tolist() == pytest.approx([0, 0, 0, 0.3, 0, 0, 0, 0])
        assert trained_mask(t, streams).any() == (t.group_id == "mixed")


def test_trimmed_tokens_are_in_no_term_of_the_loss():
    """A stale token of the model is not trained on, and it is not an output of a tool."""
    tokens = [True, True, True, False, False, True, True, True]
    turns = (Turn(0, 3, "", 0, 0, 0, ((1, 3),), outputs=((3, 5),)), Turn(5, 8, "", 0, 0, 0, ((1, 1), (2, 2))))
    rollouts = [replace(t, loss_mask=tokens, turns=turns, policy_version=2) for t in group([1, 0])]
    selection = select_rollouts(rollouts, (ALL, Grpo(), Echo(weight=1.0)), 0)
    trimmed, share = trim(selection, lambda version: version < 2)
    assert share == pytest.approx(4 / 6)
    for t, streams in zip(trimmed.trajectories, trimmed.streams, strict=True):
        assert t.loss_mask == tokens, "which tokens the model generated does not change"
        assert trained_mask(t, streams).tolist() == [False] * 6 + [True] * 2
        assert np.flatnonzero(streams.ce_weight_T).tolist() == [3, 4]
    assert stale_tokens(trimmed, 2) == 0.0 and stale_tokens(selection, 2) == pytest.approx(4 / 6)


def test_trim_keeps_what_is_in_the_cross_entropy_only():
    mixed, equal = group([1, 0], "m"), group([1, 1], "e")
    rollouts = [outputs(t, (3, 4)) for t in mixed + equal]
    selection = select_rollouts(rollouts, (ALL, Grpo(), Echo(weight=1.0)), 0)
    fresh, share = trim(selection, lambda version: False)
    assert fresh.trajectories == selection.trajectories and share == 0.0
    stale, share = trim(selection, lambda version: True)
    assert stale.trajectories == selection.trajectories and share == 1.0, "the outputs of tools are not stale"
    gone, _ = trim(select_rollouts(mixed, (ALL, Grpo()), 0), lambda version: True)
    assert gone.trajectories == [] and [t for t, _ in gone.outside] == mixed, "nothing of them is left to train on"
    classes = selection_metrics(stale)
    assert (classes["class/masked/stale"], classes["class/equal_group"], classes["class/trained"]) == (2, 2, 0)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_policy_loss_does_not_depend_on_the_cross_entropy(parts):
    rng = np.random.default_rng(parts)
    rollouts = []
    for number in range(9):
        rewards = rng.integers(0, 2, 4) if number % 3 else [number % 2] * 4
        rollouts += [outputs(t, (3, 4)) for t in group(rewards, f"g{number}-")]
    plain = select_rollouts(rollouts, (ALL, Grpo()), 0)
    both = select_rollouts(rollouts, (ALL, Grpo(), Echo(weight=1.0)), 0)
    in_policy = {t.traj_id for t in plain.trajectories}
    own = [[plain.trajectories[i].traj_id for i in batch] for batch in cut_mini_batches(plain, parts)]
    cut = [[both.trajectories[i].traj_id for i in batch] for batch in cut_mini_batches(both, parts)]
    assert [[name for name in batch if name in in_policy] for batch in cut] == own
    sizes = [len(batch) for batch in cut]
    assert sum(sizes) == 36 and max(sizes) - min(sizes) <= 1


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(UserError, match=r"maxrl requires rewards of at least 0; rollout .* has -1"):
        select_rollouts(group([1, -1, -1, 1]), (ALL, Maxrl()), 0)


@pytest.mark.parametrize("rewards, warned", [([0, 1], False), ([-1, 1], False), ([0, 0.1, 1], True), ([0.1, 1], True)])
def test_partial_credit_under_the_rule_is_reported_once(rewards, warned, caplog):
    warn_of_partial_credit.cache_clear()
    for _ in range(2):
        select_rollouts(group(rewards * 4), (ROC, Grpo()), 0)
    assert sum("counts as successful" in record.message for record in caplog.records) == warned


def test_a_success_at_the_limit_pays_for_its_tool_calls():
    calls = tuple(ToolCallRecord(0, i, "python", "", Outcome.OK, "", 0, 0, 0) for i in range(4))
    rollouts = [replace(t, calls=calls[:number]) for number, t in enumerate(group([1, 1, 1, 0, 0, 0]))]  # easy from 0.5
    shaped = overlong(8, len(rollouts[0].response_ids))  # the responses are at the limit: 1 - 1 = 0
    assert shaped.shape_reward(rollouts[0]) == -1
    budget = ToolBudget(weight=0.5).bound(RlSection(limits={"max_turns": 4}))
    found = select_rollouts(rollouts, (ALL, Grpo(), shaped, budget), 0).advantages
    assert found[0] > found[1] > found[2] > 0 > found[3]


def test_metrics_of_correctness_leave_out_failures_of_the_infrastructure():
    rollouts = group([1, 1, 0, 0])
    failed = [replace(t, stop_reason=StopReason.ENGINE_ERROR) for t in rollouts[2:]]
    metrics = rollout_metrics(rollouts[:2] + failed)
    assert metrics["correct"] == 1.0 and metrics["reward"] == 1.0 and metrics["engine_failures"] == 2
    assert rollout_metrics(failed)["correct"] is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": {"add": [{"type": "opd", "weight": 0.1}]}, "temperature": 0.7}, "temperature"),
        ({"method": {"add": [{"type": "opd", "weight": 0.1}], "kl_coefficient": 0.1}}, "one reference model"),
        ({"method": {"add": [{"type": "sdpo", "weight": 0.1}], "kl_coefficient": 0.1}}, "one reference model"),
    ],
)
def test_teachers_that_the_loss_cannot_use_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        RlSection(**keys)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("methods", [(), (VoidTurns(), ControlTokens(), Echo(weight=0.1))])
def test_every_rollout_is_in_exactly_one_class(masks, methods):
    """The classes add up to the rollouts of the step. A masked rollout is not in the statistics of its group."""
    rng = np.random.default_rng(0)
    rollouts = []
    for number in range(40):
        for t in group(rng.integers(0, 2, 8) if number % 4 else [1] * 8, f"g{number}-"):
            turn = Turn(0, 3, "", 0, 0, 0, void=bool(rng.random() < 0.1), control_token=bool(rng.random() < 0.1))
            outcome = rng.choice([Outcome.OK, Outcome.EXCEPTION, Outcome.SANDBOX_ERROR, Outcome.QUEUE_TIMEOUT])
            calls = (ToolCallRecord(0, 0, "python", "", outcome, "", 0, 0, 0),)
            stop = rng.choice([StopReason.ANSWERED, StopReason.ANSWERED, StopReason.ENGINE_ERROR])
            rollouts.append(replace(t, turns=(turn,), calls=calls, stop_reason=stop))
    selection = select_rollouts(rollouts, (ROC, Grpo(), *methods), 0, mask_failures=masks)
    classes = {name: count for name, count in selection_metrics(selection).items() if name.startswith("class/")}
    assert sum(classes.values()) == len(rollouts)
    assert {"class/trained", "class/roc", "class/equal_group", "class/failed/engine_error"} <= classes.keys()
    assert ("class/masked/sandbox_error" in classes) == ("class/masked/queue_timeout" in classes) == masks
    assert ("class/masked/void" in classes) == ("class/masked/control_tokens" in classes) == bool(methods)
    trained = [t for t in selection.trajectories if t.traj_id not in selection.left_out]
    assert len(trained) == classes["class/trained"]
    if masks:
        assert not any(t.infrastructure_failure for t in selection.trajectories)
        usable = [t for t in rollouts if t.usable and not t.infrastructure_failure]
        alone = select_rollouts(usable, (ROC, Grpo(), *methods), 0)
        assert alone.trajectories == selection.trajectories and alone.advantages == selection.advantages


# Methods of the user

SOURCE = """
from rstar_lab.rl import Streams

class PerTurn:
    equal_groups = "train"

    def select(self, rollouts, rng):
        return [i for i, t in enumerate(rollouts) if t.sample != 3]

    def shape_reward(self, rollout):
        return -0.5 * rollout.sample

    def score_group(self, rollouts, rewards):
        return [[r, -r] if t.sample == 0 else r for t, r in zip(rollouts, rewards)]

    def score_rollout(self, rollout, streams):
        return None if rollout.sample == 2 else streams.plus(Streams(ce_weight_T=0.5))

    def metrics(self, rollouts):
        return {"seen": len(rollouts)}

class Nothing:
    pass

def per_token(rewards, trajectories):
    return [[float(k) for k in range(len(t.response_ids))] for t in trajectories]

class Wrong:
    def score_group(self, rollouts, rewards):
        return [[1.0, 2.0, 3.0]] * len(rollouts)

class Broken:
    def shape_reward(self, rollout):
        return 1 / 0

class NotFinite:
    def score_group(self, rollouts, rewards):
        return [float("inf")] * len(rollouts)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"methods_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return name


def test_a_class_of_the_user_has_all_hooks(module):
    own = user_hooks(f"{module}:PerTurn", "rl.method.type")
    rollouts = [replace(t, turns=(Turn(0, 3, "", 0, 0, 0), Turn(4, 8, "", 0, 0, 0))) for t in group([1, 1, 1, 1])]
    kept = select_rollouts(rollouts, (ALL, own), 0)
    assert [t.sample for t in kept.trajectories] == [0, 1]
    assert kept.streams[0].advantage_T.tolist() == [1, 1, 1, 0, -1, -1, -1, -1]
    assert kept.streams[1].advantage_T == 0.5 and kept.streams[1].ce_weight_T == 0.5
    assert selection_metrics(kept)["class/masked/own"] == 1 and own.metrics(rollouts) == {"metrics/seen": 4.0}


def test_advantages_of_the_user_may_be_per_token(module):
    kept = select_rollouts(group([1, 0]), (ALL, user_hooks(f"{module}:per_token", "rl.method.type")), 0)
    assert kept.streams[0].advantage_T.tolist() == list(range(8))
    own = trained_mask(kept.trajectories[0], kept.streams[0])
    assert kept.advantages[0] == pytest.approx(np.arange(8)[own].mean())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "rl.method.type: .*Nothing has none of the hooks select"),
        (
            "Wrong",
            r"Wrong.score_group returned .*; expected 2 finite numbers, or for rollout g0 one number per turn \(0\)",
        ),
        ("Broken", "Broken.shape_reward failed at .*ZeroDivisionError"),
        ("NotFinite", "expected 2 finite numbers"),
    ],
)
def test_mistakes_of_the_user_are_named(module, name, message):
    with pytest.raises(UserError, match=message):
        select_rollouts(group([1, 0]), (ALL, user_hooks(f"{module}:{name}", "rl.method.type")), 0)


def test_streams_of_several_methods_are_combined():
    one = Streams(1.0, loss_weight_T=np.array([1.0, 0.0]), ce_weight_T=0.5)
    both = one.plus(Streams(np.array([0.5, 1.0]), loss_weight_T=0.5, reference_log_prob_T=-1.0))
    assert both.advantage_T.tolist() == [1.5, 2.0] and both.loss_weight_T.tolist() == [0.5, 0.0]
    assert (both.ce_weight_T, both.reference_log_prob_T) == (0.5, -1.0)
    with pytest.raises(ValueError, match="two methods have a reference model"):
        both.plus(Streams(reference_log_prob_T=0.0))
    assert Selection().advantages == []
