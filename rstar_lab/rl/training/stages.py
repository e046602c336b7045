"""Transitions between stages: when a stage ends, the model it ends with, and the problems the next one starts with."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rstar_lab.common.errors import UserError
from rstar_lab.rl.evaluation import Generate, store_evaluation
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import DifficultyFilter, HandOff, Recipe, Stage
from rstar_lab.runs.files import atomic_write
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.tables import UNUSABLE
from rstar_lab.runs.writer import RunWriter
from rstar_lab.untrusted.parquet import read_parquet

# Columns of the difficulty table whose types Arrow would not choose.
_TYPES = {"step": pa.int32(), "samples": pa.int16(), "solved": pa.int16(), "pass_rate": pa.float32()}
_STATE_FILES = ("optimizer.pt", "trainer.json")


# End of a stage


def stage_end_reason(stage: Stage, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a stage ends after these steps: `steps` or the name of a hand-off trigger; None if it continues.

    lines: the metrics of the steps of the stage.
    """
    if len(lines) >= stage.steps:
        return "steps"
    return hand_off_trigger(stage.hand_off, lines) if stage.hand_off else None


def hand_off_trigger(rule: HandOff, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the trigger of a hand-off rule that fires after these steps; None if none does.

    Source: rStar2-Agent, multi-stage training: the response limit grows when the share of truncated rollouts reaches a
    plateau; the problems get harder when most groups are solved by all their rollouts.
    """

    def mean(key: str, end: int) -> float:
        return float(np.mean([line[key] or 0.0 for line in lines[end - rule.window : end]]))

    count = len(lines)
    if rule.solved_groups is not None and count >= rule.window and mean("solved_groups", count) >= rule.solved_groups:
        return "solved_groups"
    if rule.truncation_plateau is None or count < 2 * rule.window:
        return None
    if not any(line["truncated"] for line in lines):  # a higher limit would change nothing
        return None
    change = mean("truncated", count) - mean("truncated", count - rule.window)
    return "truncation_plateau" if abs(change) <= rule.truncation_plateau else None


# Model at the end of a stage


def stage_model(run_dir: Path, stage: str) -> Path:
    """Return the folder of the model at the end of a stage, in Hugging Face format."""
    return run_dir / "stages" / stage


def keep_stage_model(checkpoint: Path, run_dir: Path, stage: str) -> None:
    """Copy the model of a checkpoint to `stage_model`, so that it outlives the checkpoint. Does nothing if it exists."""
    final = stage_model(run_dir, stage)
    if final.exists():
        return
    hidden = final.with_name(f".{stage}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.copytree(checkpoint, hidden, ignore=shutil.ignore_patterns(*_STATE_FILES), copy_function=link_or_copy)
    hidden.replace(final)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def stage_table(stages: Sequence[Stage], run_dir: Path) -> list[dict[str, Any]]:
    """Return one row per stage that has steps: stage, first_step, last_step, ended_by, parent {run, step}, difficulty
    (path of the difficulty table)."""
    reader = RunReader(run_dir)
    lines = reader.metrics()
    parent = reader.info.get("parent")
    table = []
    for stage in stages:
        finished = [line for line in lines if line["stage"] == stage.name]
        if not finished:
            continue
        first, last = finished[0]["step"], finished[-1]["step"]
        difficulty = difficulty_file(run_dir, stage.name)
        table.append(
            {
                "stage": stage.name,
                "first_step": first,
                "last_step": last,
                "ended_by": stage_end_reason(stage, finished) or "retired",
                "parent": {"run": run_dir.name, "step": first - 1} if first > 1 else parent,
                "difficulty": str(difficulty.relative_to(run_dir)) if difficulty.exists() else None,
            }
        )
    return table


# Problems at the start of a stage


def difficulty_file(run_dir: Path, stage: str) -> Path:
    return run_dir / "difficulty" / f"stage={stage}.parquet"


def filter_run(run: str, stage: str) -> str:
    """Return the id of the run that has the rollouts of a stage's filter. run: id of the training run."""
    return f"{run}-{stage}-filter"


async def filter_problems(
    problems: Sequence[Problem],
    rule: DifficultyFilter,
    generate: Generate,
    *,
    stage: str,
    step: int,
    recipe: Recipe,
    run_dir: Path,
) -> list[Problem]:
    """Return the problems that the current policy does not solve yet. Their pass rates are measured once and kept in the run folder.

    The rollouts are a run of their own, `<run>-<stage>-filter`, whose parent is `step` of the training run. If
    interrupted, it continues. generate: generates training rollouts of the stage, such as `local_rollouts`.
    Raises UserError if no problem is left.
    """
    path = difficulty_file(run_dir, stage)
    if not path.exists():
        with RunWriter.open(
            run_dir.parent,
            filter_run(run_dir.name, stage),
            kind="evaluate",
            recipe=recipe.model_dump(mode="json"),
            seed=recipe.seed,
            parent={"run": run_dir.name, "step": step},
        ) as writer:
            await store_evaluation(problems, generate, samples=rule.samples, writer=writer, seed=recipe.seed)
            columns = ["problem_id", "reward", "stop_reason"]
            rows = RunReader(writer.run_dir).read("trajectories", columns=columns).to_pylist()
        table = difficulty_table(rows, rule, run_id=run_dir.name, stage=stage, step=step)
        with atomic_write(path) as file:
            pq.write_table(table, file)
    return without_solved(problems, path)


def without_solved(problems: Sequence[Problem], path: Path) -> list[Problem]:
    """Return the problems that a difficulty table keeps, with their difficulty. Raises UserError if the table is missing or keeps none."""
    if not path.exists():
        raise UserError(
            f"{path}: the difficulty table is missing; the trainer writes it before the first step of the stage"
        )
    rows = read_parquet(path).filter(pc.field("kept"))
    rates = dict(zip(rows["problem_id"].to_pylist(), rows["pass_rate"].to_pylist(), strict=True))
    difficulties = {name: None if rate is None else 1 - rate for name, rate in rates.items()}
    kept = [
        problem.model_copy(update={"difficulty": difficulties[problem.problem_id]})
        for problem in problems
        if problem.problem_id in rates
    ]
    if not kept:
        raise UserError(
            f"{path}: the filter keeps no problem: the policy solves all of them (shorten the stage before, or add harder "
            "problems), or fewer than filter.drop_below"
        )
    return kept


def difficulty_table(
    rows: Sequence[Mapping[str, Any]], rule: DifficultyFilter, *, run_id: str, stage: str, step: int
) -> pa.Table:
    """Return the pass rate of each problem over the rollouts with a valid reward. A problem without such rollouts is kept.

    rows: trajectory rows with problem_id, reward and stop_reason.
    """
    rewards: dict[str, list[bool]] = {}
    for row in rows:
        of_problem = rewards.setdefault(row["problem_id"], [])
        if row["stop_reason"] not in UNUSABLE:
            of_problem.append(row["reward"] > 0)
    rates = [sum(correct) / len(correct) if correct else None for correct in rewards.values()]
    columns: dict[str, Any] = {
        "run_id": [run_id] * len(rates),
        "stage": [stage] * len(rates),
        "step": [step] * len(rates),
        "problem_id": [*rewards],
        "samples": [*map(len, rewards.values())],
        "solved": [*map(sum, rewards.values())],
        "pass_rate": rates,
        "kept": [rate is None or rule.drop_below <= rate < rule.drop_from for rate in rates],
    }
    return pa.table({name: pa.array(values, _TYPES.get(name)) for name, values in columns.items()})
