"""A folder of runs with every value that a viewer may get wrong: long and right-to-left texts, emoji, numbers as words, rollouts
without a reward, own tools, stages, evaluations, forks and 50,000 rollouts in one run."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from helpers.inspector_runs import write_run
from helpers.run_rows import trajectory_row
from rstar_lab.analysis import import_messages
from rstar_lab.runs import RunWriter

LONG_QUESTION = ("How many of the numbers from 1 to 514 are even? " * 70)[:3000]
QUESTIONS = (
    LONG_QUESTION, "ما هو مجموع ٣ و ٥؟", "🧮🎉 3 + 4 = ?", "514", "true", "NaN", "", "x" * 400, "a\tb\n\n\nc", "<b>1 & 2</b>",
)  # fmt: skip
ANSWERS = ("514", "3", "nan", "1e5", "שלום", "🎉", "", "-0", "x" * 300, None)
TRANSCRIPT = 200_000  # characters of the longest one
ROWS, STEPS = 50_000, 5


def row(traj_id: str, number: int, size: int, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trajectory and the transcript of rollout `number`; groups have `size` rollouts."""
    question, answer = QUESTIONS[number // size % len(QUESTIONS)], ANSWERS[number % len(ANSWERS)]
    reward = [1.0, 0.0, 0.5, -1.0][number % 4]
    trajectory = trajectory_row(traj_id, **{
        "policy_version": 1, "group_id": f"g{number // size}", "problem_id": f"p{number // size % 500}", "sample": number % size,
        "reward": reward, "kept": number % 2 == 0, "advantage": 0.0 if number % 2 == 0 else None, "turns": 1 + number % 3,
        "calls": number % 4, "errors": number % 2, "outcomes": ["ok", "exception", "sandbox_error"][: number % 4],
        "response_tokens": number % 20_000, "truncated": number % 7 == 0, "answer": answer, "truth": "514", "generate_s": 0.0,
    } | changes)  # fmt: skip
    call = json.dumps({"name": "query", "arguments": {"sql": "SELECT 1", "limit": 3}})
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": "514\n", "tool": "query", "outcome": "ok"},
        {"role": "assistant", "content": f"so the answer is <answer>\\boxed{{{answer}}}</answer>"},
    ]
    if number == 1:
        messages[2]["content"] = "3 so i the 514 " * (TRANSCRIPT // 15)
        messages[3]["content"] = "word" * (TRANSCRIPT // 4)  # one line
    text = json.dumps(messages, ensure_ascii=False)
    return trajectory, {"traj_id": traj_id, "question": question, "truth": "514", "messages": text}


def write_rows(
    folder: Path,
    run_id: str,
    rows: int,
    *,
    kind: str = "train",
    stages: tuple[str, ...] = ("one", "two"),
    steps: int = STEPS,
    **changes: Any,
) -> None:
    """Write a run with `rows` rollouts. changes: columns that all rollouts share."""
    recipe = {"rl": {"method": {"roc": {"rule": "paper"}}}}
    with RunWriter.open(folder, run_id, kind=kind, recipe=recipe, seed=0) as writer:
        for step in range(1, steps + 1):
            made = [row(f"{run_id}/{step}/{i}", i, 8, **changes) for i in range(rows // steps)]
            stage = stages[(step - 1) * len(stages) // steps]
            levels = {"trajectories": [first for first, _ in made], "transcripts": [second for _, second in made]}
            rewards = [first["reward"] for first, _ in made if first["reward"] is not None]
            metrics = {"reward": float(np.mean(rewards)) if rewards else None}
            writer.write_step(stage, step, **levels, calls=[], metrics=metrics)
        writer.finish("finished")


def make_awkward_runs(folder: Path, rows: int = ROWS) -> Path:
    """Write the runs and return the folder."""
    write_run(folder, "with_tokens")
    write_rows(folder, "big-rl", rows)
    write_rows(folder, "small-rl", 80)
    write_rows(folder, "small-eval", 80, kind="evaluate", stages=("evaluate",), kept=False, advantage=None)
    write_rows(folder, "small-rl-fork-1", 40, kind="fork", stages=("fork",), kept=False, advantage=None)
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": str(answer)}]}
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    import_messages(file, folder, run_id="imported")
    file.unlink()
    return folder
