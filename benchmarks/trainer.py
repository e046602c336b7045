"""`rstar-lab bench trainer`: seconds of a training step compared with TRL's GRPOTrainer, without and with tool calls.

Both trainers use the same tiny model, prompts, group size, response limit, precision (fp32), cores, reward and, in the multi-turn
task, the same Python function as tool and the same limit of turns. They alternate in one run. The tool returns at once,
so that only the trainers are measured. First the model is trained for half a minute to reason at very different
lengths, to call the tool twice and to end its turns. TRL is installed into its own environment at the first use; it is
not a dependency.
A step includes generation, tool calls, rewards and update; ours also includes the weight sync and the run store.
"""

import asyncio
import hashlib
import inspect
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lora import lora_lines
from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.hardware.processes import PeakMemory
from rstar_lab.rl import pipeline
from rstar_lab.rl.models.model import build_tiny, load_tokenizer
from rstar_lab.rl.models.sources import get_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.recipe import SftConfig
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.formats import render_prompt, render_tool_results
from rstar_lab.rl.renderers.paper import (
    CODE_TOOL,
    END_OF_TURN,
    SYSTEM_PROMPT,
    PaperRenderer,
    control_tokens,
    format_question,
    render_tool_call,
)
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.synthetic import families
from rstar_lab.rl.tools.user import describe
from rstar_lab.rl.training.sft import sft
from rstar_lab.runs.reader import RunReader

TRL = "1.16.0"
PROMPTS, GROUP, STEPS, WARM_UP = 16, 8, 8, 2


@dataclass(frozen=True)
class Task:
    """The shape of a rollout.

    calls: tool calls before the answer. tokens: response limit. thought, longest_thought: median and maximum number of digits
    in the reasoning of a turn. prompts, group: prompts of a step and rollouts of each. steps: measured ones. engines: engines
    of our trainer; None: the default.
    """

    name: str
    calls: int
    tokens: int
    thought: float
    longest_thought: int
    prompts: int = PROMPTS
    group: int = GROUP
    steps: int = STEPS
    engines: int | None = None


TASKS = (Task("trainer_step", 0, 256, 33, 240), Task("trainer_step_multi_turn", 2, 512, 15, 120))


@dataclass(frozen=True)
class Steps:
    """Seconds of each step after the warm-up, mean tool calls and tokens per rollout over all steps, and peak memory of the
    process and its descendants in 10^9 bytes."""

    seconds: list[float]
    calls: float
    tokens: float
    peak_gb: float


