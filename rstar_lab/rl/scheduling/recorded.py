"""Converts a recorded step to scripted rollouts, so that the simulator can compare dispatch policies on it."""

from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from rstar_lab.rl.scheduling.simulator import ScriptedRollout, ScriptedTurn
from rstar_lab.runs import RunReader, RunStoreError


def recorded_rollouts(run_dir: str | Path, step: int) -> list[ScriptedRollout]:
    """Return the rollouts of one committed step of a run, in stored order.

    A turn is a sequence of consecutive model tokens in the loss mask. The tool time of a turn is that of its slowest
    call, including queueing. If the run has no token arrays, the tokens are split evenly over the turns, and the prompt
    is assumed to have 300 tokens. Raises RunStoreError if the run has no such step.
    """
    reader = RunReader(run_dir)
    if step not in reader.steps():
        raise RunStoreError(f"step: run {reader.run_id} has no committed step {step}; it has {list(reader.steps())}")

    def rows(level: str, columns: list[str]) -> list[dict[str, Any]]:
        table = reader.read(level, ["step", "traj_id", *columns])
        return table.filter(pc.equal(table["step"], step)).to_pylist()

    tools: dict[tuple[str, int], float] = defaultdict(float)
    for call in rows("calls", ["turn", "queue_s", "run_s"]):
        key = call["traj_id"], call["turn"]
        tools[key] = max(tools[key], (call["queue_s"] or 0.0) + (call["run_s"] or 0.0))
    tokens = {row["traj_id"]: row for row in rows("transcripts", ["prompt_ids", "loss_mask"])}
    rollouts: list[ScriptedRollout] = []
    for row in rows("trajectories", ["problem_id", "turns", "model_tokens", "response_tokens"]):
        recorded = tokens.get(row["traj_id"], {})
        tokens_of_turns = _turn_tokens(recorded.get("loss_mask")) or _even_turn_tokens(row)
        steps = tuple(
            ScriptedTurn(generated, tools[row["traj_id"], turn], tool_tokens)
            for turn, (generated, tool_tokens) in enumerate(tokens_of_turns)
        )
        prompt = len(recorded["prompt_ids"]) if recorded.get("prompt_ids") else 300
        rollouts.append(ScriptedRollout(len(rollouts), row["problem_id"], prompt, steps))
    return rollouts


def _turn_tokens(loss_mask: list[bool] | None) -> list[tuple[int, int]]:
    """Return (model tokens, tool tokens) of each turn."""
    turns: list[tuple[int, int]] = []
    for by_model, tokens in groupby(loss_mask or []):
        count = len(list(tokens))
        if by_model:
            turns.append((count, 0))
        elif turns:
            turns[-1] = (turns[-1][0], count)
    return turns


def _even_turn_tokens(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (model tokens, tool tokens) of each turn, split evenly over the turns."""
    turns = max(row["turns"], 1)
    tool_tokens = row["response_tokens"] - row["model_tokens"]
    return [(max(row["model_tokens"] // turns, 1), tool_tokens // turns)] * turns
