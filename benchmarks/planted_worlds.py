"""Generated rollouts and metrics of a policy that learns to add numbers, and the files that other tools write of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SYLLABLES = ["ka", "lo", "mi", "ter", "sun", "ve", "ra", "do", "pel", "gri", "on", "ta", "be", "sil", "mor"]
WORDS = [a + b for a in SYLLABLES for b in SYLLABLES]
STEPS, PROBLEMS, GROUP = 12, 6, 8


@dataclass
class World:
    """Rollouts and metrics of a run before they are written. rng: for faults."""

    rows: Any  # a data frame
    steps: Any
    rng: np.random.Generator

    def some(self, share: float, where: Any = True) -> Any:
        """Return a random share of the rollouts, as a Boolean column."""
        return pd.Series(self.rng.random(len(self.rows)) < share, self.rows.index) & where


def honest_world(seed: int, steps: int = STEPS, rate: float = 0.35) -> World:
    """Return a run that learns. rate: share of right answers at the start."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        for problem in range(PROBLEMS):
            a, b = (int(number) for number in rng.integers(100, 999, 2))
            own = np.clip(rng.beta(2, 2) + rate - 0.5 + 0.03 * step, 0.03, 0.97)
            for sample in range(GROUP):
                right = bool(rng.random() < own)
                answer = a + b + (0 if right else int(rng.integers(1, 30)))
                words = " ".join(rng.choice(WORDS, int(rng.integers(40, 60))))
                rows.append((step, f"{step}-{problem}", sample, f"Compute {a} plus {b}.", str(a + b), str(answer), right,
                             f"{words} {a} and {b} {' '.join(rng.choice(WORDS, 5))}"))  # fmt: skip
    columns = ["step", "group", "sample", "question", "truth", "answer", "right", "words"]
    table = pd.DataFrame(rows, columns=columns).assign(truncated=False, tools=None, advantage=np.nan, text=None)
    table["reward"] = table.right.astype(float)
    metrics = {name: value * (1 + 0.05 * rng.standard_normal(steps)) for name, value in
               {"entropy": 0.8, "grad_norm": 0.5, "length": 300.0, "step_s": 40.0}.items()}  # fmt: skip
    numbers = np.arange(1, steps + 1)
    frame = pd.DataFrame(
        {"step": numbers, "lr": 1e-6, "reward": table.groupby("step").reward.mean().to_numpy(), **metrics}
    )
    return World(table, frame, rng)


def finished(world: World, form: str = "so \\boxed{{{}}}") -> Any:
    """Return the rollouts with their texts and with group advantages, where no fault has set them."""
    rows = world.rows
    texts = rows.words + " " + rows.answer.map(form.format)
    rows = rows.assign(text=rows.text.where(rows.text.notna(), texts))
    by = rows.groupby("group").reward
    own = (rows.reward - by.transform("mean")) / (by.transform("std") + 1e-4)
    return rows.assign(advantage=rows.advantage.where(rows.advantage.notna(), own))


# Formats


