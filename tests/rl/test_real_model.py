"""Everything once on a real model, its tokenizer and chat template: SmolLM2-135M-Instruct, two steps, 64 tokens.

The tests download the model (`get_model("smollm2-135m")`). They check that the parts work together and agree, not that
the model learns.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from helpers.vllm_servers import COMMAND, KEY, serve, wait_until
from openai import OpenAI

from rstar_lab.rl.models.model import load_model, load_tokenizer
from rstar_lab.rl.models.sources import SMOLLM2, get_model
from rstar_lab.rl.problems import write_problems
from rstar_lab.rl.synthetic.families import synthesize
from rstar_lab.runs.reader import RunReader
from rstar_lab.verify import verify

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
PROBLEMS = synthesize(7, 4, levels=(1,))
RECIPE = {
    "model": SMOLLM2,
    "sft": {"problems": {"synthetic": {"count": 8, "seed": 1}}, "epochs": 1, "batch_size": 4, "lr": 1e-4},
    "rl": {
        "problems_per_step": 2, "group_size": 2, "lr": 1e-6, "warmup_steps": 0, "token_arrays": "all",
        "reward": "length_reward:reward", "limits": {"max_response_tokens": 64, "max_turns": 2},
    },
    "stages": [{"name": "rl", "problems": {"synthetic": {"count": 20, "seed": 2}}, "steps": 2}],
    "engine": {"dtype": "float32", "count": 1, "kv_cache_gb": 0.5},
    "evaluate": {"max_response_tokens": 64, "max_turns": 2, "samples": 1},
}  # fmt: skip
# Rewards must differ within a group, or nothing is trained.
REWARD = "def reward(text: str, answer: str) -> float:\n    return float(len(text) % 2)\n"


def rstar_lab(*arguments: object, cwd: Path) -> str:
    """Run a command and return its output."""
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe `smol.yaml`, its reward and problems."""
    path = tmp_path_factory.mktemp("real")
    (path / "smol.yaml").write_text(json.dumps(RECIPE))
    (path / "length_reward.py").write_text(REWARD)
    write_problems(path / "problems.jsonl", PROBLEMS)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """The run of SFT and two steps of GRPO-RoC."""
    output = rstar_lab("run", "smol.yaml", cwd=folder)
    assert "first step: " in output and "tokens/s" in output
    return folder / "runs" / "smol-rl"


def test_sft_and_grpo_roc_train_the_model_that_the_engine_serves(run):
    lines = RunReader(run).metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert any(line["kept"] for line in lines)
    assert all(line["mismatch"] < 1e-3 for line in lines if line["kept"])
    tied = load_model(run / "stages" / "rl")
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


def test_sft_and_grpo_roc_under_verl_on_a_cpu_rank(folder, monkeypatch):
    pytest.importorskip("verl")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")  # where length_reward.py is
    command = [sys.executable, "-m", "rstar_lab.rl.verl.train", "smol.yaml", "--profile", "laptop"]
    command += ["--set", "name=verl", "--set", "sft.batch_size=2", "--set", "sft.problems.synthetic.count=4"]
    log = folder / "verl.log"
    with log.open("w") as output:
        code = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=3000).returncode
    assert code == 0, log.read_text(errors="replace")[-3000:]
    trained = folder / "runs" / "verl-rl"
    lines = RunReader(trained).metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert any(line["kept"] and line["grad_norm"] > 0 for line in lines)
    assert all(line["mismatch"] < 1e-3 for line in lines if line["kept"])
    tied = load_model(trained / "stages" / "rl")
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()
    before = load_model(folder / "runs" / "verl-sft" / "sft" / "model").state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in tied.state_dict().items())


def test_greedy_evaluation_equals_an_independent_one(folder):
    """transformers' generate from the same prompts, and an answer extraction of two lines, give the same rewards."""
    rstar_lab("evaluate", SMOLLM2, "--problems", "problems.jsonl", "--samples", 1, "--name", "greedy",
              *(word for key in ("evaluate.temperature=0", "evaluate.top_p=1", "evaluate.max_response_tokens=64",
                                 "evaluate.max_turns=1", "engine.dtype=float32", "engine.count=1", "rl.tools=[]",
                                 "rl.prompt.format=model", "rl.answer=last_number", "engine.kv_cache_gb=0.5")
                for word in ("--set", key)), cwd=folder)  # fmt: skip
    (evaluated,) = (folder / "runs").glob("greedy-*")
    model, tokenizer = load_model(get_model(SMOLLM2), torch.float32).eval(), load_tokenizer(get_model(SMOLLM2))
    rows = {row["problem_id"]: row for row in RunReader(evaluated).read("trajectories").to_pylist()}
    for problem in PROBLEMS:
        message = f"{problem.question}\n\nEnd with the final answer as a number."
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        reply = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
        written = tokenizer.decode(reply, skip_special_tokens=True)
        numbers = re.findall(r"-?\d+(?:\.\d+)?", written.replace(",", ""))
        expected = bool(numbers) and verify(f"<answer>\\boxed{{{numbers[-1]}}}</answer>", problem.answer)
        assert (rows[problem.problem_id]["reward"] > 0) == expected, written


def test_an_openai_client_with_tools(tmp_path):
    log = tmp_path / "serve.log"
    flags = ("--dtype", "float32")
    with serve(get_model(SMOLLM2), *flags, log=log) as process:
        assert wait_until(lambda: '"urls"' in log.read_text() or process.poll() is not None, 900), log.read_text()
        (line,) = (line for line in log.read_text().splitlines() if '"urls"' in line)
        url = json.loads(line)["urls"][0]
        client = OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=300)
        served = client.models.list().data[0]
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
        answer = client.chat.completions.create(
            model=served.id,
            messages=[{"role": "user", "content": "What is 2 + 2?"}],
            tools=[tool],
            max_tokens=16,
            temperature=0,
        )
        assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
        assert httpx.get(f"{url}/v1/models", timeout=30).status_code == 401
        process.terminate()
        process.wait(60)
