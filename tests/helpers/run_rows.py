"""Rows of all levels for `RunWriter.write_step`."""

from typing import Any

import numpy as np


def trajectory_row(traj_id: str, **columns: Any) -> dict[str, Any]:
    """Return a row of `trajectories`. columns: what differs from a kept rollout that answered without a call."""
    return {
        "traj_id": traj_id, "policy_version": 0, "group_id": "g", "problem_id": "p", "sample": 0, "reward": 0.0, "kept": True,
        "p_err": 0.0, "p_format": 0.0, "advantage": None, "turns": 1, "calls": 0, "errors": 0, "outcomes": [],
        "response_tokens": 1, "model_tokens": 1, "truncated": False, "stop_reason": "answer", "answer": "7", "truth": "7",
        "reflection_tokens": 0, "entropy": None, "engine_log_prob": None, "trainer_log_prob": None, "generate_s": 1.0,
        "tool_s": 0.0, "queue_s": 0.0, "engine": "0",
    } | columns  # fmt: skip


def call_row(traj_id: str, turn: int, outcome: str, **columns: Any) -> dict[str, Any]:
    """Return a row of `calls`."""
    return {
        "traj_id": traj_id, "turn": turn, "index": 0, "tool": "python", "outcome": outcome, "code_hash": "h", "queue_s": 0.0,
        "run_s": 0.25, "position": 4,
    } | columns  # fmt: skip


def rows(step: int, groups: int = 2, size: int = 4, tokens: int = 12) -> dict:
    """Return the trajectories, calls and transcripts of a step. Every third rollout is dropped."""
    rng = np.random.default_rng(step)
    trajectories, calls, transcripts = [], [], []
    for number in range(groups * size):
        traj_id = f"r/{step:06d}/{number:04d}"
        kept = number % 3 != 0
        outcomes = ["ok", "exception", "sandbox_error"][: number % 4]
        trajectories.append(trajectory_row(
            traj_id, policy_version=step, group_id=f"g{number // size}", sample=number % size, problem_id=f"p{number // size}",
            reward=float(number % 2), kept=kept, p_err=0.5, advantage=1.0 if kept else None, turns=2, calls=len(outcomes),
            errors=outcomes.count("exception"), outcomes=outcomes, response_tokens=tokens, model_tokens=tokens - 4,
            reflection_tokens=1, entropy=0.5 if kept else None, engine_log_prob=-0.5, trainer_log_prob=-0.5 if kept else None,
            tool_s=0.25, environment="sql", metrics=[("rows", float(number))],
        ))  # fmt: skip
        calls += [call_row(traj_id, 0, outcome, index=i) for i, outcome in enumerate(outcomes)]
        arrays = dict.fromkeys(("engine_log_probs", "trainer_log_probs", "entropy"), rng.normal(size=tokens))
        transcripts.append({
            "traj_id": traj_id, "question": "1+6?", "truth": "7", "messages": '[{"role": "user", "content": "1+6?"}]',
            "prompt_ids": [1, 2], "response_ids": list(range(tokens)), "loss_mask": [True] * (tokens - 4) + [False] * 4,
            **(arrays if kept else {"engine_log_probs": arrays["entropy"]}),
        })  # fmt: skip
    return {"trajectories": trajectories, "calls": calls, "transcripts": transcripts}
