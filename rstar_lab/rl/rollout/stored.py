"""Conversion of rows of the run store back to trajectories."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rstar_lab.outcomes import Outcome
from rstar_lab.rl.renderers.turns import is_void_turn
from rstar_lab.rl.rollout.agent_loop import make_trajectory
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Trajectory, Turn
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.messages import read_messages
from rstar_lab.runs.reader import RunReader, read_steps
from rstar_lab.tool_calls import parse_stored_calls
from rstar_lab.verify import AnswerFormat


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
    answer_format = reader.info["recipe"].get("rl", {}).get("answer", "tagged")
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
