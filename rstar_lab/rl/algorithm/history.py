"""Results of the rollouts so far, problem by problem. Samplers read them; they are part of a checkpoint."""

from collections.abc import Sequence
from typing import NamedTuple

from rstar_lab.rl.trajectory import Trajectory


class ProblemHistory(NamedTuple):
    """What is known of a problem. drawn: times drawn in the stage. correct, total: rollouts, where earlier ones may count less."""

    drawn: int = 0
    correct: float = 0.0
    total: float = 0.0


NOTHING = ProblemHistory()
History = dict[str, ProblemHistory]


def add_results(history: History, rollouts: Sequence[Trajectory], memory: float) -> None:
    """Add the results of a step's rollouts. memory: factor of the results before, for each problem with a new result."""
    results: dict[str, list[bool]] = {}
    for t in rollouts:
        if t.usable:
            results.setdefault(t.problem_id, []).append(t.reward > 0)
    for name, correct in results.items():
        old = history.get(name, NOTHING)
        history[name] = ProblemHistory(
            old.drawn, memory * old.correct + sum(correct), memory * old.total + len(correct)
        )
