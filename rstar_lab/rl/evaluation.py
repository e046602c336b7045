"""Evaluation on a set of problems: avg@k, pass@k and maj@k, with confidence intervals clustered by problem.

Rollouts are committed to the run store in chunks of whole problems. An interrupted evaluation that is started again
generates only the missing ones.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any

import numpy as np

from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import Estimate, pass_at_k, ratio
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout.checks import split_overlong
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.records import step_rows
from rstar_lab.rl.rollout.run import run_rollouts, score_groups, stream_rollouts
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.step import rollout_metrics, text_answers
from rstar_lab.rl.trajectory import StopReason, Trajectory
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.tables import UNUSABLE
from rstar_lab.runs.writer import RunWriter
from rstar_lab.verify import compare

log = logging.getLogger(__name__)

CHUNK = 512  # number of rollouts per commit
# Yields the trajectories of each list of tasks, in order.
Generate = Callable[[Sequence[list[RolloutTask]]], AsyncGenerator[list[Trajectory]]]
MAX_IN_FLIGHT = 1024  # rollouts
_same = lru_cache(2**16)(compare)


def group_equal_answers(answers: Iterable[str]) -> list[list[str]]:
    """Return the different answers in groups of equal ones, most frequent group first; ties in order of occurrence."""
    groups: list[tuple[int, list[str]]] = []
    for answer, count in Counter(answers).items():
        for i, (total, equal) in enumerate(groups):
            if _same(answer, equal[0]):
                groups[i] = total + count, [*equal, answer]
                break
        else:
            groups.append((count, [answer]))
    return [equal for _, equal in sorted(groups, key=lambda group: -group[0])]


def per_problem(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per problem, in order of first occurrence.

    A row has the number of samples, how many are correct, the majority answer, the mean of response_tokens, and the sums
    of calls, errors and truncated rollouts.
    """
    problems: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        problems[row["problem_id"]].append(row)
    table = []
    for name, group in problems.items():
        answers = [row["answer"] for row in group if row["answer"] is not None]
        winners = next(iter(group_equal_answers(answers)), [])
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
    """Return the result of an evaluation from its trajectory rows. Intervals are [value, low, high], see `estimates`.

    pass1: avg@k. used_tool, answered: share of rollouts with a tool call, and with an answer in the asked format. text_answers:
    see `step.text_answers`. pass_at: pass@k for the powers of two up to the number of samples. intervals: intervals of
    response_tokens, calls, error_rate and truncated. With one problem, low and high are None.
    """
    table = per_problem(rows)
    samples = min(row["samples"] for row in table)
    calls, errors = sum(row["calls"] for row in rows), sum(row["errors"] for row in rows)
    correct = [row for row in rows if row["reward"] > 0]
    correct_calls = sum(row["calls"] for row in correct)

    def estimate(values: Sequence[float], of: Sequence[float] | None = None) -> Estimate:
        """Return the mean over problems, or the ratio of the sums over problems."""
        weights = np.ones(len(values)) if of is None else np.asarray(of, dtype=float)
        return ratio(np.asarray(values, dtype=float), weights, len(rows))

    def pass_interval(k: int) -> list[float | None]:
        return estimate([pass_at_k(k, row["samples"], row["correct"]) for row in table]).as_list()

    counts = [row["samples"] for row in table]
    ratios = {
        "response_tokens": estimate([row["response_tokens"] * row["samples"] for row in table], counts),
        "calls": estimate([row["calls"] for row in table], counts),
        "error_rate": estimate([row["errors"] for row in table], [row["calls"] for row in table]),
        "truncated": estimate([row["truncated"] for row in table], counts),
    }
    return {
        "pass1": estimate([row["correct"] / row["samples"] for row in table]).as_list(),
        f"pass{samples}": pass_interval(samples),
        f"maj{samples}": estimate([float(row["majority_correct"]) for row in table]).as_list(),
        "n": len(rows),
        "problems": len(table),
        "samples": samples,
        "response_tokens": float(np.mean([row["response_tokens"] for row in rows])),
        "calls": calls / len(rows),
        "error_rate": errors / calls if calls else None,
        "error_rate_correct": sum(row["errors"] for row in correct) / correct_calls if correct_calls else None,
        "truncated": float(np.mean([row["truncated"] for row in rows])),
        "used_tool": float(np.mean([row["calls"] > 0 for row in rows])),
        "answered": float(np.mean([row["answer"] is not None for row in rows])),
        "text_answers": text_answers((row["answer"], row["truth"]) for row in rows),
        "pass_at": {str(2**i): pass_interval(2**i) for i in range(samples.bit_length())},
        "intervals": {name: found.as_list() for name, found in ratios.items() if found.clusters},
    }


