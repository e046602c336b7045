"""Evaluation: avg@k, pass@k and maj@k on a set of problems, with intervals that know that samples share problems.

Rollouts land in the run store in chunks of whole problems; a killed evaluation started again makes only the missing ones.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Any

import numpy as np

from rstar_lab.errors import UserError
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import EvaluateSection
from rstar_lab.rl.rollout.agent_loop import Codec, RolloutLimits
from rstar_lab.rl.rollout.driver import RolloutTask, run_rollouts
from rstar_lab.rl.rollout.metrics import rollout_metrics
from rstar_lab.rl.rollout.records import TrainingLabels, call_rows, trajectory_row, transcript_row
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter
from rstar_lab.verify import same_answer

CHUNK = 512  # rollouts


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float

    def as_list(self) -> list[float]:
        return [self.mean, self.low, self.high]

    def __str__(self) -> str:
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}]"


def clustered_interval(values: Sequence[float], seed: int = 0, draws: int = 2000) -> Estimate:
    """Percentile bootstrap over clusters: `values` holds one mean a problem."""
    data = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    means = data[rng.integers(0, len(data), (draws, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(data.mean()), float(low), float(high))


def ratio_interval(above: Sequence[float], below: Sequence[float], seed: int = 0, draws: int = 2000) -> Estimate | None:
    """sum(above) / sum(below), with a percentile bootstrap over clusters; None where the second sum is 0.

    A draw in which it is 0 says nothing and is left out.
    """
    over, under = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    if not under.sum():
        return None
    chosen = np.random.default_rng(seed).integers(0, len(over), (draws, len(over)))
    sums = under[chosen].sum(axis=1)
    ratios = over[chosen].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Estimate(float(over.sum() / under.sum()), float(low), float(high))


def pass_at(k: int, samples: int, correct: int) -> float:
    """Chance that k draws without replacement hold a correct one (Chen et al. 2021, arXiv 2107.03374)."""
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


_same = cache(same_answer)  # which may ask math-verify in another process


def votes(answers: Iterable[str]) -> list[list[str]]:
    """The forms in which each answer was given, most votes first; of ties the one that was given first."""
    forms: list[tuple[int, list[str]]] = []
    for answer, count in Counter(answers).items():
        for i, (total, known) in enumerate(forms):
            if _same(answer, known[0]):
                forms[i] = total + count, [*known, answer]
                break
        else:
            forms.append((count, [answer]))
    return [known for _, known in sorted(forms, key=lambda form: -form[0])]


def per_problem(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a problem, in the order of the problems: samples, how many are right, what the majority says, and means."""
    problems: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        problems[row["problem_id"]].append(row)
    table = []
    for name, group in problems.items():
        answers = [row["answer"] for row in group if row["answer"] is not None]
        winners = next(iter(votes(answers)), [])
        table.append(
            {
                "problem_id": name,
                "truth": group[0]["truth"],
                "samples": len(group),
                "correct": sum(row["reward"] > 0 for row in group),
                "majority": next((answer for answer in answers if answer in winners), None),
                "majority_correct": any(row["answer"] in winners and row["reward"] > 0 for row in group),
                "response_tokens": float(np.mean([row["response_tokens"] for row in group])),
                "calls": sum(row["calls"] for row in group),
                "errors": sum(row["errors"] for row in group),
                "truncated": sum(row["truncated"] for row in group),
            }
        )
    return table


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of an evaluation, from its trajectory rows. Estimates are [mean, low, high], clustered by problem.

    pass1 is avg@k. pass_at: pass@k for the powers of two up to the samples. `intervals` holds the estimates of what else is
    given as a plain mean.
    """
    table = per_problem(rows)
    samples = min(row["samples"] for row in table)
    calls, errors = sum(row["calls"] for row in rows), sum(row["errors"] for row in rows)
    right = [row for row in rows if row["reward"] > 0]
    right_calls = sum(row["calls"] for row in right)
    counts = [row["samples"] for row in table]
    intervals = {
        "response_tokens": ratio_interval([row["response_tokens"] * row["samples"] for row in table], counts),
        "calls": ratio_interval([row["calls"] for row in table], counts),
        "error_rate": ratio_interval([row["errors"] for row in table], [row["calls"] for row in table]),
        "truncated": ratio_interval([row["truncated"] for row in table], counts),
    }

    def pass_estimate(k: int) -> list[float]:
        return clustered_interval([pass_at(k, row["samples"], row["correct"]) for row in table]).as_list()

    return {
        "pass1": clustered_interval([row["correct"] / row["samples"] for row in table]).as_list(),
        f"pass{samples}": pass_estimate(samples),
        f"maj{samples}": clustered_interval([float(row["majority_correct"]) for row in table]).as_list(),
        "n": len(rows),
        "problems": len(table),
        "samples": samples,
        "response_tokens": float(np.mean([row["response_tokens"] for row in rows])),
        "calls": calls / len(rows),
        "error_rate": errors / calls if calls else None,
        "error_rate_correct": sum(row["errors"] for row in right) / right_calls if right_calls else None,
        "truncated": float(np.mean([row["truncated"] for row in rows])),
        "pass_at": {str(2**i): pass_estimate(2**i) for i in range(samples.bit_length())},
        "intervals": {name: estimate.as_list() for name, estimate in intervals.items() if estimate},
    }


async def evaluate(
    problems: Sequence[Problem],
    settings: EvaluateSection,
    *,
    engines: EngineGroup,
    codec: Codec,
    tools: Mapping[str, Tool],
    reward: Callable[[str, str], float],
    writer: RunWriter,
    seed: int,
    mode: str,
    max_tool_chars: int = 4096,
    context: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Roll out what the run lacks, then summarise all of it; the result is kept in run.json and returned.

    context: tokens that the model can read; responses end where the longest prompt leaves no more of them.
    Raises UserError where the engines fail for good; what is made until then stays.
    """
    run = writer.run_dir.name
    limit = settings.max_response_tokens
    if context is not None:
        limit = min(limit, context - max(len(codec.prompt_ids(problem.question)) for problem in problems))
        if limit < 1:
            raise UserError(f"the longest question fills the model's context of {context} tokens: leave it out")

    async def roll(chunk: Sequence[Problem]) -> list[Trajectory]:
        tasks = [
            RolloutTask(
                problem,
                traj_id=f"{run}-{problem.problem_id}-{sample:03d}",
                group_id=problem.problem_id,
                sample=sample,
                seed=derive_seed(seed, "evaluate", problem.problem_id, sample),
            )
            for problem in chunk
            for sample in range(settings.samples)
        ]
        trajectories = await run_rollouts(
            tasks,
            slots=engines.slots(tasks, mode),
            codec=codec,
            tools=tools,
            reward=reward,
            limits=RolloutLimits(limit, settings.max_turns, max_tool_chars),
            temperature=settings.temperature,
            top_p=settings.top_p,
        )
        if lost := sum(not trajectory.usable for trajectory in trajectories):
            # Ours, not the model's: counted as wrong they would be a wrong number.
            raise UserError(
                f"{lost} of {len(trajectories)} rollouts were lost with their engines; the same command goes on"
            )
        return trajectories

    size = max(1, CHUNK // settings.samples)
    chunks = [problems[start : start + size] for start in range(0, len(problems), size)]
    writer.cut(len(chunks))
    for number, chunk in enumerate(chunks, start=1):
        if number > (writer.last_step or 0):
            trajectories = await roll(chunk)
            writer.write_step(
                "evaluate",
                number,
                trajectories=[trajectory_row(t, TrainingLabels(False)) for t in trajectories],
                calls=[row for t in trajectories for row in call_rows(t)],
                transcripts=[transcript_row(t, TrainingLabels(False), arrays=True) for t in trajectories],
                metrics=rollout_metrics(trajectories),
            )
        progress(min(number * size, len(problems)), len(problems))
    result = summarise(RunReader(writer.run_dir).read("trajectories").to_pylist())
    writer.finish("finished", result=result)
    return result
