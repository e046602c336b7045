"""Samplers: which problems a step draws, in place of a random order.

A sampler gives every problem a score; the problems with the highest scores are drawn, each at most once until all were
drawn. It reads the difficulty that a problem has in its file or from the filter of the stage, and the results of the rollouts so
far. Selection is a function of seed, position and results, so a resumed run draws the same problems.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import correct_by
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.trajectory import Trajectory


class ProblemHistory(NamedTuple):
    """What is known of a problem. drawn: times drawn in the stage. correct, total: rollouts, where earlier ones may count less."""

    drawn: int = 0
    correct: float = 0.0
    total: float = 0.0


NOTHING = ProblemHistory()
History = dict[str, ProblemHistory]
Problems = Sequence[Problem]
Results = Mapping[str, ProblemHistory]


def add_results(history: History, rollouts: Sequence[Trajectory], memory: float) -> None:
    """Add the results of a step's rollouts. memory: factor of the results before, for each problem with a new result."""
    for name, correct in correct_by(rollouts, "problem_id").items():
        old = history.get(name, NOTHING)
        history[name] = ProblemHistory(
            old.drawn, memory * old.correct + sum(correct), memory * old.total + len(correct)
        )


class Sampler(MethodSection):
    """Base class of the samplers."""

    needs_difficulty: ClassVar[bool] = False  # whether the sampler reads the difficulty of the problems

    @property
    def name(self) -> str:
        """The type of the sampler."""
        return str(getattr(self, "type", ""))

    @property
    def kept_share(self) -> float:
        """Factor by which earlier results of a problem count less with each new group."""
        return 1.0

    @abstractmethod
    def scores(self, problems: Problems, history: Results, rng: np.random.Generator) -> np.ndarray:
        """Return the score of each problem, (problems,). history: results by problem id."""


class EasyFirst(Sampler):
    """Draws problems once each, from easy to hard (curriculum learning, Bengio et al. 2009)."""

    needs_difficulty: ClassVar[bool] = True
    type: Literal["easy_first"] = "easy_first"
    """Name of the method."""

    def scores(self, problems: Problems, history: Results, rng: np.random.Generator) -> np.ndarray:
        return -_failed_share(problems, self.type) - _passes(problems, history)


class ImprovementPotential(Sampler):
    """Draws problems once each, from high to low p * (1 - p) at the measured pass rate p (after arXiv 2505.21668; the formula is
    ours)."""

    needs_difficulty: ClassVar[bool] = True
    type: Literal["improvement_potential"] = "improvement_potential"
    """Name of the method."""

    def scores(self, problems: Problems, history: Results, rng: np.random.Generator) -> np.ndarray:
        failed = _failed_share(problems, self.type)
        return failed * (1 - failed) - _passes(problems, history)


class Learnability(Sampler):
    """Draws problems with probability proportional to p * (1 - p), where p is the pass rate so far with one success and one
    failure added (arXiv 2502.12272)."""

    type: Literal["learnability"] = "learnability"
    """Name of the method."""

    def scores(self, problems: Problems, history: Results, rng: np.random.Generator) -> np.ndarray:
        correct, total = _results(problems, history)
        rate = (correct + 1) / (total + 2)
        # The k largest of log-weight + Gumbel noise are k draws without replacement.
        return np.log(rate * (1 - rate)) + rng.gumbel(size=len(problems))


class Thompson(Sampler):
    """Draws the problems whose pass rate, sampled from its posterior, is closest to `target` (Thompson sampling, MoPPS, arXiv
    2507.04632)."""

    type: Literal["thompson"] = "thompson"
    """Name of the method."""
    target: float = Field(0.5, gt=0, lt=1)
    """Pass rate to draw. Default: MoPPS."""
    memory: float = Field(0.8, gt=0, le=1)
    """Factor by which earlier results of a problem count less with each new group."""

    @property
    def kept_share(self) -> float:
        return self.memory

    def scores(self, problems: Problems, history: Results, rng: np.random.Generator) -> np.ndarray:
        correct, total = _results(problems, history)
        return -np.abs(rng.beta(1 + correct, 1 + total - correct) - self.target)


def check_difficulty(problems: Problems, name: str) -> None:
    """Raise UserError if no problem has a difficulty. name: type of the sampler that needs it."""
    if all(problem.difficulty is None for problem in problems):
        raise UserError(
            f"rl.method.add: {name} requires problems with a difficulty: give the stage a filter, or run `rstar-lab data prepare "
            "--difficulty RUN`"
        )


def _failed_share(problems: Problems, name: str) -> np.ndarray:
    """Return the difficulty of each problem, in [0, 1]; problems without one count as hardest."""
    check_difficulty(problems, name)
    measured = [problem.difficulty for problem in problems]
    return np.clip([1.0 if value is None else value for value in measured], 0.0, 1.0)


def _passes(problems: Problems, history: Results) -> np.ndarray:
    """Return how often each problem was drawn, times a number above the range of scores."""
    return 2.0 * np.array([history.get(problem.problem_id, NOTHING).drawn for problem in problems])


def _results(problems: Problems, history: Results) -> tuple[np.ndarray, np.ndarray]:
    found = [history.get(problem.problem_id, NOTHING) for problem in problems]
    return np.array([one.correct for one in found]), np.array([one.total for one in found])
