"""Conversion of trajectories to rows of the run store."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.reflection_words import count_reflection_words


@dataclass(frozen=True, slots=True)
class TrainingLabels:
    """What training adds to a trajectory.

    kept: whether it was trained on. trainer_log_probs, entropy: (response length,), NaN where the loss mask is False;
    entropy in nats. None: not computed.
    """

    kept: bool
    advantage: float | None = None
    trainer_log_probs: Sequence[float] | None = None
    entropy: Sequence[float] | None = None


NOT_KEPT = TrainingLabels(kept=False)


def step_rows(
    trajectories: Sequence[Trajectory],
    labels: Mapping[str, TrainingLabels],
    token_arrays: Literal["all", "kept", "sampled"],
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a step by table: trajectories, calls, transcripts.

    labels: labels of the kept trajectories, by traj_id. token_arrays: which transcripts include token arrays;
    `sampled`: those of the first sample of each group.
    """
    rows: dict[str, list[dict[str, Any]]] = {"trajectories": [], "calls": [], "transcripts": []}
    for trajectory in trajectories:
        own_labels = labels.get(trajectory.traj_id, NOT_KEPT)
        arrays = {"all": True, "kept": own_labels.kept, "sampled": trajectory.sample == 0}[token_arrays]
        rows["trajectories"].append(trajectory_row(trajectory, own_labels))
        rows["calls"] += call_rows(trajectory)
        rows["transcripts"].append(transcript_row(trajectory, own_labels, arrays=arrays))
    return rows


# Columns of `trajectories` that are attributes of a trajectory.
_COPIED = (
    "traj_id", "policy_version", "group_id", "problem_id", "sample", "reward", "p_err", "p_format", "model_tokens", "truncated",
    "answer", "truth", "engine",
)  # fmt: skip


def trajectory_row(trajectory: Trajectory, labels: TrainingLabels) -> dict[str, Any]:
    """Return the row of a trajectory in the table `trajectories`."""
    errors, calls = trajectory.errors_and_calls
    turns = trajectory.turns
    return {name: getattr(trajectory, name) for name in _COPIED} | {
        "kept": labels.kept,
        "advantage": labels.advantage,
        "turns": len(turns),
        "calls": calls,
        "errors": errors,
        "outcomes": [str(call.outcome) for call in trajectory.calls],
        "response_tokens": len(trajectory.response_ids),
        "stop_reason": str(trajectory.stop_reason),
        "reflection_tokens": count_reflection_words(trajectory.text),
        "entropy": mean_over(labels.entropy, trajectory.loss_mask),
        "engine_log_prob": mean_over(trajectory.log_probs, trajectory.loss_mask),
        "trainer_log_prob": mean_over(labels.trainer_log_probs, trajectory.loss_mask),
        "generate_s": sum(turn.generate_s for turn in turns),
        "tool_s": sum(turn.tool_s for turn in turns),
        "queue_s": sum(turn.queue_s for turn in turns),
        "environment": trajectory.environment or None,
        "metrics": dict(trajectory.metrics) or None,
    }


def call_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the rows of a trajectory's tool calls in the table `calls`."""
    return [
        {
            "traj_id": trajectory.traj_id,
            "outcome": str(call.outcome),
            "code_hash": hashlib.blake2b(call.code.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
            **{name: getattr(call, name) for name in ("turn", "index", "tool", "queue_s", "run_s", "position")},
        }
        for call in trajectory.calls
    ]


def messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the conversation as messages: the question, then turns of the model, tool responses, and texts of the
    environment (role user). If the environment failed, the last message has the role environment.

    A turn of the model has `generate_s`; `reward`, if the environment gave it one; and `control_token: true`, if the
    model wrote a misplaced control token. If several policy versions generated the rollout, a turn also has
    `policy_versions`: [version, tokens] of its parts, in order.
    """
    conversation: list[dict[str, Any]] = [{"role": "user", "content": trajectory.question}]
    mixed = len({version for turn in trajectory.turns for version, _ in turn.versions}) > 1
    for number, turn in enumerate(trajectory.turns):
        message = {"role": "assistant", "content": turn.text, "generate_s": round(turn.generate_s, 4)}
        conversation.append(message)
        if mixed:
            message["policy_versions"] = [list(part) for part in turn.versions]
        conversation += [
            {"role": "tool", "content": call.response, "tool": call.tool, "outcome": str(call.outcome)}
            for call in trajectory.calls
            if call.turn == number
        ]
        if turn.control_token:
            message["control_token"] = True
        if turn.reward is not None:
            message["reward"] = turn.reward
        if turn.observation:
            conversation.append({"role": "user", "content": turn.observation})
    if trajectory.error:
        conversation.append({"role": "environment", "content": trajectory.error})
    return conversation


def transcript_row(trajectory: Trajectory, labels: TrainingLabels, *, arrays: bool) -> dict[str, Any]:
    """Return the row of a trajectory in the table `transcripts`. arrays: include token ids, mask, log-probs and entropy."""
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


def mean_over(values: Sequence[float] | np.ndarray | None, mask: Sequence[bool] | np.ndarray) -> float | None:
    """Return the mean of the values where the mask is True, without NaN; None if there is none."""
    if values is None:
        return None
    chosen = np.asarray(values, dtype=np.float64)[np.asarray(mask, dtype=bool)]
    chosen = chosen[~np.isnan(chosen)]
    return float(chosen.mean()) if len(chosen) else None