def bench(model: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of `lora_lines`, then one line per task: our median step in seconds, and its speed relative to TRL.

    With a model, by folder or name, only the lines of `model_lines`.

    Raises UserError if TRL cannot be installed, or if the numbers of tool calls per rollout differ by more than 20%.
    """
    if model is not None:
        yield from model_lines(model)
        return
    yield from lora_lines()
    python = trl_environment()
    for task in TASKS:
        with tempfile.TemporaryDirectory(prefix="rstar-bench-") as name:
            folder = Path(name)
            trained = make_model(folder, task)
            # TRL, ours, TRL: a change of the machine's speed affects both.
            first = trl_steps(python, folder, trained, task)
            ours = asyncio.run(our_steps(folder, trained, task))
            second = trl_steps(python, folder, trained, task)
        theirs = statistics.mean([first.calls, second.calls])
        if abs(ours.calls - theirs) > 0.2 * theirs:
            raise UserError(
                f"bench trainer: {ours.calls:.2f} tool calls per rollout here, {theirs:.2f} with TRL: these differ by more than 20%"
            )
        value, other = statistics.median(ours.seconds), statistics.median(first.seconds + second.seconds)
        yield {
            "name": task.name,
            "value": value,
            "unit": "s",
            "against": f"TRL {TRL} GRPOTrainer, {other:.2f} s",
            "ratio": other / value,
            "n": len(ours.seconds),
        }


MODEL_TASK = Task("model_step", 0, 64, 0, 0, prompts=4, group=4, steps=2, engines=1)


def model_lines(model: str) -> Iterator[dict[str, Any]]:
    """Yield a line with the seconds of a step and one with the peak memory, for a pretrained model in float32.

    Both trainers sample the same prompts with the same limit of the response. The memory is that of the process and its
    descendants. Raises UserError if the mean lengths of the responses differ by more than 20%.
    """
    python, path, task = trl_environment(), get_model(model).resolve(), MODEL_TASK
    with tempfile.TemporaryDirectory(prefix="rstar-bench-") as name:
        folder = Path(name)
        tokens = control_tokens(load_tokenizer(path))
        questions = [problem.question for problem in families.synthesize(0, task.prompts)]
        renderer = PaperRenderer(PromptStyle("paper"), tokens)
        prompts = [renderer.prompt(question, [CODE_TOOL]) for question in questions]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        first = trl_steps(python, folder, path, task)
        ours = asyncio.run(our_steps(folder, path, task))
        second = trl_steps(python, folder, path, task)
    theirs = statistics.mean([first.tokens, second.tokens])
    if abs(ours.tokens - theirs) > 0.2 * theirs:
        raise UserError(f"bench trainer: {ours.tokens:.0f} tokens per rollout here, {theirs:.0f} with TRL")
    seconds, memory = statistics.median(first.seconds + second.seconds), max(first.peak_gb, second.peak_gb)
    for kind, unit, value, other in (
        ("step", "s", statistics.median(ours.seconds), seconds),
        ("memory", "GB", ours.peak_gb, memory),
    ):
        yield {
            "name": f"trainer_model_{kind}",
            "value": value,
            "unit": unit,
            "against": f"TRL {TRL} GRPOTrainer, {other:.2f} {unit}",
            "ratio": other / value,
            "n": len(ours.seconds),
        }


def lookup(key: int) -> str:
    """Return a number of four digits.

    Args:
        key: The key of the number.
    """
    return str(1000 + key * 7919 % 9000)


def score(text: str, answer: str = "") -> float:
    """Return a pseudo-random reward of 0 or 1, so that rewards differ within a group."""
    return float(hashlib.sha256(text.encode()).digest()[0] % 2)


def make_model(folder: Path, task: Task) -> Path:
    """Train a tiny model that reasons in digits, calls the tool and answers; write prompts.json. Return the model folder."""
    rng = random.Random(0)
    schemas = [describe("bench:lookup", lookup)[0]] if task.calls else [CODE_TOOL]

    def turn(content: str) -> str:
        # Digits, because each is one token; words would be merged.
        count = min(int(rng.lognormvariate(math.log(task.thought), 0.8)) + 4, task.longest_thought)
        return f"{''.join(rng.choices('0123456789', k=count))}</reason>\n{content}{END_OF_TURN}"

    questions = [problem.question for problem in families.synthesize(0, 500)]
    dataset = []
    for question in questions:
        pieces = [(render_prompt(question, tools=schemas), False)]
        for _ in range(task.calls):
            key = rng.randrange(100)
            pieces.append((turn(render_tool_call("lookup", {"key": key})), True))
            pieces.append((render_tool_results([lookup(key)]), False))
        pieces.append((turn(f"<answer>\\boxed{{{rng.randrange(100)}}}</answer>"), True))
        dataset.append(pieces)
    tokenizer = train_tokenizer([text for pieces in dataset for text, _ in pieces], 1024)
    config = SftConfig(
        epochs=1 + bool(task.calls),
        batch_size=12,
        lr=2e-3,
        optimizer="muon",
        schedule="linear_tail",
        warmup=0.1,
        max_tokens=1000,
        packing=False,
    )
    sft(build_tiny(tokenizer, seed=0), tokenizer, dataset, config=config, out_dir=folder / "sft")
    prompts = [
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": format_question(question)}]
        if task.calls
        else render_prompt(question, tools=schemas)
        for question in questions[:PROMPTS]
    ]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    return folder / "sft" / "model"


async def our_steps(folder: Path, model: Path, task: Task) -> Steps:
    """Train with our trainer and return its steps."""
    recipe = parse_recipe(
        {
            "name": "bench",
            "model": str(model),
            "runs": str(folder / "runs"),
            "processes": 1 if task.engines else os.cpu_count() or 1,
            "rl": {
                "problems_per_step": task.prompts,
                "group_size": task.group,
                "method": {"roc": {"rule": "none"}},
                "limits": {"max_response_tokens": task.tokens, "max_turns": 1 + task.calls},
                "lr": 1e-5,
                "warmup_steps": 0,
                "weight_decay": 0.0,
                "token_arrays": "all",
                "checkpoint_every": 1000,
                "reward": "benchmarks.trainer:score",
                "tools": ["benchmarks.trainer:lookup" if task.calls else "python"],
            },
            "stages": [{"name": "rl", "problems": {"synthetic": {"count": 500}}, "steps": WARM_UP + task.steps}],
            "engine": {"dtype": "float32", "kv_cache_gb": 0.25, "count": task.engines},
            "evaluate": {"max_response_tokens": task.tokens},
        }
    )
    with PeakMemory() as memory:
        async with pipeline.RunSession.open(resolve(recipe), Reporter(console=Console(quiet=True))) as session:
            await pipeline.train(session, model)
    reader = RunReader(folder / "runs" / "bench-rl")
    rows = reader.read("trajectories", columns=["calls", "errors", "response_tokens"]).to_pylist()
    calls = statistics.mean(row["calls"] - row["errors"] for row in rows)  # TRL counts malformed calls as text
    tokens = statistics.mean(row["response_tokens"] for row in rows)
    return Steps([line["step_s"] for line in reader.metrics()][WARM_UP:], calls, tokens, memory.gb)


def trl_environment() -> Path:
    """Return the Python of an environment with TRL and the same torch, created in the user's cache at the first use.

    Raises UserError if it cannot be created.
    """
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
                f"bench trainer: the environment of TRL could not be created: {done.stderr.strip().splitlines()[-1]}"
            )
    (folder / ".done").touch()
    return python


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


_SCRIPT = """
import hashlib, json, resource, sys, time
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

model, prompts, group, tokens, calls, steps, out = sys.argv[1], json.load(open(sys.argv[2])), *map(int, sys.argv[3:7]), sys.argv[7]
times = []

class Clock(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        self.start = time.monotonic()
    def on_step_end(self, *args, **kwargs):
        times.append(time.monotonic() - (self.last if hasattr(self, "last") else self.start))
        self.last = time.monotonic()

def reward(completions, **kwargs):
    return [float(hashlib.sha256(str(completion).encode()).digest()[0] % 2) for completion in completions]

config = GRPOConfig(
    output_dir=out, per_device_train_batch_size=len(prompts) * group, num_generations=group, max_completion_length=tokens,
    max_steps=steps, learning_rate=1e-5, lr_scheduler_type="constant", beta=0.0, temperature=1.0, num_iterations=1,
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no",
    disable_tqdm=True, seed=0, model_init_kwargs={"dtype": "float32"}, max_tool_calling_iterations=calls or None,
)
tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
tokenizer.response_template = qwen3_template  # calls in <tool_call> tags, turns that end with <|im_end|>
lookup.__annotations__.pop("return")  # our tool schema does not contain it
data = Dataset.from_dict({"prompt": prompts * steps})
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()],
    tools=[lookup] if calls else None,
)
trainer.train()
last = trainer.state.log_history[-1]
print(json.dumps({
    "times": times, "calls": last.get("tools/call_frequency", 0.0), "tokens": last.get("completions/mean_length", 0.0),
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
}))
"""


def trl_steps(python: Path, folder: Path, model: Path, task: Task) -> Steps:
    """Train half of the steps with TRL. A step lasts from the end of the previous one to its own end."""
    numbers = [task.group, task.tokens, task.calls, WARM_UP + task.steps // 2]
    script = inspect.getsource(lookup) + _SCRIPT
    command = [python, "-c", script, model, folder / "prompts.json", *numbers, folder / "trl"]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode:
        killed = "it was killed, perhaps for lack of memory" if done.returncode == -signal.SIGKILL else None
        raise UserError(f"bench trainer: TRL failed: {killed or done.stderr.strip().splitlines()[-1]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return Steps(result["times"][WARM_UP:], result["calls"], result["tokens"], result["peak_gb"])
