"""Tests of the transformers engine: log-probs, stop tokens, seeds, new weights."""

import asyncio

import torch
from helpers.tiny_models import make_model, prompts, worst_gap
from safetensors.torch import save_file

from rstar_lab.rl.engine import FinishReason, Sampling
from rstar_lab.rl.engines.hf import HfEngine


async def sample(engine, count: int = 10, **keys):
    sampling = {"max_tokens": 12, "temperature": 0.8} | keys
    return await asyncio.gather(
        *engine.submit([(p, Sampling(seed=i, **sampling)) for i, p in enumerate(prompts(count))])
    )


async def test_log_probs_seeds_and_weights(tmp_path):
    model = make_model(tmp_path / "model")
    engine = HfEngine(max_batch=4)
    await engine.start(tmp_path / "model", {"dtype": "float32"})
    first, again = await sample(engine), await sample(engine)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert max(worst_gap(model, p, c, 0.8) for p, c in zip(prompts(), first, strict=False)) < 2e-5
    # The seed determines the tokens, independent of the batch.
    alone = await engine.generate(prompts()[3], Sampling(12, 0.8, seed=3))
    assert alone.token_ids == first[3].token_ids

    other = make_model(tmp_path / "other", seed=1)
    save_file({k: v.contiguous() for k, v in other.state_dict().items()}, tmp_path / "w.safetensors")
    await engine.load_weights(tmp_path / "w.safetensors", 5)
    changed = await sample(engine)
    assert max(worst_gap(other, p, c, 0.8) for p, c in zip(prompts(), changed, strict=False)) < 2e-5
    assert {c.policy_version for c in changed} == {5}

    stop = changed[0].token_ids[2]
    (stopped,) = await asyncio.gather(
        *engine.submit([(prompts()[0], Sampling(12, 0.8, seed=0, stop_token_ids=(stop,)))])
    )
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == changed[0].token_ids[: changed[0].token_ids.index(stop) + 1]
    await engine.aclose()


async def test_temperature_0_is_greedy_and_so_is_a_tiny_top_p(tmp_path):
    model = make_model(tmp_path / "model")
    engine = HfEngine()
    await engine.start(tmp_path / "model", {"dtype": "float32"})
    for completion, prompt in zip(await sample(engine, 3, temperature=0.0), prompts(), strict=False):
        ids = torch.tensor([prompt + completion.token_ids])
        best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == completion.token_ids
    # Top-p sampling from a single token is greedy decoding.
    narrow = await sample(engine, 3, top_p=1e-6)
    greedy = await sample(engine, 3, temperature=0.0)
    assert [c.token_ids for c in narrow] == [c.token_ids for c in greedy]
    assert all(log_prob == 0.0 for c in narrow for log_prob in c.log_probs)


async def test_a_prompt_that_fills_the_context_ends_with_the_token_limit(tmp_path):
    """As on a vLLM server; other requests of the batch are not affected."""
    model = make_model(tmp_path / "model")
    engine = HfEngine(max_batch=4)
    await engine.start(tmp_path / "model", {"dtype": "float32"})
    full = prompts()[0] * model.config.max_position_embeddings
    long, other = await asyncio.gather(*engine.submit([(full, Sampling(4)), (prompts()[1], Sampling(4, seed=1))]))
    assert (long.token_ids, long.finish_reason) == ([], FinishReason.LENGTH) and len(other.token_ids) == 4
    await engine.aclose()
