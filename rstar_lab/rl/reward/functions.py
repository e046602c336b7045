"""The reward of a rollout: 1 if the final answer is correct, else 0; or a user's reward function.

Source: rStar2-Agent, section 2: no reward for format or tool use.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from rstar_lab.common.errors import UserError
from rstar_lab.rl.plugins import load_named, start_call
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward.boxed import asks_for_sandbox, boxed_function, released_grade
from rstar_lab.rl.reward.foreign import adapt_foreign, parameters_of, required_of
from rstar_lab.rl.reward.hidden_tests import HiddenTests, Runner
from rstar_lab.rl.section import TESTS
from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.verify import AnswerFormat, Undecided, verify

TIMEOUT_S = 60.0  # seconds that one call of a user's reward function may take


def reward(response_text: str, answer: str, *, answer_format: AnswerFormat = "tagged") -> float:
    """Return 1.0 if the response's final answer equals `answer`, else 0.0.

    response_text: the model's own text only, never tool output. answer_format: see `rstar_lab.verify.extract_answer`.
    """
    return float(verify(response_text, answer, answer_format=answer_format))


@dataclass(frozen=True, slots=True)
class RewardInputs:
    """Optional inputs of a user's reward function. It receives those for which it has a keyword-only parameter of that name.

    problem: the problem with its `info`. calls: the tool calls of the rollout, with outcome and response. tools: final
    instance of each tool that is a class, by the name of the tool; None if the rollout did not call it.
    """

    problem: Problem
    calls: Sequence[ToolCallRecord] = ()
    tools: Mapping[str, Any] = field(default_factory=dict)


SUPPLIED = tuple(RewardInputs.__dataclass_fields__)


@runtime_checkable
class RolloutReward(Protocol):
    """A reward that reads more of a rollout than its text."""

    async def score_rollout(
        self, text: str, problem: Problem, *, calls: Sequence[ToolCallRecord], tools: Mapping[str, Any]
    ) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics). calls, tools: see `RewardInputs`."""


@dataclass(frozen=True)
class UserReward:
    """A user's reward function: `function(text, answer)`, optionally with keyword-only parameters of RewardInputs.

    It returns a finite number, or (number, metrics), where metrics maps names to numbers. supplied: the keyword-only
    parameters that the function takes. timeout_s: seconds that one call may take.
    """

    name: str
    function: Callable[..., Any]
    supplied: frozenset[str]
    timeout_s: float = TIMEOUT_S

    def __call__(self, response_text: str, answer: str) -> float:
        """Return the reward, for callers that have only the text. Raises UserError if the function requires other inputs."""
        if self.supplied:
            raise UserError(
                f"rl.reward: {self.name} requires {', '.join(sorted(self.supplied))}, which the run store does not have"
            )
        return self.score(response_text, answer, None)[0]

    async def score_rollout(
        self, text: str, problem: Problem, *, calls: Sequence[ToolCallRecord], tools: Mapping[str, Any]
    ) -> tuple[float, dict[str, float]]:
        """Return `score` of a rollout, computed in a thread."""
        return await asyncio.to_thread(self.score, text, problem.answer, RewardInputs(problem, calls, tools))

    def score(self, response_text: str, answer: str, inputs: RewardInputs | None) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics). Raises UserError if the function fails, takes too long or returns another type."""
        values = {name: getattr(inputs, name) for name in self.supplied}
        call = start_call(self.function, response_text, answer, **values)
        try:
            result: Any = call.result(self.timeout_s)
            number, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
            value = float(number)
            named = {str(name): float(metric) for name, metric in metrics.items()}
        except Undecided:  # a function that calls `verify`
            raise
        except Exception as error:
            if not call.done():
                raise UserError(
                    f"rl.reward: {self.name} did not return within {self.timeout_s:g} s; make it faster or raise "
                    "rl.reward_timeout_s"
                ) from None
            raise UserError(f"rl.reward: {self.name} failed: {type(error).__name__}: {error}") from error
        if not all(map(math.isfinite, (value, *named.values()))):
            raise UserError(f"rl.reward: {self.name} returned {result!r}; expected finite numbers")
        return value, named


def make_reward(
    name: str,
    answer: AnswerFormat = "tagged",
    timeout_s: float = TIMEOUT_S,
    run: Runner | None = None,
    info: Collection[str] | None = None,
) -> Callable[[str, str], float]:
    """Return the reward function that a recipe names: a function of (the model's own text, the true answer).

    name: recipe key `rl.reward`: `verify`, `released` (the graders of microsoft/rStar), `tests` (hidden test cases, executed by
    `run`, see `HiddenTests`), or `module:function` (see `UserReward`), which can also be a reward of TRL, Inspect or verifiers
    (see `adapt_foreign`). User functions are called from several threads; a function with the attribute `sandbox = True` runs
    as a call of a sandbox. RoC treats a rollout as correct if its reward is above 0. answer: recipe key `rl.answer`: where
    `verify` and scorers of Inspect find the answer; not used by other rewards. timeout_s: recipe key `rl.reward_timeout_s`:
    limit of one call of a user's function. info: names in the `info` of the problems, if they are known: a parameter of a TRL
    reward that neither they nor the columns supply is an error.
    Raises UserError if the function does not exist or requires parameters that are not supplied. A call raises UserError
    if the function fails or does not return a finite number.
    """
    if name == "verify":
        return reward if answer == "tagged" else partial(reward, answer_format=answer)
    if name == "released":
        return lambda text, answer: float(released_grade(text, answer))
    if name == TESTS:
        return HiddenTests(run)
    function = load_named(name, "rl.reward")
    if asks_for_sandbox(function):
        # The sandbox limits the time of the call; this limit only covers a sandbox that hangs.
        return UserReward(name, boxed_function(name, function, timeout_s), frozenset(), timeout_s + 60)
    if (foreign := adapt_foreign(name, function, answer, info)) is not None:
        return UserReward(name, foreign, frozenset({"problem"}), timeout_s)
    if not callable(function):
        raise UserError(f"rl.reward: {name} is a {type(function).__name__}; expected a function")
    parameters = parameters_of(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = required_of(positional)
    if len(required) > 2:
        raise UserError(
            f"rl.reward: {name}: nothing supplies the parameter {required[2]}; it is called with (text, answer)"
        )
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    if unknown := [p.name for p in keywords if p.name not in SUPPLIED and p.default is p.empty]:
        raise UserError(f"rl.reward: {name}: unknown parameter {unknown[0]}; choose from {', '.join(SUPPLIED)}")
    return UserReward(name, function, frozenset(p.name for p in keywords if p.name in SUPPLIED), timeout_s)
