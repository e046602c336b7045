"""Resampling on correct (RoC): which of the oversampled rollouts of a group are trained on.

Source: rStar2-Agent (arXiv 2508.20722), section 2.2.3; the rule `released` is that of microsoft/rStar. See
`algorithm.roc.resample` for the rules and docs/algorithm.md for the choices that the paper leaves open.
"""

import logging
from functools import cache
from typing import Any

import numpy as np
from pydantic import PrivateAttr, model_validator

from rstar_lab.rl.algorithm.roc import (
    Penalty,
    SelectionRule,
    released_format_penalty,
    released_tool_error_penalty,
    resample,
)
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.methods.user_functions import user_penalty, user_rule
from rstar_lab.rl.section import Function, NotNegative, Positive, is_user_function
from rstar_lab.rl.trajectory import StopReason, Trajectory

log = logging.getLogger(__name__)


class Roc(MethodSection):
    """Resampling on correct: a rule selects the rollouts to train on."""

    _environment_penalties: dict[str, tuple[Any, ...]] = PrivateAttr({})

    rule: SelectionRule | Function = "paper"
    """Rule of selection (docs/algorithm.md). `paper`: failed rollouts uniformly, successful ones with probability inversely
    proportional to their penalty (section 2.2.3). `released`: as microsoft/rStar. `random`: uniformly. `none`: no oversampling
    (plain GRPO). Or your own `module:function` (docs/extending.md)."""
    oversample: Positive = 2
    """Each problem gets `group_size * oversample` rollouts, of which `group_size` are trained on. Default: paper, section 3.2."""
    penalties: tuple[Penalty | Function, ...] = ("errors", "format")
    """Penalties of a successful rollout, which are added: `errors`, `format`, or your own `module:function`. Default: paper,
    section 2.2.3."""
    min_positive: NotNegative = 0
    """Minimum number of successful rollouts to keep, if the group has them. The release's script uses 2."""
    min_negative: NotNegative = 0
    """Minimum number of failed rollouts to keep, if the group has them. The release's script uses 2."""

    @model_validator(mode="after")
    def _check_minima(self) -> "Roc":
        if is_user_function(self.rule) and (self.min_positive or self.min_negative):
            raise ValueError("min_positive and min_negative require one of the built-in rules in rule")
        return self

    def check(self, rl: Any) -> None:
        if self.min_positive + self.min_negative > rl.group_size:
            raise ValueError(f"method.roc: min_positive + min_negative must be at most group_size, {rl.group_size}")

    def bound(self, rl: Any) -> "Roc":
        """Return the method with the user's functions in place of their names."""
        rule = user_rule(self.rule) if is_user_function(self.rule) else self.rule
        found = super().bound(rl).model_copy(update={"rule": rule, "penalties": _loaded(self.penalties)})
        found._environment_penalties = {
            entry.name: _loaded(entry.roc_penalties) for entry in rl.environments if entry.roc_penalties is not None
        }
        return found

    @property
    def reads_texts(self) -> bool:  # type: ignore[override]
        terms = [self.penalties, *self._environment_penalties.values()]
        return self.rule == "released" or any(callable(term) for penalties in terms for term in penalties)

    def select(self, rollouts: list[Trajectory], rng: np.random.Generator) -> list[Trajectory]:
        if self.rule == "none":
            return rollouts
        values = {t.reward for t in rollouts}
        if self.rule != "random" and (len(values) > 2 or sum(value > 0 for value in values) > 1):
            warn_of_partial_credit()
        chosen = resample(
            [t.reward for t in rollouts],
            [self.penalty(t) for t in rollouts],
            self._rl.group_size,
            rule=self.rule,  # type: ignore[arg-type]
            min_positive=self.min_positive,
            min_negative=self.min_negative,
            rng=rng,
        )
        return [rollouts[i] for i in chosen]

    def penalty(self, rollout: Trajectory) -> float:
        """Return the penalty by which a correct rollout is ranked. The rule `released` computes both terms from texts."""
        errors, answers = rollout.p_err, rollout.p_format
        if self.rule == "released":
            errors = released_tool_error_penalty([call.response for call in rollout.calls])
            answers = released_format_penalty(response_text(rollout), complete_turns(rollout))
        terms = {"errors": errors, "format": answers}
        penalties = self._environment_penalties.get(rollout.environment, self.penalties)
        return sum(term(rollout) if callable(term) else terms[term] for term in penalties)


def _loaded(penalties: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(user_penalty(name) if is_user_function(name) else name for name in penalties)


@cache
def warn_of_partial_credit() -> None:
    """Warn, once per process, that the rule does not distinguish rewards above 0."""
    log.warning(
        "rl.method.roc: the rewards of a group have more than two values, or several above 0; every rollout with a reward above 0 "
        "counts as successful, so that RoC may drop the best ones: return 0 for rollouts that are not right, or set "
        "method.roc.rule=none"
    )


def response_text(rollout: Trajectory) -> str:
    """Return the text of a response: turns of the model, tool responses and texts of the environment, in order."""
    parts: list[str] = []
    for number, turn in enumerate(rollout.turns):
        parts += [turn.text, *(call.response for call in rollout.calls if call.turn == number), turn.observation]
    return "\n".join(parts)


def complete_turns(rollout: Trajectory) -> int:
    """Return the number of turns that the model ended itself. A rollout that stopped at its token limit has an open last turn,
    unless that turn has calls, whose responses did not fit."""
    turns = len(rollout.turns)
    open_turn = rollout.stop_reason is StopReason.LENGTH and not any(call.turn == turns - 1 for call in rollout.calls)
    return turns - open_turn
