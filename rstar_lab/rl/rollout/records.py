"""Conversion of trajectories to rows of the run store, and back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.renderers.base import is_void_turn
from rstar_lab.rl.rollout.agent_loop import make_trajectory
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Trajectory, Turn
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.messages import read_messages
from rstar_lab.runs.reader import RunReader, read_steps
from rstar_lab.runs.reflection_words import count_reflection_words
from rstar_lab.tool_calls import parse_stored_calls
from rstar_lab.verify import AnswerFormat


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


def read_trajectories(reader: RunReader, step: int) -> tuple[list[Trajectory], dict[str, float]]:
    """Return the trajectories of a step in the stored order, and the advantages of those that were trained on, by traj_id.

    A trajectory whose token arrays are not stored (recipe key `rl.token_arrays`) has response_ids of the right length that
    are all -1. Log-probs are stored in half precision. Raises RunStoreError if the run has no such step.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for level in ("trajectories", "transcripts", "calls"):
        file = next((file for file in reader.files(level) if step in file.steps), None)
        if file is None and level == "calls":  # no rollout of the step called a tool
            tables[level] = []
            continue
        if file is None:
            raise RunStoreError(f"run {reader.run_id} has no {level} of step {step}")
        names = _COLUMNS[level]
        table = read_steps(file, [*names, "step"])
        tables[level] = table.filter(pc.equal(table["step"], step)).to_pylist()
    transcripts = {row["traj_id"]: row for row in tables["transcripts"]}
    calls: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(tables["calls"], key=lambda row: (row["turn"], row["index"])):
        calls.setdefault(row["traj_id"], []).append(row)
    rows = tables["trajectories"]
    if missing := [row["traj_id"] for row in rows if row["traj_id"] not in transcripts]:
        raise RunStoreError(f"trajectory {missing[0]} of run {reader.run_id} has no transcript")
    answer_format = reader.info["recipe"].get("rl.answer", "tagged")
    trajectories = [
        stored_trajectory(row, transcripts[row["traj_id"]], calls.get(row["traj_id"], ()), answer_format)
        for row in rows
    ]
    return trajectories, {row["traj_id"]: row["advantage"] for row in rows if row["kept"]}


def stored_trajectory(
    row: dict[str, Any],
    transcript: dict[str, Any],
    calls: Sequence[dict[str, Any]],
    answer_format: AnswerFormat = "tagged",
) -> Trajectory:
    """Return the trajectory of a row of `trajectories`, its row of `transcripts` and its rows of `calls`.

    answer_format: recipe key `rl.answer`, which decides whether a turn is void. The penalties are computed again, because
    they are stored in single precision.
    """
    messages = read_messages(transcript["messages"])
    ids, mask, log_probs, prompt_ids = _arrays(row, transcript)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, dtype=int), [0]])))
    spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    model_turns = [message for message in messages if message["role"] == "assistant"]
    if len(spans) != len(model_turns):  # no arrays, or an empty turn
        spans = [(0, 0)] * len(model_turns)
    void = [is_void_turn(text, parse_stored_calls(text), answer_format) for text in (m["content"] for m in model_turns)]
    turns = tuple(
        Turn(
            start,
            end,
            message["content"],
            message.get("generate_s", 0.0),
            0.0,
            0.0,
            void=is_void,
            control_token=message.get("control_token", False),
        )
        for (start, end), message, is_void in zip(spans, model_turns, void, strict=True)
    )
    rebuilt = make_trajectory(
        turns, _calls(messages, calls),
        traj_id=row["traj_id"], problem_id=row["problem_id"], group_id=row["group_id"], sample=row["sample"],
        question=transcript["question"], truth=transcript["truth"], prompt_ids=prompt_ids, response_ids=ids,
        loss_mask=mask, log_probs=log_probs,
        stop_reason=StopReason(row["stop_reason"]), reward=row["reward"], engine=row["engine"] or "",
        policy_version=row["policy_version"] or 0, environment=row.get("environment") or "",
    )  # fmt: skip
    return replace(rebuilt, answer=row["answer"])


def has_tokens(trajectory: Trajectory) -> bool:
    """Return whether the token arrays of a stored trajectory were stored."""
    return bool(trajectory.prompt_ids)


def _arrays(row: dict[str, Any], transcript: dict[str, Any]) -> tuple[list[int], list[bool], list[float], list[int]]:
    if transcript["response_ids"] is None:
        size, model_tokens = row["response_tokens"], row["model_tokens"]
        return [-1] * size, [index < model_tokens for index in range(size)], [0.0] * size, []
    log_probs = [float(value) for value in transcript["engine_log_probs"]]
    return list(transcript["response_ids"]), list(transcript["loss_mask"]), log_probs, list(transcript["prompt_ids"])


def _calls(messages: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> tuple[ToolCallRecord, ...]:
    """Return the calls of the rows, with the code and response from the messages, which have the same order."""
    responses = iter([message["content"] for message in messages if message["role"] == "tool"])
    parsed = [parse_stored_calls(message["content"]) for message in messages if message["role"] == "assistant"]
    records = []
    for row in rows:
        turn, index = row["turn"], row["index"]
        its_calls = parsed[turn] if turn < len(parsed) else []
        arguments = its_calls[index].arguments if index < len(its_calls) else None
        code = str(arguments.get("code", "")) if isinstance(arguments, dict) else ""
        records.append(
            ToolCallRecord(
                turn, index, row["tool"], code, Outcome(row["outcome"]), next(responses, ""), row["queue_s"] or 0.0,
                row["run_s"] or 0.0, row["position"] or 0,
            )
        )  # fmt: skip
    return tuple(records)


_COLUMNS = {
    "trajectories": [
        "traj_id", "problem_id", "group_id", "sample", "reward", "kept", "advantage", "response_tokens", "model_tokens",
        "stop_reason", "answer", "engine", "policy_version", "environment",
    ],
    "transcripts": ["traj_id", "question", "truth", "messages", "prompt_ids", "response_ids", "loss_mask", "engine_log_probs"],
    "calls": ["traj_id", "turn", "index", "tool", "outcome", "queue_s", "run_s", "position"],
}  # fmt: skip
