"""Adapt reward functions written for TRL's GRPOTrainer: `f(prompts, completions, **columns) -> list[float]`.

TRL itself is not required. Interface: TRL, `GRPOTrainer(reward_funcs=...)`, for a data set in the conversational format.
"""

import inspect
from collections.abc import Callable
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.problems import Problem

# Arguments that only TRL's trainer can supply.
TRAINER_ONLY = ("completion_ids", "environments", "log_extra", "log_metric", "trainer_state")
TEXT_LISTS = ("list[str]", "typing.List[str]", "List[str]")


def is_trl_reward(parameters: list[inspect.Parameter]) -> bool:
    """Return whether a reward function with these parameters is written for TRL: it has a parameter `completions`."""
    return any(p.name == "completions" for p in parameters)


def adapt_trl_reward(
    name: str, function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> Callable[..., Any]:
    """Return the TRL reward function as `reward(text, answer, *, problem)`.

    The function is called with lists of length 1. Its columns are `answer` and `solution` (the true answer), `question`,
    `problem_id`, `source`, `difficulty` and the entries of the problem's `info`; if a name occurs twice, the entry of `info`
    is used. Prompts and completions are lists of chat messages, or strings if the parameter `completions` has the annotation
    `list[str]`. None as a reward counts as 0, as in TRL.
    Raises UserError for an async function and for arguments that only TRL's trainer can supply.
    """
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if unknown := sorted(required.intersection(TRAINER_ONLY)):
        raise UserError(f"rl.reward: {name}: parameter {unknown[0]} is supplied by TRL's trainer only")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"rl.reward: {name}: async reward functions are not supported; write a plain function")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = {p.name for p in parameters}
    annotation = next(p.annotation for p in parameters if p.name == "completions")
    as_text = str(annotation) in TEXT_LISTS

    def reward(text: str, answer: str, *, problem: Problem) -> float:
        columns: dict[str, Any] = {
            "answer": answer,
            "solution": answer,
            "question": problem.question,
            "problem_id": problem.problem_id,
            "source": problem.source,
            "difficulty": problem.difficulty,
        }
        columns |= problem.info
        columns["prompts"] = problem.question if as_text else [{"role": "user", "content": problem.question}]
        columns["completions"] = text if as_text else [{"role": "assistant", "content": text}]
        values = {key: [value] for key, value in columns.items() if takes_any or key in accepted}
        rewards = function(**values)
        if len(rewards) != 1:
            raise ValueError(f"it returned {len(rewards)} rewards for one completion")
        return 0.0 if rewards[0] is None else float(rewards[0])

    return reward