def summarise_usable(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `summarise` of the usable rollouts, with the numbers of the others by cause (failed environment, undecided answer).

    Raises UserError if there is no usable rollout.
    """
    causes = {"environment_failures": StopReason.ENVIRONMENT_ERROR, "undecided": StopReason.UNDECIDED}
    counts = {name: sum(row["stop_reason"] == stop for row in rows) for name, stop in causes.items()}
    return summarise(usable_rows(rows)) | {name: count for name, count in counts.items() if count}


def summarise_sets(rows: Sequence[Mapping[str, Any]], sets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return {"sets": `summarise_usable` of each set by its name}, or {} for a single set. Sets without a usable rollout are left out.

    sets: problem ids by name.
    """
    if len(sets) < 2:
        return {}
    set_of = {problem_id: name for name, ids in sets.items() for problem_id in ids}
    parts: dict[str, list[Mapping[str, Any]]] = {name: [] for name in sets}
    for row in rows:
        parts[set_of[row["problem_id"]]].append(row)
    decided = {name for name, part in parts.items() if any(row["stop_reason"] not in UNUSABLE for row in part)}
    return {"sets": {name: summarise_usable(part) for name, part in parts.items() if name in decided}}


def usable_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rollouts whose environment did not fail and whose answer is decided. Raises UserError if there is none."""
    usable = [row for row in rows if row["stop_reason"] not in UNUSABLE]
    if not usable:
        raise UserError(
            "every rollout failed in its environment or has an undecided answer; the transcripts and the log name the cause"
        )
    return usable


async def evaluate(
    problems: Sequence[Problem],
    context: RolloutContext,
    *,
    samples: int,
    engines: EngineGroup,
    writer: RunWriter,
    seed: int,
    mode: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    sets: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Generate the rollouts that are missing in the run, and return the summary of all its rollouts, which is also in run.json.

    Problems whose prompt does not fit into the model's context are left out; the summary has their number, `overlong_prompts`.

    Args:
        problems: The problems.
        context: What the rollouts share: codec, tools, reward, limits, sampling.
        samples: Rollouts per problem.
        engines: The engines, with the weights to evaluate.
        writer: Writer of the run.
        seed: Seed of the recipe.
        mode: async or lockstep.
        progress: Called with the number of finished problems and their total.
        sets: Problem ids by name of the set, if the problems are of several sets; the summary then has each set's own.

    Raises:
        UserError: If engines fail permanently; finished rollouts stay in the run.
    """
    fitting, overlong = split_overlong(problems, context.codec, engines.context - 1)
    if fitting and overlong:
        problems = fitting
        log.warning(
            "%d problems are left out: their prompts do not fit into the context of %d tokens; the first is %s",
            len(overlong), engines.context, overlong[0].problem_id,
        )  # fmt: skip
    generate = local_rollouts(problems, context, engines=engines, mode=mode, context_length=engines.context)
    extra = {"overlong_prompts": len(overlong)} if overlong else {}
    return await store_evaluation(
        problems, generate, samples=samples, writer=writer, seed=seed, progress=progress, extra=extra, sets=sets
    )


def local_rollouts(
    problems: Sequence[Problem],
    context: RolloutContext,
    *,
    engines: EngineGroup,
    mode: str,
    context_length: int | None = None,
) -> Generate:
    """Return the generator of rollouts for `store_evaluation` that uses the engines of this process.

    context_length: tokens of the model's context; responses are limited so that the longest prompt fits. Other arguments: see
    `evaluate`. Raises UserError if a prompt does not fit into the context.
    """
    if context_length is not None:
        prompt_tokens = [len(context.of(problem).codec.prompt_ids(problem.question)) for problem in problems]
        longest = max(prompt_tokens)
        if context_length <= longest:
            problem = problems[prompt_tokens.index(longest)]
            raise UserError(
                f"problem {problem.problem_id}: its prompt has {longest} tokens, but the model's context has only"
                f" {context_length}; remove the problem"
            )
        context = context.with_response_limit(context_length - longest)
    generate = _generate_chunks if mode == "lockstep" else _stream_chunks
    return lambda chunks: generate(chunks, context, engines)


async def store_evaluation(
    problems: Sequence[Problem],
    generate: Generate,
    *,
    samples: int,
    writer: RunWriter,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    extra: Mapping[str, Any] | None = None,
    sets: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Generate the rollouts that are missing in the run, write them to it, and return the summary of all its rollouts.

    generate: yields the rollouts of each chunk of tasks, in order. extra: further entries of the summary.
    Other arguments and errors: see `evaluate`.
    """
    size = max(1, CHUNK // samples)
    chunks = [problems[start : start + size] for start in range(0, len(problems), size)]
    writer.cut(len(chunks))
    first = writer.last_step or 0
    run = writer.run_dir.name
    missing = [
        [evaluation_task(problem, run=run, sample=sample, seed=seed) for problem in chunk for sample in range(samples)]
        for chunk in chunks[first:]
    ]
    finished = sum(len(chunk) for chunk in chunks[:first])
    progress(finished, len(problems))
    number, since = first, time.monotonic()
    async for trajectories in generate(missing):
        for trajectory in trajectories:
            _check_usable(trajectory)
        number += 1
        metrics = rollout_metrics(trajectories) | {"generate_s": time.monotonic() - since}
        writer.write_step("evaluate", number, **step_rows(trajectories, {}, "all"), metrics=metrics)
        since = time.monotonic()
        finished += len(chunks[number - 1])
        progress(finished, len(problems))
    stored = RunReader(writer.run_dir).read("trajectories").to_pylist()
    result = summarise_usable(stored) | dict(extra or {}) | summarise_sets(stored, sets or {})
    writer.finish("finished", result=result)
    return result


def evaluation_task(problem: Problem, *, run: str, sample: int, seed: int) -> RolloutTask:
    """Return the task of one rollout of an evaluation. seed: seed of the recipe."""
    return RolloutTask(
        problem,
        traj_id=f"{run}-{problem.problem_id}-{sample:03d}",
        group_id=problem.problem_id,
        sample=sample,
        seed=derive_seed(seed, "evaluate", problem.problem_id, sample),
    )


async def _generate_chunks(
    chunks: Sequence[list[RolloutTask]], context: RolloutContext, engines: EngineGroup
) -> AsyncGenerator[list[Trajectory]]:
    """Yield the trajectories of each chunk. Chunks are generated one after the other: lockstep batches must not depend on timing."""
    for tasks in chunks:
        trajectories = await run_rollouts(tasks, context, slots=engines.slots(tasks, "lockstep"))
        yield await score_groups(trajectories, tasks, context)


async def _stream_chunks(
    chunks: Sequence[list[RolloutTask]], context: RolloutContext, engines: EngineGroup
) -> AsyncGenerator[list[Trajectory]]:
    """Yield the trajectories of each chunk, in order, while rollouts of later chunks are already in flight."""
    chunk_of = {task.traj_id: number for number, tasks in enumerate(chunks) for task in tasks}
    done: dict[int, dict[str, Trajectory]] = defaultdict(dict)
    number = 0
    tasks = [task for chunk in chunks for task in chunk]
    rollouts = stream_rollouts(tasks, context, slots=engines.slots(tasks, "async"), max_in_flight=MAX_IN_FLIGHT)
    async with aclosing(rollouts):
        async for trajectory in rollouts:
            _check_usable(trajectory)
            done[chunk_of[trajectory.traj_id]][trajectory.traj_id] = trajectory
            while number < len(chunks) and len(done[number]) == len(chunks[number]):
                finished = done.pop(number)
                trajectories = [finished[task.traj_id] for task in chunks[number]]
                yield await score_groups(trajectories, chunks[number], context)
                number += 1


def _check_usable(trajectory: Trajectory) -> None:
    if trajectory.stop_reason is StopReason.ENGINE_ERROR:  # counting it as incorrect would bias the result
        raise UserError(
            f"problem {trajectory.problem_id}: the rollout failed because no engine is running; the log of the engines"
            " names the cause; run the same command again to continue"
        )
