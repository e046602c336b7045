"""The quick part of test_real_model.py: one step of GRPO-RoC on SmolLM2-135M-Instruct, by name, with its tokenizer."""

import json
import subprocess

import pytest
from helpers.vllm_servers import COMMAND
from transformers import AutoModelForCausalLM

from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.models.sources import SMOLLM2, ModelError, get_model
from rstar_lab.runs.reader import RunReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECIPE = {
    "model": SMOLLM2,
    "rl": {
        "problems_per_step": 1, "group_size": 2, "warmup_steps": 0, "reward": "length_reward:reward", "token_arrays": "all",
        "prompt": {"format": "model"}, "answer": "boxed", "tools": [],
        "limits": {"max_response_tokens": 24, "max_turns": 1},
    },
    "stages": [{"name": "rl", "problems": {"synthetic": {"count": 4, "seed": 2}}, "steps": 1}],
    "engine": {"kind": "transformers", "dtype": "float32"},
}  # fmt: skip


def test_a_pretrained_chat_model_is_trained_by_name(tmp_path):
    try:
        folder = get_model(SMOLLM2)
    except ModelError as error:
        pytest.skip(str(error))
    (tmp_path / "quick.yaml").write_text(json.dumps(RECIPE))
    # Rewards must differ within the group, or nothing is trained.
    (tmp_path / "length_reward.py").write_text("def reward(text, answer):\n    return float(len(text) % 2)\n")
    done = subprocess.run([*COMMAND, "train", "quick.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "first step: " in done.stdout and "of 4 rollouts correct" in done.stdout
    run = RunReader(tmp_path / "runs" / "quick-rl")
    (line,) = run.metrics()
    assert not line["kept"] or line["mismatch"] < 1e-3
    record, tokenizer = run.read("transcripts").to_pylist()[0], load_tokenizer(folder)
    assert f"<|im_start|>user\n{record['question']}" in tokenizer.decode(record["prompt_ids"])
    assert run.info["extra"]["model_origin"]["revision"]
    trained = AutoModelForCausalLM.from_pretrained(run.run_dir / "stages" / "rl")
    assert trained.num_parameters() == 134_515_008
