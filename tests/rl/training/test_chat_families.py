"""Models of several families are trained and evaluated in their own prompt format."""

import pytest
from helpers.chat_models import FAMILIES, save_chat_model

from rstar_lab.common.progress import Reporter
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.pipeline import run_recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.runs.reader import RunReader

KEYS = {
    "problems_per_step": 2,
    "group_size": 2,
    "limits": {"max_response_tokens": 120, "max_turns": 2},
    "old_log_probs": "trainer",
    "prompt": {"format": "model"},
    "answer": "boxed",
    "reward": "helpers.chat_models:parity_reward",
    "token_arrays": "all",
}


async def train_family(family, engine, folder, steps):
    save_chat_model(folder / "model", family)
    recipe = parse_recipe(
        {
            "name": "r",
            "model": str(folder / "model"),
            "runs": str(folder / "runs"),
            "rl": KEYS,
            "stages": [{"name": "rl", "steps": steps, "problems": {"synthetic": {"count": 20}}}],
            "engine": {"kind": engine, "dtype": "float32", "kv_cache_gb": 0.25},
            "evaluate": {
                "sets": {"held": {"synthetic": {"count": 1, "seed": 9}}},
                "samples": 1,
                "max_response_tokens": 30,
            },
        }
    )
    return await run_recipe(resolve(recipe), Reporter(as_json=True), stages=True, evaluations=True)


def check(family, folder, steps):
    reader = RunReader(folder / "runs" / "r-rl")
    metrics = reader.metrics()
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    assert max(line["mismatch_max"] for line in metrics) < 1e-4  # the engine and the trainer see the same tokens
    rows = reader.read("transcripts", ["prompt_ids", "response_ids", "loss_mask"]).to_pylist()
    tokenizer = load_tokenizer(folder / "model")
    for row in rows:
        text = tokenizer.decode(row["prompt_ids"])
        assert text.count("Put the final answer in \\boxed{}.") == 1
        assert text.endswith(tokenizer.apply_chat_template([{"role": "user", "content": "Q"}], tokenize=False,
                                                           add_generation_prompt=True).rpartition("Q")[2])  # fmt: skip
    assert load_tokenizer(reader.checkpoints()[steps]).chat_template == FAMILIES[family].template
    assert RunReader(folder / "runs" / "r-held-rl").info["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma"])
async def test_a_chat_model_is_trained_in_its_own_format(family, tmp_path):
    await train_family(family, "transformers", tmp_path, 1)
    check(family, tmp_path, 1)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_chat_model_is_trained_with_vllm(family, tmp_path):
    await train_family(family, "vllm", tmp_path, 2)
    check(family, tmp_path, 2)
