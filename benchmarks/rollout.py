"""`rstar-lab bench rollout`: our agent loop over vLLM compared with a batched loop over transformers' `generate`.

Both use the same tiny float32 model, prompts, limits, sampling and cores, and alternate in one run. The model is trained for half
a minute to think at very different lengths and to call a tool with a latency of about 0.3 s. The batched loop generates a turn of
all prompts of a batch, runs all tool calls of the turn concurrently, and repeats until the batch is finished.
The second line measures the CPU time of our own code per turn, with scripted turns and no model.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.engines.group import EngineGroup, open_engines
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import EngineSection, LimitsSection, SftConfig
from rstar_lab.rl.renderers.paper import SYSTEM_PROMPT, format_question, render_segments, render_tool_call
from rstar_lab.rl.rollout.agent_loop import execute_call
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.run import run_rollouts
from rstar_lab.rl.scheduling.scheduler import Scheduler
from rstar_lab.rl.scheduling.slots import ScheduledSlots
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.tools.user import UserTool
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.tool_calls import parse_tool_calls

ROLLOUTS, BATCH = 256, 64
LIMITS = LimitsSection(max_response_tokens=600, max_turns=4)
LATENCY_S = 0.3
SCRIPTED = 10_000


def bench(verl: bool = False, model: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines `agent_loop` (model tokens per second, tool time included) and `agent_loop_cpu` (CPU ms per turn).

    verl: instead, yield the lines of verl_rollout.py, which compare the scheduling policies on the servers of a verl job.
    model: instead, yield the lines of rollout_model.py, which measure this pretrained model.
    """
    if model is not None:
        from benchmarks.rollout_model import model_lines

        yield from model_lines(model)
        return
    if verl:
        from benchmarks import verl_rollout

        yield from verl_rollout.bench()
        return
    with tempfile.TemporaryDirectory(prefix="rstar-bench-") as name:
        ours, theirs = asyncio.run(compare_loops(Path(name)))
    yield {
        "name": "agent_loop",
        "value": ours,
        "unit": "tokens/s",
        "against": f"a loop over transformers' generate, {theirs:.0f} tokens/s",
        "ratio": ours / theirs,
        "n": ROLLOUTS,
    }
    milliseconds, turns = asyncio.run(cpu_per_turn(SCRIPTED))
    yield {
        "name": "agent_loop_cpu",
        "value": milliseconds,
        "unit": "ms CPU per turn",
        "against": "1 ms",
        "ratio": 1.0 / milliseconds,
        "n": turns,
    }


# The workload


async def look_up(key: str, *, seed: int) -> str:
    """Look up a number by its key.

    Args:
        key: The key.
    """
    await asyncio.sleep(random.Random(seed).expovariate(1 / LATENCY_S))
    return str(random.Random(key).randrange(100))


def question(number: int) -> str:
    """Return the question of a problem."""
    return f"Which number has the key k{number % 50}?"


def conversation(number: int, rng: random.Random, schema: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return an SFT conversation: one to three look-ups, each after 4 to 200 tokens of reasoning, then the answer."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": format_question(question(number))},
    ]

    def thought() -> str:
        # Digits, because each is one token; words would be merged.
        digits = rng.choices("0123456789", k=min(int(rng.lognormvariate(3.0, 1.1)) + 4, 200))
        return f"<reason>{''.join(digits)}</reason>\n"

    for _ in range(rng.randint(1, 3)):
        call = render_tool_call("look_up", {"key": f"k{number % 50}"})
        messages += [
            {"role": "assistant", "content": thought() + call},
            {"role": "tool", "content": str(rng.randrange(100))},
        ]
    answer = f"<answer>\\boxed{{{messages[-1]['content']}}}</answer>"
    return render_segments([*messages, {"role": "assistant", "content": thought() + answer}], tools=[schema])


