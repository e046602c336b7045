"""Checks before each update: the rollouts of the step, the chat template, and the code tools."""

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.renderers.paper import CHAT_TEMPLATE, PaperRenderer, chat_template
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.trajectory import StopReason, Trajectory


class RolloutError(UserError):
    """Rollouts that must not be trained on, a wrong chat template, or a code tool that does not run code."""


def check_rollouts(trajectories: Sequence[Trajectory]) -> None:
    """Raise RolloutError if the arrays of a rollout do not fit its turns, or if the engines returned no log-probs."""
    failed = (StopReason.ENVIRONMENT_ERROR, StopReason.UNDECIDED)
    if trajectories and all(t.stop_reason in failed for t in trajectories):
        raise RolloutError(f"all {len(trajectories)} rollouts of the step failed; the first: {trajectories[0].error}")
    tokens, has_log_probs = 0, False
    for t in trajectories:
        length = len(t.response_ids)
        if not len(t.loss_mask) == len(t.log_probs) == length:
            raise RolloutError(
                f"rollout {t.traj_id} has {length} tokens, {len(t.log_probs)} log-probs and {len(t.loss_mask)} entries in "
                "its loss mask"
            )
        expected = [False] * length
        for turn in t.turns:
            expected[turn.start : turn.end] = [True] * (turn.end - turn.start)
        if list(t.loss_mask) != expected:
            place = next(i for i, (got, want) in enumerate(zip(t.loss_mask, expected, strict=True)) if got != want)
            raise RolloutError(f"the loss mask of rollout {t.traj_id} does not match its turns, first at token {place}")
        if not all(map(math.isfinite, t.log_probs)):
            raise RolloutError(f"rollout {t.traj_id} has a log-prob that is not finite")
        tokens += sum(expected)
        has_log_probs = has_log_probs or any(compress(t.log_probs, expected))
    if tokens and not has_log_probs:
        raise RolloutError(f"all {tokens} log-probs of the step are 0: the engines return no log-probs")


MAX_PROMPT_TOKENS = 2048  # of training problems; as data.max_prompt_length in microsoft/rStar


def split_overlong(problems: Sequence[Problem], codec: Codec, limit: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems whose prompt has at most `limit` tokens, and the others."""
    kept: list[Problem] = []
    overlong: list[Problem] = []
    frame = len(codec.prompt_ids("")) + 8  # tokens of the prompt without the question
    for problem in problems:
        # A token has at least one byte, so most questions need no tokenizer.
        fits = frame + len(problem.question.encode()) <= limit or len(codec.prompt_ids(problem.question)) <= limit
        (kept if fits else overlong).append(problem)
    return kept, overlong


def overlong_message(stage: str, overlong: Sequence[Problem], total: int) -> str:
    """Return the message about the problems of a stage that are left out."""
    return (
        f"stages.{stage}.problems: {len(overlong):,} of {total:,} are left out: their prompts are longer than {MAX_PROMPT_TOKENS:,} "
        f"tokens or the model's context; the first is {overlong[0].problem_id}"
    )


def check_template(codec: Codec) -> None:
    """Raise RolloutError if prompts and tool responses of rollouts differ from the chat template stored with the model.

    Only for models with the template that this package stores (`save_model`): a model with another template, such as a
    base model, is trained to a format that its tokenizer does not have.
    """
    tokenizer = codec.tokenizer
    own_templates = (CHAT_TEMPLATE, chat_template(codec.control_tokens))
    if type(codec.renderer) is not PaperRenderer or tokenizer.chat_template not in own_templates:
        return
    renderer, results = codec.renderer, ["FIRST RESULT", "SECOND RESULT"]
    system = renderer.system_prompt if codec.style.system is None else codec.style.system
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": renderer.question_turn("QUESTION")})
    turns = [{"role": "assistant", "content": "TURN"}, *({"role": "tool", "content": text} for text in results)]

    def stored(messages: Sequence[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(
            messages, tools=codec.schemas or None, add_generation_prompt=True, tokenize=False
        )

    expected = [stored(messages), stored([*messages, *turns]).partition("TURN<|im_end|>")[2]]
    rendered = [renderer.prompt("QUESTION", codec.schemas), renderer.continuation(results)]
    for what, ours, theirs in zip(("prompts", "tool responses"), rendered, expected, strict=True):
        if ours != theirs:
            raise RolloutError(
                f"the {what} of the rollouts differ from the chat template stored with the model: they end with "
                f"{ours[-40:]!r}, the template with {theirs[-40:]!r}"
            )


async def check_tools(tools: Mapping[str, Any], seed: int) -> None:
    """Run a program in each code tool. Raises RolloutError if the output is wrong.

    A sandbox that reports success without running the code would teach the model that its programs print nothing.
    """
    for name, tool in tools.items():
        if (check := getattr(tool, "check", None)) and (problem := await check(seed)):
            raise RolloutError(f"tool {name}: {problem}")
