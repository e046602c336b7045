"""GRPO-RoC in one file: from problems to a better model, with the parts of rstar_lab and a plain PyTorch update.

    python examples/minimal_rl.py                    # about three minutes on two cores
    python examples/minimal_rl.py --steps 2 --runs-dir /tmp/runs

It trains the small model of the recipe `tiny_fast`: SFT teaches it the format, then each step of RL
  1. generates 16 rollouts of each problem, in which the model may run Python in a sandbox,
  2. keeps 8 of them: RoC prefers correct rollouts with few tool errors and a clean format,
  3. computes group advantages and takes two optimizer steps on the clipped policy loss,
  4. sends the new weights to the engine.
Left out, compared with `rstar-lab train`: checkpoints and resuming, the run store, packing of rows, several processes,
and every option. Source: rStar2-Agent (arXiv 2508.20722).
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rstar_lab.outcomes import Outcome, count_errors
from rstar_lab.progress import Reporter
from rstar_lab.rl import (
    Problem,
    format_penalty,
    group_advantages,
    load_recipe,
    parse_tool_calls,
    policy_loss,
    render_prompt,
    render_tool_results,
    resample,
    tool_error_penalty,
    verify,
)
from rstar_lab.rl.engine import Sampling
from rstar_lab.rl.engines.group import EngineGroup, open_engines
from rstar_lab.rl.models.model import load_model, load_tokenizer
from rstar_lab.rl.pipeline import run_recipe
from rstar_lab.rl.renderers.paper import render_tool_result
from rstar_lab.rl.synthetic.families import synthesize
from rstar_lab.sandbox import Limits, LocalSandbox

PROBLEMS_PER_STEP, GROUP, KEPT = 12, 16, 8  # RoC keeps KEPT of GROUP rollouts
MAX_TOKENS, MAX_TURNS, MAX_TOOL_CHARS = 96, 3, 200  # of a response; of the text of a tool
LEARNING_RATE, MINI_BATCHES = 5e-4, 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
FAMILIES = ["exclusive_or", "squares_sum", "product_remainder"]


@dataclass
class Rollout:
    """The tokens of one attempt at a problem. mask: True on tokens that the model generated."""

    problem: Problem
    group: int
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # of the engine, 0 where the mask is False
    turns: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)  # of the tool calls
    reward: float = 0.0

    def extend(self, ids: list[int], log_probs: list[float], *, own: bool) -> None:
        self.ids += ids
        self.mask += [own] * len(ids)
        self.log_probs += log_probs

    @property
    def penalty(self) -> float:
        """The penalty by which RoC ranks correct rollouts: share of failed calls, and answers after the first."""
        answers = sum(turn.count("<answer>") for turn in self.turns)
        return tool_error_penalty(*count_errors(self.outcomes)) + format_penalty(answers, len(self.turns))


class Player:
    """Generates rollouts: an engine, a tokenizer and a sandbox."""

    def __init__(self, engines: EngineGroup, tokenizer: Any, sandbox: LocalSandbox):
        self.engines, self.tokenizer, self.sandbox = engines, tokenizer, sandbox
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def play(self, problems: Sequence[Problem], samples: int, seed: int) -> list[Rollout]:
        """Return `samples` rollouts of each problem. All run at the same time; the engine batches their requests."""
        rollouts = [
            Rollout(problem, group, self.encode(render_prompt(problem.question)))
            for group, problem in enumerate(problems)
            for _ in range(samples)
        ]
        await asyncio.gather(*(self.play_one(rollout, seed * 100_003 + i) for i, rollout in enumerate(rollouts)))
        return rollouts

    async def play_one(self, rollout: Rollout, seed: int) -> None:
        """Let the model write turns and run its calls until it answers. Token ids are never encoded a second time."""
        engine = self.engines.engines[seed % len(self.engines.engines)]
        while len(rollout.turns) < MAX_TURNS:
            left = MAX_TOKENS - len(rollout.ids)
            sampling = Sampling(left, seed=seed * 10 + len(rollout.turns), stop_token_ids=(self.end,))
            completion = await engine.generate(rollout.prompt + rollout.ids, sampling)
            rollout.extend(completion.token_ids, completion.log_probs, own=True)
            rollout.turns.append(self.tokenizer.decode(completion.token_ids, skip_special_tokens=False))
            calls = parse_tool_calls(rollout.turns[-1])
            if completion.token_ids[-1:] != [self.end] or not calls or len(rollout.turns) == MAX_TURNS:
                break
            texts = [await self.run(call, rollout, seed) for call in calls]
            observation = self.encode(render_tool_results(texts))
            if len(rollout.ids) + len(observation) >= MAX_TOKENS:
                break
            rollout.extend(observation, [0.0] * len(observation), own=False)
        rollout.reward = float(verify("\n".join(rollout.turns), rollout.problem.answer))

    async def run(self, call: Any, rollout: Rollout, seed: int) -> str:
        """Run a tool call in the sandbox and return the text that the model sees."""
        arguments = call.arguments or {}
        if call.error is not None or not isinstance(arguments.get("code"), str):
            rollout.outcomes.append(Outcome.MALFORMED_CALL)
            return f"The tool call could not be parsed: {call.error or 'no code'}"
        result = await self.sandbox.run(arguments["code"], str(arguments.get("input", "")), seed=seed)
        rollout.outcomes.append(result.outcome)
        return render_tool_result(result)[:MAX_TOOL_CHARS]


def select(rollouts: Sequence[Rollout], seed: int) -> tuple[list[Rollout], np.ndarray]:
    """Return the rollouts to train on, with their advantages: RoC in each group, then groups with different rewards."""
    kept: list[Rollout] = []
    for number in sorted({rollout.group for rollout in rollouts}):
        group = [rollout for rollout in rollouts if rollout.group == number]
        rewards, penalties = [rollout.reward for rollout in group], [rollout.penalty for rollout in group]
        chosen = resample(rewards, penalties, KEPT, rng=np.random.default_rng([seed, number]))
        if len({rewards[i] for i in chosen}) > 1:  # otherwise all advantages are 0
            kept += [group[i] for i in chosen]
    return kept, group_advantages([rollout.reward for rollout in kept], [rollout.group for rollout in kept])


def log_probs_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of each token given those before it, (batch, tokens); 0 for the first token."""
    logits = model(ids[:, :-1]).logits.float()
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def tensors_of(rollouts: Sequence[Rollout], advantages: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Return (ids, mask, engine log-probs, advantages), (batch, tokens) each, padded on the right."""
    width = max(len(rollout.prompt) + len(rollout.ids) for rollout in rollouts)
    ids = torch.zeros(len(rollouts), width, dtype=torch.long)
    mask, old = torch.zeros(len(rollouts), width, dtype=torch.bool), torch.zeros(len(rollouts), width)
    for row, rollout in enumerate(rollouts):
        start, end = len(rollout.prompt), len(rollout.prompt) + len(rollout.ids)
        ids[row, :end] = torch.tensor(rollout.prompt + rollout.ids)
        mask[row, start:end] = torch.tensor(rollout.mask)
        old[row, start:end] = torch.tensor(rollout.log_probs)
    return ids, mask, old, torch.tensor(advantages, dtype=torch.float32)[:, None].expand(len(rollouts), width)


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout], advantages: np.ndarray
) -> dict[str, float]:
    """Take one optimizer step on each mini-batch. Returns the loss, and the share of clipped tokens."""
    stats: dict[str, float] = {"loss": 0.0, "clip_share": 0.0}
    for part in np.array_split(np.arange(len(rollouts)), MINI_BATCHES):
        batch = tensors_of([rollouts[i] for i in part], advantages[part])
        tokens = int(batch[1].sum())
        for rows in torch.arange(len(part)).split(16):  # the loss of 16 rows at a time; they add up to that of the part
            ids, mask, old, advantage = (tensor[rows] for tensor in batch)
            loss, found = policy_loss(
                log_probs_of(model, ids),
                old,
                advantage,
                mask,
                clip_low=CLIP_LOW,
                clip_high=CLIP_HIGH,
                normaliser=tokens,
            )
            loss.backward()
            stats["loss"] += loss.item() / MINI_BATCHES
            stats["clip_share"] += found["clip_share"] * found["tokens"] / tokens / MINI_BATCHES
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return stats


async def pass_rate(player: Player, problems: Sequence[Problem], seed: int) -> float:
    """Return the share of correct rollouts, two per problem."""
    return float(np.mean([rollout.reward for rollout in await player.play(problems, 2, seed)]))


async def main(steps: int, runs_dir: Path, seed: int = 0) -> tuple[float, float]:
    """Train and return the pass rate on held-out problems before and after RL."""
    recipe = load_recipe("tiny_fast", {"runs": str(runs_dir)})
    models = await run_recipe(recipe, Reporter(), stages=False, evaluations=False)  # SFT, once
    start = Path(models["model_sft"])
    training = synthesize(2, 2000, levels=[1], families=FAMILIES)
    seen = {problem.question for problem in training}
    held_out = [p for p in synthesize(1000, 96, levels=[1], families=FAMILIES) if p.question not in seen][:64]
    model, tokenizer = load_model(start, torch.float32), load_tokenizer(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    draw = random.Random(seed)
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(LocalSandbox(Limits(timeout_s=2.0, memory_mb=256)))
        context = open_engines(recipe.engine, start, runs_dir / ".engines" / "minimal", 1024, seed)
        engines = await stack.enter_async_context(context)
        await engines.load(model, 0)
        player = Player(engines, tokenizer, sandbox)
        before = await pass_rate(player, held_out, seed=10_000)
        for step in range(1, steps + 1):
            rollouts = await player.play(draw.sample(training, PROBLEMS_PER_STEP), GROUP, seed=step)
            kept, advantages = select(rollouts, seed=step)
            stats = update(model, optimizer, kept, advantages) if kept else {"loss": 0.0, "clip_share": 0.0}
            await engines.load(model, step)
            errors, calls = count_errors([outcome for rollout in rollouts for outcome in rollout.outcomes])
            print(
                f"step {step}: correct {np.mean([rollout.reward for rollout in rollouts]):.2f}, "
                f"tool errors {errors / max(1, calls):.2f}, kept {len(kept)}, loss {stats['loss']:+.4f}, "
                f"clipped {stats['clip_share']:.3f}",
                flush=True,
            )
        after = await pass_rate(player, held_out, seed=10_000)
    print(
        f"held-out pass@1: {before:.3f} before, {after:.3f} after {steps} steps ({len(held_out)} problems, 2 rollouts each)"
    )
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="steps of RL (default: 7)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of the SFT run (default: runs)")
    options = parser.parse_args()
    asyncio.run(main(options.steps, options.runs_dir))
