"""Rows of all levels for `RunWriter.write_step`."""

import numpy as np


def rows(step: int, groups: int = 2, size: int = 4, tokens: int = 12) -> dict:
    """Return the trajectories, calls and transcripts of a step. Every third rollout is dropped."""
    rng = np.random.default_rng(step)
    trajectories, calls, transcripts = [], [], []
    for number in range(groups * size):
        traj_id = f"r/{step:06d}/{number:04d}"
        kept = number % 3 != 0
        outcomes = ["ok", "exception", "sandbox_error"][: number % 4]
        trajectories.append(
            {
                "traj_id": traj_id,
                "policy_version": step,
                "group_id": f"g{number // size}",
                "sample": number % size,
                "problem_id": f"p{number // size}",
                "reward": float(number % 2),
                "kept": kept,
                "p_err": 0.5,
                "p_format": 0.0,
                "advantage": 1.0 if kept else None,
                "turns": 2,
                "calls": len(outcomes),
                "errors": outcomes.count("exception"),
                "outcomes": outcomes,
                "response_tokens": tokens,
                "model_tokens": tokens - 4,
                "truncated": False,
                "stop_reason": "answer",
                "answer": "7",
                "truth": "7",
                "reflection_tokens": 1,
                "entropy": 0.5 if kept else None,
                "engine_log_prob": -0.5,
                "trainer_log_prob": -0.5 if kept else None,
                "generate_s": 1.0,
                "tool_s": 0.25,
                "queue_s": 0.0,
                "engine": "0",
                "environment": "sql",
                "metrics": [("rows", float(number))],
            }
        )
        calls += [
            {
                "traj_id": traj_id,
                "turn": 0,
                "index": i,
                "tool": "python",
                "outcome": outcome,
                "code_hash": "h",
                "queue_s": 0.0,
                "run_s": 0.25,
                "position": 4,
            }
            for i, outcome in enumerate(outcomes)
        ]
        arrays = dict.fromkeys(("engine_log_probs", "trainer_log_probs", "entropy"), rng.normal(size=tokens))
        transcripts.append(
            {
                "traj_id": traj_id,
                "question": "1+6?",
                "truth": "7",
                "messages": '[{"role": "user", "content": "1+6?"}]',
                "prompt_ids": [1, 2],
                "response_ids": list(range(tokens)),
                "loss_mask": [True] * (tokens - 4) + [False] * 4,
                **(arrays if kept else {"engine_log_probs": arrays["entropy"]}),
            }
        )
    return {"trajectories": trajectories, "calls": calls, "transcripts": transcripts}
