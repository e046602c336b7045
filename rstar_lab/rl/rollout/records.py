"""A trajectory as rows of the run store: the one place where the two meet."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.reflection_words import count_reflection_words


@dataclass(frozen=True, slots=True)
class TrainingLabels:
    """What training made of a trajectory. The arrays are over its response, NaN where the mask is False; None: not computed."""

    kept: bool
    advantage: float | None = None
    trainer_log_probs: Sequence[float] | None = None
    entropy: Sequence[float] | None = None


def trajectory_row(trajectory: Trajectory, labels: TrainingLabels) -> dict[str, Any]:
    errors, calls = trajectory.errors_and_calls
    turns = trajectory.turns
    return {
        "traj_id": trajectory.traj_id,
        "policy_version": trajectory.policy_version,
        "group_id": trajectory.group_id,
        "problem_id": trajectory.problem_id,
        "sample": trajectory.sample,
        "reward": trajectory.reward,
        "kept": labels.kept,
        "p_err": trajectory.p_err,
        "p_format": trajectory.p_format,
        "advantage": labels.advantage,
        "turns": len(turns),
        "calls": calls,
        "errors": errors,
        "outcomes": [str(call.outcome) for call in trajectory.calls],
        "response_tokens": len(trajectory.response_ids),
        "model_tokens": trajectory.model_tokens,
        "truncated": trajectory.truncated,
        "stop_reason": str(trajectory.stop_reason),
        "answer": trajectory.answer,
        "truth": trajectory.truth,
        "reflection_tokens": count_reflection_words(trajectory.text),
        "entropy": _mean(labels.entropy, trajectory.loss_mask),
        "engine_log_prob": _mean(trajectory.log_probs, trajectory.loss_mask),
        "trainer_log_prob": _mean(labels.trainer_log_probs, trajectory.loss_mask),
        "generate_s": sum(turn.generate_s for turn in turns),
        "tool_s": sum(turn.tool_s for turn in turns),
        "queue_s": sum(turn.queue_s for turn in turns),
        "engine": trajectory.engine,
    }


def call_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    return [
        {
            "traj_id": trajectory.traj_id,
            "turn": call.turn,
            "index": call.index,
            "tool": call.tool,
            "outcome": str(call.outcome),
            "code_hash": hashlib.blake2b(call.code.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
            "queue_s": call.queue_s,
            "run_s": call.run_s,
            "position": call.position,
        }
        for call in trajectory.calls
    ]


def messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The conversation to read: the question, then the model's turns and the tools' answers. `generate_s` times a turn.

    Where several policies wrote the rollout, a turn has `policy_versions`: [version, tokens] of its stretches, in order.
    """
    told: list[dict[str, Any]] = [{"role": "user", "content": trajectory.question}]
    mixed = len({version for turn in trajectory.turns for version, _ in turn.versions}) > 1
    for number, turn in enumerate(trajectory.turns):
        told.append({"role": "assistant", "content": turn.text, "generate_s": round(turn.generate_s, 4)})
        if mixed:
            told[-1]["policy_versions"] = [list(stretch) for stretch in turn.versions]
        told += [
            {"role": "tool", "content": call.response, "tool": call.tool, "outcome": str(call.outcome)}
            for call in trajectory.calls
            if call.turn == number
        ]
    return told


def transcript_row(trajectory: Trajectory, labels: TrainingLabels, *, arrays: bool) -> dict[str, Any]:
    """messages always; ids, mask and log-probs where `arrays`."""
    row: dict[str, Any] = {
        "traj_id": trajectory.traj_id,
        "question": trajectory.question,
        "truth": trajectory.truth,
        "messages": json.dumps(messages(trajectory), ensure_ascii=True),
    }
    if arrays:
        row |= {
            "prompt_ids": trajectory.prompt_ids,
            "response_ids": trajectory.response_ids,
            "loss_mask": trajectory.loss_mask,
            "engine_log_probs": np.asarray(trajectory.log_probs, dtype=np.float16),
            "trainer_log_probs": _half(labels.trainer_log_probs),
            "entropy": _half(labels.entropy),
        }
    return row


def _half(values: Sequence[float] | None) -> np.ndarray | None:
    return None if values is None else np.asarray(values, dtype=np.float16)


def _mean(values: Sequence[float] | None, mask: Sequence[bool]) -> float | None:
    if values is None or not any(mask):
        return None
    return float(np.asarray(values, dtype=np.float64)[np.asarray(mask)].mean())