def lines(file: Path, rows: list[dict[str, Any]], start: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(start + "".join(json.dumps(row) + "\n" for row in rows))


def verl(world: World, folder: Path, form: str = "so \\boxed{{{}}}", more: tuple[str, ...] = ()) -> None:
    """Write rollout_data_dir and the metrics of verl. more: further columns of the rollouts."""
    for step, own in finished(world, form).groupby("step"):
        lines(folder / "rollouts" / f"{step}.jsonl", [
            {"input": f"user\n{r.question}\nassistant\n", "output": r.text, "gts": r.truth, "score": r.reward, "step": int(step)}
            | {name: getattr(r, name) for name in more} for r in own.itertuples()
        ])  # fmt: skip
    names = {"reward": "critic/score/mean", "entropy": "actor/entropy", "grad_norm": "actor/grad_norm", "lr": "actor/lr",
             "length": "response_length/mean", "step_s": "timing_s/step"}  # fmt: skip
    metrics(world, folder / "metrics.jsonl", names, lambda step, values: {"step": step, "data": values})


def metrics(
    world: World, file: Path, names: Mapping[str, str], line: Callable[[int, dict[str, Any]], dict[str, Any]]
) -> None:
    rows = [
        {names.get(str(name), str(name)): value for name, value in row.items() if name != "step"}
        for row in world.steps.to_dict("records")
    ]
    lines(file, [line(int(step), row) for step, row in zip(world.steps.step, rows, strict=True)])


def trl(world: World, folder: Path, form: str = "so \\boxed{{{}}}", more: tuple[str, ...] = ()) -> None:
    """Write completions and trainer_state.json of TRL."""
    for step, own in finished(world, form).groupby("step"):
        table = own.assign(
            prompt=own.question, completion=own.text, accuracy_reward=own.reward.astype(float), solution=own.truth
        )
        names = ["step", "prompt", "completion", "accuracy_reward", "advantage", "solution", *more]
        (folder / "completions").mkdir(parents=True, exist_ok=True)
        table[names].to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    aliases = {"lr": "learning_rate", "length": "completions/mean_length", "step_s": "step_time"}
    history: list[dict[str, Any]] = []
    for row in world.steps.to_dict("records"):
        history.append({aliases.get(str(name), str(name)): value for name, value in row.items()})
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def prime(world: World, folder: Path, form: str = "so \\boxed{{{}}}") -> None:
    """Write the rollouts of prime-rl."""
    for step, own in finished(world, form).groupby("step"):
        lines(folder / "rollouts" / f"step_{step}" / "train_rollouts.jsonl", [
            {"example_id": r.group, "task": "sums", "prompt": [{"role": "user", "content": r.question}], "answer": r.truth,
             "completion": [{"role": "assistant", "content": r.text}], "reward": r.reward, "advantage": r.advantage,
             "is_truncated": r.truncated} for r in own.itertuples()
        ])  # fmt: skip


def verifiers(world: World, folder: Path, form: str = "so \\boxed{{{}}}") -> None:
    """Write results.jsonl of an evaluation."""
    lines(folder / "results.jsonl", [
        {"example_id": r.group, "task": "sums", "prompt": [{"role": "user", "content": r.question}], "answer": r.truth,
         "completion": [{"role": "assistant", "content": r.text}], "reward": r.reward} for r in finished(world, form).itertuples()
    ])  # fmt: skip


def openrlhf(world: World, folder: Path, form: str = "so \\boxed{{{}}}") -> None:
    """Write JSON lines of rollouts and of metrics with the names of OpenRLHF."""
    rows = finished(world, form)
    lines(folder / "samples.jsonl", [
        {"prompt": r.question, "output": r.text, "label": r.truth, "reward": r.reward, "global_step": r.step, "response_length": r.length}
        for r in rows.assign(length=rows.get("length", rows.text.str.len() // 4)).itertuples()
    ])  # fmt: skip
    board(world, folder)


def board(world: World, folder: Path) -> None:
    """Write metrics only, with the names of OpenRLHF."""
    names = {"lr": "actor_lr", "length": "response_length", "step_s": "time/step"}
    named = {
        name: names.get(name, name) if name == "step_s" else f"train/{names.get(name, name)}"
        for name in world.steps.columns
    }
    metrics(world, folder / "metrics.jsonl", named, lambda step, values: {"global_step": step} | values)


def messages(world: World, folder: Path) -> None:
    """Write conversations with a Python tool. tools: outputs of faults."""
    rows = []
    for r in finished(world, "it is {}").itertuples():
        numbers = r.question.removeprefix("Compute ").removesuffix(".").split(" plus ")
        arguments = {"command": "ls"} if "shell" in world.rows else {"code": f"print({numbers[0]} + {numbers[1]})"}
        call = {"id": "1", "function": {"name": "tool", "arguments": json.dumps(arguments)}}
        output = r.tools if r.tools is not None else r.truth
        rows.append({"messages": [
            {"role": "user", "content": r.question}, {"role": "assistant", "content": r.words, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": output}, {"role": "assistant", "content": f"so \\boxed{{{r.answer}}}"},
        ], "reward": r.reward, "step": r.step, "problem_id": r.group, "truth": r.truth})  # fmt: skip
    lines(folder / "log.jsonl", rows)
