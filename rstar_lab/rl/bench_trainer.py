"""`rstar-lab bench trainer`: a step of ours against a step of TRL's GRPOTrainer.

The same tiny model, prompts, group size, limit on the response, precision (fp32), cores and reward, single turn, in turns in
one run. The model was taught for half a minute to end its answers, after thoughts of very different lengths, as any model
that is worth training does. TRL lives in an environment of its own, made on first use; it is no dependency. Nothing of
either is left out of a step: generation, rewards, update, and for ours also the weights' way to the engines and the store.
"""

import asyncio
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from rstar_lab.errors import UserError
from rstar_lab.rl import families, pipeline
from rstar_lab.rl.chat import END_OF_TURN, render_prompt
from rstar_lab.rl.model import build_tiny
from rstar_lab.rl.recipe import SftConfig, parse_recipe
from rstar_lab.rl.report import Reporter
from rstar_lab.rl.sft import sft
from rstar_lab.rl.tokenizer import train_tokenizer
from rstar_lab.runs.reader import RunReader

TRL = "1.16.0"
PROMPTS, GROUP, TOKENS, STEPS, WARM_UP = 16, 8, 256, 8, 2


def bench(against: str | None = None) -> Iterator[dict[str, Any]]:
    """Yields the line `trainer_step`; value is our median step in seconds, ratio how many times faster it is."""
    python = trl_environment()
    with tempfile.TemporaryDirectory(prefix="rstar-bench-") as name:
        folder = Path(name)
        model = make_model(folder)
        # In turns: a machine that slows down slows both.
        theirs = trl_steps(python, folder, model)
        ours = asyncio.run(our_steps(folder, model))
        theirs += trl_steps(python, folder, model)
    value, other = statistics.median(ours), statistics.median(theirs)
    yield {
        "name": "trainer_step",
        "value": value,
        "unit": "s",
        "against": f"TRL {TRL} GRPOTrainer, {other:.2f} s",
        "ratio": other / value,
        "n": len(ours),
    }


def score(text: str, answer: str = "") -> float:
    """A reward that costs nothing and differs within a group."""
    return float(hashlib.sha256(text.encode()).digest()[0] % 2)


def make_model(folder: Path) -> Path:
    """A tiny model that thinks for 4 to 240 tokens and answers; its prompts lie beside it."""
    rng = random.Random(0)
    questions = [problem.question for problem in families.synthesize(0, 500)]
    dataset = []
    for question in questions:
        # A digit is a token, words would be merged.
        thought = "".join(rng.choices("0123456789", k=min(int(rng.lognormvariate(3.5, 0.8)) + 4, 240)))
        answer = f"{thought}</reason>\n<answer>\\boxed{{{rng.randrange(100)}}}</answer>{END_OF_TURN}"
        dataset.append([(render_prompt(question), False), (answer, True)])
    tokenizer = train_tokenizer([text for pieces in dataset for text, _ in pieces], 1024)
    config = SftConfig(
        epochs=1,
        batch_size=12,
        lr=2e-3,
        optimizer="muon",
        schedule="linear_tail",
        warmup=0.1,
        max_tokens=600,
        packing=False,
    )
    sft(build_tiny(tokenizer, seed=0), tokenizer, dataset, config=config, out_dir=folder / "sft")
    (folder / "prompts.json").write_text(json.dumps([render_prompt(question) for question in questions[:PROMPTS]]))
    return folder / "sft" / "model"


async def our_steps(folder: Path, model: Path) -> list[float]:
    """Seconds of each step after the warm-up."""
    recipe = parse_recipe(
        {
            "name": "bench",
            "model": str(model),
            "runs": str(folder / "runs"),
            "processes": os.cpu_count() or 1,
            "rl": {
                "problems_per_step": PROMPTS, "group_size": GROUP, "roc": "none", "max_response_tokens": TOKENS, "max_turns": 1,
                "lr": 1e-5, "warmup_steps": 0, "weight_decay": 0.0, "rollout": "lockstep", "token_arrays": "all",
                "checkpoint_every": 1000, "reward": "rstar_lab.rl.bench_trainer:score",
            },
            "stages": [{"name": "rl", "problems": {"synthetic": {"count": 500}}, "steps": WARM_UP + STEPS}],
            "engine": {"dtype": "float32", "kv_cache_gb": 0.25},
            "evaluate": {"max_response_tokens": TOKENS},
        }
    )  # fmt: skip
    async with pipeline.Lab.open(recipe, Reporter(console=Console(quiet=True))) as lab:
        await pipeline.train(lab, model)
    return [line["step_s"] for line in RunReader(folder / "runs" / "bench-rl").metrics()][WARM_UP:]


def trl_environment() -> Path:
    """A Python with TRL and our torch; made in the user's cache on first use. Raises UserError where it cannot be."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rstar_lab" / f"trl-{TRL}"
    python = folder / "bin" / "python"
    if (folder / ".done").exists():
        return python
    import torch

    uv = [sys.executable, "-m", "uv"]
    links = os.environ.get("PIP_FIND_LINKS") or _output(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    )
    backend = ["--find-links", links] if links and any(Path(links).glob("torch-*")) else ["--torch-backend", "cpu"]
    packages = [f"trl=={TRL}", f"torch=={torch.__version__.split('+')[0]}", "rich"]
    for command in (
        [*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        [*uv, "pip", "install", "--quiet", "--no-config", "--python", str(python), *backend, *packages],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
        if done.returncode:
            raise UserError(
                f"bench trainer: TRL's environment could not be made: {done.stderr.strip().splitlines()[-1]}"
            )
    (folder / ".done").touch()
    return python


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


_SCRIPT = """
import hashlib, json, sys, time
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, prompts, group, tokens, steps, out = sys.argv[1], json.load(open(sys.argv[2])), *map(int, sys.argv[3:6]), sys.argv[6]
times = []

class Clock(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        self.start = time.monotonic()
    def on_step_end(self, *args, **kwargs):
        times.append(time.monotonic() - (self.last if hasattr(self, "last") else self.start))
        self.last = time.monotonic()

def reward(completions, **kwargs):
    return [float(hashlib.sha256(text.encode()).digest()[0] % 2) for text in completions]

config = GRPOConfig(
    output_dir=out, per_device_train_batch_size=len(prompts) * group, num_generations=group, max_completion_length=tokens,
    max_steps=steps, learning_rate=1e-5, lr_scheduler_type="constant", beta=0.0, temperature=1.0, num_iterations=1,
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no",
    disable_tqdm=True, seed=0,
)
tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
data = Dataset.from_dict({"prompt": prompts * steps})
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
)
trainer.train()
print(json.dumps(times))
"""


def trl_steps(python: Path, folder: Path, model: Path) -> list[float]:
    """Seconds of each step after the warm-up, from the end of one step to the end of the next."""
    half = STEPS // 2
    command = [python, "-c", _SCRIPT, model, folder / "prompts.json", GROUP, TOKENS, WARM_UP + half, folder / "trl"]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode:
        raise UserError(f"bench trainer: TRL failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])[WARM_UP:]
