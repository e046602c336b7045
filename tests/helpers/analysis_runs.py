"""Synthetic runs for the tests of analysis, written by the real writer: a policy that learns, with and without RoC."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from helpers.run_rows import call_row, trajectory_row
from rstar_lab.rl.algorithm.roc import resample, tool_error_penalty
from rstar_lab.runs import RunWriter

WORDS = [
    "Wait", "I", "should", "double-check", "the", "result", "is", "42", "so", "x", "=", "7", "because", "sum", "range", "print",
    "but", "maybe", "13", "error", "fix", "ok", "done",
]  # fmt: skip
TOOL = "execute_python_code_with_standard_io"
VOCABULARY = [f" {word}" for word in WORDS] + ["\n", "```"]
OUTCOMES = ("exception", "timeout", "syntax_error", "malformed_call", "queue_timeout")


def make_run(
    runs_dir: Path,
    run_id: str,
    *,
    steps: int = 6,
    problems: int = 4,
    size: int = 8,
    roc: str = "paper",
    seed: int = 0,
    skill: float = 0.3,
    tokens: int = 24,
    finish: bool = True,
    extra_metrics: dict[str, float] | None = None,
    label: str = "",
) -> Path:
    """Write a run of `steps` steps in two stages. With `roc="none"` all rollouts are kept and errors fall more slowly."""
    rng = np.random.default_rng(seed)
    method = {"method": {"roc": {"rule": roc}}, "group_size": size // 2}
    recipe = {"model": "tiny", "label": label, "seed": seed, "rl": method}
    with RunWriter.open(runs_dir, run_id, kind="train", recipe=recipe, seed=seed) as writer:
        writer.write_vocabulary(VOCABULARY)
        for step in range(1, steps + 1):
            progress = step / steps
            error_rate = 0.4 * (1 - progress * (0.9 if roc != "none" else 0.3))
            step_rows: dict[str, list[dict[str, Any]]] = {"trajectories": [], "calls": [], "transcripts": []}
            for problem in range(problems):
                passing = min(0.95, skill + 0.5 * progress - 0.1 * (problem % 3))
                group = [
                    rollout(rng, run_id, step, problem, sample, passing, error_rate, tokens) for sample in range(size)
                ]
                rows = [trajectory for trajectory, _, _ in group]
                keep = size // 2 if roc != "none" else size
                rule = roc if roc != "none" else "paper"
                penalties = [row["p_err"] + row["p_format"] for row in rows]
                kept = set(resample([row["reward"] for row in rows], penalties, keep, rule=rule, rng=rng))
                rewards = [rows[index]["reward"] for index in kept]
                flat = min(rewards) == max(rewards)
                for index, (trajectory, calls, transcript) in enumerate(group):
                    trajectory["kept"] = index in kept and not flat
                    if trajectory["kept"]:
                        trajectory["advantage"] = float(
                            (trajectory["reward"] - np.mean(rewards)) / (np.std(rewards) + 1e-6)
                        )
                    else:
                        trajectory |= {"entropy": None, "trainer_log_prob": None}
                        transcript |= {"entropy": None, "trainer_log_probs": None}
                    step_rows["trajectories"].append(trajectory)
                    step_rows["calls"] += calls
                    step_rows["transcripts"].append(transcript)
            names = ("generate_s", "tool_s", "verify_s", "log_probs_s", "update_s", "wait_s")
            seconds = dict(zip(names, (2.0, 0.5, 0.1, 0.3, 1.0, 0.1), strict=True))
            metrics = {"step_s": sum(seconds.values()), **seconds, "loss": 1 - progress, **(extra_metrics or {})}
            writer.write_step("one" if step <= steps // 2 else "two", step, **step_rows, metrics=metrics)
        if finish:
            writer.finish("finished", result={})
    return Path(runs_dir) / run_id


def rollout(
    rng: np.random.Generator,
    run_id: str,
    step: int,
    problem: int,
    sample: int,
    passing: float,
    error_rate: float,
    tokens: int,
) -> tuple[dict, list[dict], dict]:
    correct = bool(rng.random() < passing)
    calls = int(rng.integers(0, 4))
    outcomes = ["ok" if rng.random() > error_rate else str(rng.choice(OUTCOMES)) for _ in range(calls)]
    judged = [outcome for outcome in outcomes if outcome != "queue_timeout"]
    errors = sum(outcome != "ok" for outcome in judged)
    traj_id = f"{run_id}/{step:06d}/{problem}/{sample}"
    size = tokens * (calls + 1)
    mask = np.tile(np.arange(tokens) < tokens - 6, calls + 1)
    mask[-6:] = True  # the last turn has no tool response
    ids = rng.integers(0, len(VOCABULARY), size)
    entropy = rng.exponential(0.3, size)
    engine = -rng.exponential(0.4, size)
    trainer = engine + rng.normal(0, 0.01, size)
    answers = 1 + int(rng.random() < 0.2)
    messages = [{"role": "user", "content": f"What is {problem} + {problem}?"}]
    for turn, outcome in enumerate(outcomes):
        code = f"print({problem} + {problem})  # {turn} {int(rng.integers(0, 3))}"
        call = json.dumps({"name": TOOL, "arguments": {"code": code, "input": ""}})
        messages.append({"role": "assistant", "content": f"Let me check.\n<tool_call>{call}</tool_call>"})
        messages.append({"role": "tool", "content": outcome, "tool": TOOL, "outcome": outcome})
    answer = str(2 * problem if correct else 2 * problem + 1)
    messages.append({"role": "assistant", "content": f"<answer>\\boxed{{{answer}}}</answer>"})
    trajectory = trajectory_row(
        traj_id, policy_version=step - 1, group_id=f"{step}/{problem}", problem_id=f"p{problem}", sample=sample,
        reward=float(correct), p_err=tool_error_penalty(errors, len(judged)), p_format=min(1.0, (answers - 1) / (calls + 1)),
        turns=calls + 1, calls=len(judged), errors=errors, outcomes=outcomes, response_tokens=size, model_tokens=int(mask.sum()),
        truncated=bool(rng.random() < 0.05), answer=answer, truth=str(2 * problem), reflection_tokens=int(rng.poisson(1 + step / 4)),
        entropy=float(entropy[mask].mean()), engine_log_prob=float(engine[mask].mean()),
        trainer_log_prob=float(trainer[mask].mean()), generate_s=float(rng.gamma(2, 0.5)), tool_s=0.1 * calls,
        queue_s=0.01 * calls, engine=str(sample % 2),
    )  # fmt: skip
    call_rows = [
        call_row(traj_id, turn, outcome, tool=TOOL, code_hash=f"h{problem}{turn}", queue_s=0.01, run_s=0.1,
                 position=tokens * (turn + 1) - 6)
        for turn, outcome in enumerate(outcomes)
    ]  # fmt: skip
    transcript = {
        "traj_id": traj_id, "question": messages[0]["content"], "truth": trajectory["truth"], "messages": json.dumps(messages),
        "prompt_ids": [0, 1], "response_ids": ids, "loss_mask": mask, "engine_log_probs": engine, "trainer_log_probs": trainer,
        "entropy": entropy,
    }  # fmt: skip
    return trajectory, call_rows, transcript
