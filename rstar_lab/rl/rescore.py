"""`rstar-lab rescore`: compute the rewards of a stored run again, with another reward or answer format, without sampling."""

import hashlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from rstar_lab.common.errors import UserError
from rstar_lab.rl.evaluation import summarise_sets, summarise_usable
from rstar_lab.rl.reward import extract_answer, make_reward
from rstar_lab.rl.section import REWARDS
from rstar_lab.rl.trajectory import StopReason
from rstar_lab.runs.messages import own_texts
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter
from rstar_lab.verify import ANSWER_FORMATS, AnswerFormat

THREADS = 4


@dataclass(frozen=True)
class Change:
    """A trajectory whose reward changes."""

    traj_id: str
    problem_id: str
    truth: str
    answer_before: str | None
    answer: str | None
    reward_before: float | None  # None: the rollout was not scored
    reward: float


@dataclass(frozen=True)
class Rescored:
    """Result of `rescore`. run: folder of the new run; None for a dry run. correct_before, correct: trajectories with a reward above 0."""

    run: Path | None
    trajectories: int
    correct_before: int
    correct: int
    changes: list[Change]
    result: dict[str, Any] | None = None


def rescore(
    folder: Path, *, reward: str = "verify", answer: AnswerFormat = "tagged", dry_run: bool = False
) -> Rescored:
    """Compute the reward of every trajectory of a run again. Unless `dry_run`, write a new run with these rewards beside it.

    reward: `verify`, `released` or `module:function`, as the recipe key `rl.reward`. answer: where `verify` reads the answer, as
    `rl.answer`. The parent of the new run is the old one. The columns kept and advantage are copied from the old run.
    Raises UserError for an unknown reward or format, a run without trajectories or
    without correct answers, or trajectories of environments.
    """
    if answer not in ANSWER_FORMATS:
        raise UserError(f"--answer {answer}: choose from {', '.join(ANSWER_FORMATS)}")
    source = RunReader(folder)
    score = make_reward(reward, answer)
    steps = source.steps()
    trajectories = {row["traj_id"]: row for row in source.read("trajectories").to_pylist()}
    if not trajectories:
        raise UserError(f"run {source.run_id} has no trajectories")
    _check_environments(source.run_id, trajectories.values(), reward)
    without = sum(row["truth"] is None for row in trajectories.values())
    if without and reward in REWARDS:
        raise UserError(
            f"run {source.run_id}: {without} of {len(trajectories)} trajectories have no correct answer (column truth), which "
            f"--reward {reward} requires; import them with it, or use --reward module:function"
        )
    transcripts = source.read("transcripts", ["traj_id", "messages"]).to_pylist()
    texts = {row["traj_id"]: "\n".join(own_texts(row["messages"])) for row in transcripts}  # as a reward gets them
    if missing := trajectories.keys() - texts.keys():
        raise UserError(f"run {source.run_id} has no transcript of {len(missing)} trajectories, such as {min(missing)}")
    threads = ThreadPoolExecutor(THREADS)  # not in a `with` statement, which waits for running calls after Ctrl-C
    rewards = list(threads.map(lambda row: score(texts[row["traj_id"]], row["truth"]), trajectories.values()))
    changes, correct_before = [], 0
    for row, new in zip(trajectories.values(), rewards, strict=True):
        old, text = row["reward"], texts[row["traj_id"]]
        correct_before += old is not None and old > 0
        new_answer = extract_answer(text, answer)
        if old is None or abs(new - old) > 1e-6:
            changes.append(
                Change(row["traj_id"], row["problem_id"], row["truth"], row["answer"], new_answer, old, float(new))
            )
        row["reward"], row["answer"] = float(new), new_answer
        if row["stop_reason"] == StopReason.UNDECIDED:  # decided now
            row["stop_reason"] = str(StopReason.ANSWERED)
    correct = sum(value > 0 for value in rewards)
    run, result = (None, None) if dry_run else _write(source, steps, trajectories, reward, answer)
    return Rescored(run, len(trajectories), correct_before, correct, changes, result)


def _check_environments(run_id: str, trajectories: Collection[dict[str, Any]], reward: str) -> None:
    """Raise UserError if trajectories belong to environments, which compute rewards of their own."""
    environments = [row["environment"] for row in trajectories if row["environment"]]
    if environments:
        raise UserError(
            f"run {run_id}: {len(environments)} of {len(trajectories)} trajectories belong to the environments"
            f" {', '.join(sorted(set(environments)))}, each with a reward of its own; rescore would replace these rewards"
            f" with `{reward}`. Change the reward in rl.environments and sample again"
        )


def _write(
    source: RunReader, steps: dict[int, str], trajectories: dict[str, dict[str, Any]], reward: str, answer: str
) -> tuple[Path, dict[str, Any] | None]:
    info = source.info
    digest = hashlib.sha256(f"{reward} {answer}".encode()).hexdigest()[:6]
    runs_dir, run_id = source.run_dir.parent, f"{source.run_id}-rescored-{digest}"
    columns = {level: source.read(level) for level in ("calls", "transcripts")}
    parent = {"run": source.run_id, "step": max(steps)}
    sets = (info.get("extra") or {}).get("sets") or {}
    extra = {"rescored": {"reward": reward, "answer": answer}} | ({"sets": sets} if sets else {})
    with RunWriter.open(
        runs_dir,
        run_id,
        kind=info["kind"],
        recipe=info["recipe"].for_display(),
        seed=info.get("seed") or 0,
        parent=parent,
        extra=extra,
    ) as writer:
        writer.cut(-1)
        if (vocabulary := source.vocabulary()) is not None:
            writer.write_vocabulary(vocabulary)
        for step, stage in steps.items():
            rows = {"trajectories": [row for row in trajectories.values() if row["step"] == step]}
            for level, table in columns.items():
                rows[level] = table.filter(pc.equal(table["step"], step)).to_pylist()
            mean = sum(row["reward"] for row in rows["trajectories"]) / max(1, len(rows["trajectories"]))
            writer.write_step(stage, step, **rows, metrics={"rollouts": len(rows["trajectories"]), "reward": mean})
        scored = list(trajectories.values())
        result = summarise_usable(scored) | summarise_sets(scored, sets) if info["kind"] == "evaluate" else None
        writer.finish("finished", result=result)
    return runs_dir / run_id, result
