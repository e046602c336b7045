"""Rollouts of scripted turns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helpers.scripted_engine import ScriptedEngine
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection, RlSection
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.verify import verify

SIX_TIMES_SEVEN = Problem(problem_id="p", question="What is 6 times 7?", answer="42")


class EchoSandbox:
    """The interface of the sandbox without a sandbox. Returns the program of each call."""

    async def run_many(self, calls: Sequence[Call]) -> list[CallResult]:
        return [CallResult(Outcome.OK, f"ran {call.code}", "", None, 0.0) for call in calls]


async def roll_out(
    *turns: str,
    reward: Callable[..., float],
    rl: RlSection | None = None,
    problem: Problem = SIX_TIMES_SEVEN,
    tools: Mapping[str, Tool] | None = None,
    sample: int = 0,
) -> Trajectory:
    """Return the rollout of a model that writes `turns`, with the prompt and the limits of a recipe."""
    rl, tools = rl or RlSection(limits={"max_response_tokens": 4000}), tools or {}  # type: ignore[arg-type]
    tokenizer = train_tokenizer(["text"], 300)
    context = RolloutContext.for_training(Codec(tokenizer, tools, rl.prompt_style), tools, reward, rl)
    engine = ScriptedEngine(tokenizer, lambda prompt, turn: turns[turn])
    return await run_rollout(RolloutTask(problem, f"t-{sample}", "g", sample, seed=1), engine, context)


class TurnsEngine:
    """An engine that returns texts as tokens, one a turn, each of which ends with a stop token."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]):
        self.tokenizer, self.turns = tokenizer, iter(turns)
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.prompts.append(list(prompt_ids))
        ids = self.tokenizer.encode(next(self.turns), add_special_tokens=False)
        assert ids[-1] in sampling.stop_token_ids
        return Completion(ids, [-0.5] * len(ids), FinishReason.STOP, "scripted")


async def roll_out_chat(
    tokenizer: Any, style: PromptStyle, turns: Callable[[Codec], Sequence[str]]
) -> tuple[Trajectory, TurnsEngine, Codec]:
    """Return the rollout of a chat model with the tool `python`, which echoes, its engine and its codec."""
    tools = make_tools(["python"], EchoSandbox())
    codec = Codec(tokenizer, tools, style)
    engine = TurnsEngine(tokenizer, turns(codec))
    context = RolloutContext(codec, tools, verify, LimitsSection(max_response_tokens=4000), answer_format="boxed")
    return await run_rollout(RolloutTask(SIX_TIMES_SEVEN, "t", "g", sample=0, seed=1), engine, context), engine, codec
