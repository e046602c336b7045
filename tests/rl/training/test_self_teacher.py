"""Self-distillation: the choice of the demonstration, the teacher's log-probs, and a run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.scripted_training import TOKENIZER, tiny
from helpers.trajectories import BATCH

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.methods.sdpo import DEMONSTRATION, Sdpo
from rstar_lab.rl.recipe import LimitsSection, RlSection
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.training.driver import LocalPasses
from rstar_lab.rl.training.update import Learner
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord

SDPO = Sdpo(weight=0.5).bound(RlSection())


def call(outcome):
    return ToolCallRecord(0, 0, "python", "1/0", outcome, "", 0.0, 0.0, 0)


def rollout(i, reward, *outcomes, group="g", p_err=0.0, p_format=0.0, **changes):
    own = replace(BATCH[i % 6], traj_id=f"r{i}", sample=i, group_id=group, reward=reward, text=f"solution {i}")
    return replace(own, calls=tuple(map(call, outcomes)), p_err=p_err, p_format=p_format, **changes)


def test_the_demonstration_is_the_cleanest_success_of_the_group():
    failed = [rollout(0, 0.0), rollout(1, 0.0, group="h"), rollout(2, 0.0, group="none")]
    others = [
        rollout(3, 1.0, Outcome.EXCEPTION, Outcome.OK, p_err=0.5),
        rollout(4, 1.0, p_err=0.5),
        rollout(5, 1.0, Outcome.OK, p_format=0.2),
        rollout(6, 1.0, Outcome.OK, stop_reason=StopReason.ENVIRONMENT_ERROR),
        rollout(7, 0.0, Outcome.OK),
        rollout(8, 1.0, Outcome.SYNTAX_ERROR, group="h", p_err=1.0),
    ]
    found = SDPO.demonstrations(failed, [*failed, *others])
    assert [t and t.traj_id for t in found] == ["r5", None, None]


@pytest.mark.slow
async def test_the_teacher_is_the_policy_with_the_demonstration_in_its_prompt():
    model = tiny()
    learner, rl, codec = Learner(model), RlSection(micro_batch_tokens=400), Codec(TOKENIZER, {})
    rollouts = [rollout(0, 0.0), rollout(1, 1.0, Outcome.OK), rollout(2, 0.0)]
    selection = Selection.of(rollouts, [-1.0, 1.0, -1.0])
    passes = LocalPasses(
        learner, rl, RolloutContext(codec, {}, lambda text, answer: 0.0, LimitsSection(max_response_tokens=500)), None
    )

    async def taught(max_tokens):
        passes.max_tokens = max_tokens
        streams = (await SDPO.forward(selection, rollouts, passes)).streams
        return [
            np.broadcast_to(own.reference_log_prob_T, len(t.response_ids))
            for t, own in zip(rollouts, streams, strict=True)
        ]

    found = await taught(4096)
    assert np.isnan(found[1]).all()
    prompt = codec.prompt_ids(DEMONSTRATION.format(question="q", solution="solution 1"))
    for t, values in ((rollouts[0], found[0]), (rollouts[2], found[2])):
        logits = model(torch.tensor([prompt + t.response_ids])).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(t.response_ids)[:, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(values, np.where(t.loss_mask, expected, np.nan), atol=1e-4)
    assert all(np.isnan(values).all() for values in await taught(len(prompt)))
