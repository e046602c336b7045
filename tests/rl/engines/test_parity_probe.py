"""Engine and trainer are compared on completions of a prompt of the run, and engines have the weights sent last."""

import random
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch
from helpers.tiny_models import make_model
from safetensors.torch import load_file

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import Completion
from rstar_lab.rl.engines.group import EngineGroup, assert_parity


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


async def test_engines_have_the_weights_of_the_last_call(tmp_path):
    """Also if a folder is loaded again after other weights. A folder whose weights the engines have is not sent again."""
    models = [make_model(tmp_path / f"{seed}", seed=seed) for seed in range(3)]
    sent: list[torch.Tensor] = []

    async def load_weights(path, version):
        sent.append(load_file(path)["lm_head.weight"].clone())

    engine = SimpleNamespace(name="e", load_weights=load_weights, aclose=AsyncMock())
    group, order, before = EngineGroup([engine], tmp_path, 8), random.Random(0), None
    for _ in range(40):
        chosen, count = order.randrange(3), len(sent)
        if chosen == 2:
            await group.load(models[2], 1)
        else:
            await group.load_folder(tmp_path / f"{chosen}")
        assert torch.equal(sent[-1], models[chosen].lm_head.weight)
        assert len(sent) == count + (chosen == 2 or chosen != before)
        before = chosen
    await group.aclose()