def make_model(folder: Path, tool: UserTool) -> Path:
    """Train a tiny model on these conversations; return its folder."""
    from rstar_lab.rl.models.model import build_tiny
    from rstar_lab.rl.models.tokenizer import train_tokenizer
    from rstar_lab.rl.training.sft import sft

    rng = random.Random(0)
    dataset = [conversation(i, rng, tool.schema) for i in range(640)]
    tokenizer = train_tokenizer([text for pieces in dataset for text, _ in pieces], 600)
    config = SftConfig(
        epochs=1, batch_size=16, lr=2e-3, optimizer="muon", schedule="linear_tail", warmup=0.1, max_tokens=900,
        packing=False,
    )  # fmt: skip
    sft(build_tiny(tokenizer, seed=0), tokenizer, dataset, config=config, out_dir=folder)
    return folder / "model"


def tasks(count: int) -> list[RolloutTask]:
    """Return the rollouts of the benchmark."""
    return [
        RolloutTask(Problem(problem_id=f"p{i}", question=question(i), answer="0"), f"t{i}", f"g{i}", sample=0, seed=i)
        for i in range(count)
    ]


async def compare_loops(folder: Path) -> tuple[float, float]:
    """Return the model tokens per second of our loop and of the batched loop."""
    from rstar_lab.rl.models.model import load_tokenizer

    tool = UserTool("bench:look_up", look_up, 60.0)
    model = await asyncio.to_thread(make_model, folder, tool)
    tools: dict[str, Tool] = {"look_up": tool}
    codec = Codec(load_tokenizer(model), tools)
    section = EngineSection(dtype="float32", kv_cache_gb=0.5)
    async with open_engines(section, model, folder / "engines", 1024) as engines:
        await run_our_loop(engines, codec, tools, ROLLOUTS // 8)  # warm-up
        batched = BatchedLoop(model, codec, tools)
        await batched.run(BATCH // 8)
        seconds = {"ours": 0.0, "theirs": 0.0}
        tokens = {"ours": 0, "theirs": 0}
        # This order, so that a change of the machine's speed affects both.
        for name in ("theirs", "ours", "ours", "theirs"):
            start = time.monotonic()
            run = run_our_loop(engines, codec, tools, ROLLOUTS) if name == "ours" else batched.run(ROLLOUTS)
            tokens[name] += await run
            seconds[name] += time.monotonic() - start
    return tokens["ours"] / seconds["ours"], tokens["theirs"] / seconds["theirs"]


async def run_our_loop(engines: EngineGroup, codec: Codec, tools: dict[str, Tool], count: int) -> int:
    """Run `count` rollouts with our agent loop. Return the number of tokens that the model generated."""
    wanted = tasks(count)
    context = RolloutContext(codec, tools, lambda text, answer: 0.0, LIMITS)
    done = await run_rollouts(wanted, context, slots=engines.slots(wanted, "async", LIMITS.max_response_tokens))
    return sum(trajectory.model_tokens for trajectory in done)


class BatchedLoop:
    """Rollouts in batches with transformers' `generate`, one turn of the whole batch at a time."""

    def __init__(self, model: Path, codec: Codec, tools: dict[str, Tool]):
        import torch

        from rstar_lab.rl.models.model import load_model

        self.model, self.codec, self.tools = load_model(model, torch.float32).eval(), codec, tools

    async def run(self, count: int) -> int:
        """Run `count` rollouts. Return the number of tokens that the model generated."""
        wanted = tasks(count)
        return sum([await self._batch(wanted[start : start + BATCH]) for start in range(0, count, BATCH)])

    async def _batch(self, batch: Sequence[RolloutTask]) -> int:
        prompts = [self.codec.prompt_ids(task.problem.question) for task in batch]
        ids: list[list[int]] = [[] for _ in batch]
        unfinished, generated = list(range(len(batch))), 0
        for turn in range(LIMITS.max_turns):
            limit = max(LIMITS.max_response_tokens - len(ids[i]) for i in unfinished)
            new = await asyncio.to_thread(self._generate, [prompts[i] + ids[i] for i in unfinished], limit)
            with_calls, results = [], []
            for i, tokens in zip(unfinished, new, strict=True):
                tokens = tokens[: LIMITS.max_response_tokens - len(ids[i])]
                generated += len(tokens)
                ids[i] += tokens
                calls = parse_tool_calls(self.codec.decode(tokens))
                if tokens and tokens[-1] == self.codec.end_id and calls and turn + 1 < LIMITS.max_turns:
                    with_calls.append(i)
                    results.append(self._run_calls(batch[i], turn, calls))
            for i, answer in zip(with_calls, await asyncio.gather(*results), strict=True):
                ids[i] += answer
            unfinished = [i for i in with_calls if len(ids[i]) < LIMITS.max_response_tokens]
            if not unfinished:
                break
        return generated

    async def _run_calls(self, task: RolloutTask, turn: int, calls: Sequence[Any]) -> list[int]:
        answers = [
            execute_call(
                call,
                self.tools,
                self.codec.renderer,
                seed=derive_seed(task.seed, "call", turn, index),
                traj_id=task.traj_id,
                max_chars=4096,
            )
            for index, call in enumerate(calls)
        ]
        return self.codec.tool_response_ids([result.text for result in await asyncio.gather(*answers)])

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        import torch

        width = max(map(len, prompts))
        ids_BT = torch.zeros((len(prompts), width), dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = self.model.generate(  # type: ignore[operator]
                input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=min(max_tokens, 1024 - width), do_sample=True,
                temperature=1.0, top_k=0, eos_token_id=self.codec.end_id, pad_token_id=0,
            )  # fmt: skip
        completions = []
        for tokens in out[:, width:].tolist():
            end = tokens.index(self.codec.end_id) + 1 if self.codec.end_id in tokens else len(tokens)
            completions.append(tokens[:end])
        return completions


# CPU time of our own code


class FakeSandbox:
    """The interface of the sandbox client; returns the same result at once."""

    async def run_many(self, calls: Sequence[Call]) -> list[CallResult]:
        await asyncio.sleep(0)
        return [CallResult(Outcome.OK, "1\n", "", None, 0.0) for _ in calls]


@dataclass(frozen=True)
class TwoTurnEngine:
    """An engine that returns a tool call in the first turn and then the answer, at once."""

    first_prompt: int  # tokens
    texts: tuple[list[int], list[int]]

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        ids = self.texts[len(prompt_ids) > self.first_prompt]
        return Completion(ids, [-0.5] * len(ids), FinishReason.STOP, "scripted")


async def cpu_per_turn(rollouts: int, engines: int = 16) -> tuple[float, int]:
    """Return (CPU milliseconds of this process per turn, turns) for concurrent rollouts with the default scheduling policy."""
    from rstar_lab.rl.models.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["some text"], 300)
    tools = make_tools(["python"], FakeSandbox())
    codec = Codec(tokenizer, tools)
    call = render_tool_call("execute_python_code_with_standard_io", {"code": "print(1)", "input": ""})
    texts = [f" so</reason>\n{call}<|im_end|>", " so</reason>\n<answer>\\boxed{1}</answer><|im_end|>"]
    wanted = [
        RolloutTask(Problem(problem_id=f"p{i // 32:04d}", question="What is 1?", answer="1"), f"t{i}", f"g{i // 32}", i % 32, i)
        for i in range(rollouts)
    ]  # fmt: skip
    engine = TwoTurnEngine(len(codec.prompt_ids("What is 1?")), (codec.encode(texts[0]), codec.encode(texts[1])))
    scheduler = Scheduler(EngineSection().scheduler, max_tokens=4096, patience_s=0)
    for i in range(engines):
        scheduler.add_server(f"e{i}", 250_000, max_running=1024)
    slots = ScheduledSlots(scheduler, {f"e{i}": engine for i in range(engines)})
    before = time.process_time()
    context = RolloutContext(
        codec,
        tools,
        lambda text, answer: float("boxed{1}" in text),
        LimitsSection(max_response_tokens=100_000, max_turns=8),
    )
    done = await run_rollouts(wanted, context, slots=slots.slot)
    used = time.process_time() - before
    turns = sum(len(trajectory.turns) for trajectory in done)
    return 1000 * used / turns, turns
