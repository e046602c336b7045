"""Engine and trainer are compared on completions of a prompt of the run."""

import pytest
import torch
from helpers.tiny_models import make_model

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import Completion
from rstar_lab.rl.engines.group import assert_parity


class Engine:
    """Completes every prompt with token 1. Its log-probs differ from the model's by `error` unless the prompt is `good`."""

    name = "engine"

    def __init__(self, model, good, error=5.0):
        self.model, self.good, self.error = model, good, error

    async def generate(self, prompt, sampling):
        logits_V = self.model(torch.tensor([prompt])).logits[0, -1].detach().float()
        log_prob = float(logits_V.log_softmax(-1)[1])
        return Completion([1], [log_prob + self.error * (prompt != self.good)], "stop")


async def test_log_probs_are_compared_on_the_prompt_of_the_run(tmp_path):
    """In bfloat16 the log-probs of an unlikely token after a prompt of special tokens differ by several nats."""
    engine = Engine(make_model(tmp_path), good=[5, 7, 5])
    await assert_parity(engine, engine.model, 0.1, [5, 7, 5])
    with pytest.raises(UserError, match="is 5"):
        await assert_parity(engine, engine.model, 0.1)
