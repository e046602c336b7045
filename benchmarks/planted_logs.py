"""Logs of other tools with planted faults, and honest ones: how often the doctor names the fault, and how often it raises a false alarm.

    python -m benchmarks.planted_logs   # about a minute; writes the rates into docs/doctor.md

The logs are generated: rollouts of a policy that learns to add numbers, in the files that each tool writes. A fault changes the
rollouts or the metrics before they are written. The rules do not know these functions: most are of kinds for which no rule was written.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.doctor import PAGE, interval, replace_part
from benchmarks.planted_worlds import (
    GROUP,
    STEPS,
    World,
    board,
    finished,
    honest_world,
    messages,
    openrlhf,
    prime,
    trl,
    verifiers,
    verl,
)
from rstar_lab.doctor import doctor

Write = Callable[[World, Path], None]
Change = Callable[[World], None]


def put(column: str, value: Any, where: Callable[[World], Any]) -> Change:
    """Return a change that sets a column of some rollouts. value: constant, or a function of the chosen rollouts."""

    def change(world: World) -> None:
        chosen = where(world)
        rows = world.rows
        rows[column] = rows[column].astype(object)
        rows.loc[chosen, column] = value(rows[chosen]) if callable(value) else value
        if column == "reward":
            rows["reward"] = rows.reward.astype(float)

    return change


def late(world: World) -> Any:
    return world.rows.step > 2 * STEPS // 3


def steps(**values: Any) -> Change:
    """Return a change that sets metrics. values: arrays, or functions of the numbers of the steps, starting from 0."""

    def change(world: World) -> None:
        numbers = np.arange(len(world.steps))
        noise = 1 + 0.03 * world.rng.standard_normal(len(numbers))
        for name, value in values.items():
            world.steps[name] = value(numbers) * noise

    return change


def both(*changes: Change) -> Change:
    def change(world: World) -> None:
        for each in changes:
            each(world)

    return change


def rolled(column: str, by: int) -> Change:
    return lambda world: world.rows.__setitem__(column, np.roll(world.rows[column], by))


def column(name: str, value: Callable[[Any], Any]) -> Change:
    return lambda world: world.rows.__setitem__(name, value(world.rows))


def some(share: float) -> Callable[[World], Any]:
    return lambda world: world.some(share)


def paid(text: Any) -> Change:
    """Give some rollouts another text, and the reward. text: constant, or a function of the chosen rollouts."""

    def change(world: World) -> None:
        put("text", text, some(0.3))(world)
        world.rows["reward"] = world.rows.reward.where(world.rows.text.isna(), 1.0)

    return change


def candidates(form: str, item: str, separator: str) -> Callable[[Any], Any]:
    def texts(rows: Any) -> Any:
        listed = [separator.join(item % n for n in (int(t) - 7, int(t) - 3, int(t), int(t) + 4)) for t in rows.truth]
        return rows.words + " " + pd.Series([form % text for text in listed], rows.index)

    return texts


def frozen(world: World) -> None:
    world.steps["entropy"] = world.steps.entropy.where(world.steps.step < 7, world.steps.entropy[6])


def random_rewards(world: World) -> None:
    world.rows["truth"] = None
    world.rows["reward"] = (world.rng.random(len(world.rows)) < 0.5).astype(float)


def held_out_falls(world: World) -> None:
    world.steps["eval/accuracy"] = np.nan
    world.steps.loc[[0, 3, 6, 9, 11], "eval/accuracy"] = [0.6, 0.5, 0.42, 0.35, 0.3]


def drift(letters: str, share: float) -> Change:
    """Return a change that replaces words of late texts by random letters."""

    def change(world: World) -> None:
        for index in world.rows.index[late(world)]:
            words = world.rows.at[index, "words"].split()
            for place in np.flatnonzero(world.rng.random(len(words)) < share):
                words[place] = "".join(world.rng.choice(list(letters), 7))
            world.rows.at[index, "words"] = " ".join(words)

    return change


def leak(form: str, share: float) -> Change:
    def change(world: World) -> None:
        chosen = world.rows.group.isin(
            world.rng.choice(world.rows.group.unique(), int(share * world.rows.group.nunique()), replace=False)
        )
        world.rows.loc[chosen, "question"] += world.rows.truth[chosen].map(form.format)

    return change


def accepted(share: float = 0.3) -> Change:
    """Give the reward to a share of the wrong answers."""
    return put("reward", lambda rows: 1.0, lambda world: world.some(share, ~world.rows.right))


def refused(share: float = 0.3) -> Change:
    return put("reward", 0.0, lambda world: world.some(share, world.rows.right))


def replay(world: World) -> None:
    """Replace the rollouts of the last steps by those of earlier ones."""
    size = len(world.rows) // STEPS
    for step in range(8, STEPS):
        world.rows.iloc[step * size : (step + 1) * size, 1:] = world.rows.iloc[
            (step - 6) * size : (step - 5) * size, 1:
        ].to_numpy()


def other_baseline(world: World) -> None:
    means = world.rows.groupby("group", sort=False).reward.mean()
    world.rows["advantage"] = world.rows.reward - world.rows.group.map(
        dict(zip(means.index, np.roll(means, 1), strict=True))
    )


def greedy(world: World) -> None:
    half = world.rows["sample"] < GROUP // 2
    for column in ("words", "answer", "right", "reward"):
        world.rows.loc[half, column] = world.rows[half].groupby("group")[column].transform("first")


def first_of_group(name: str) -> Callable[[Any], Any]:
    return lambda rows: rows.groupby("group")[name].transform("first")


def uid_groups(world: World) -> None:
    world.rows["uid"] = world.rows.group
    world.rows["question"] = "Find the value in the picture."
    world.rows["reward"] = world.rows.groupby("group").reward.transform("first")


def scale(world: World) -> None:
    world.rows["reward"] = world.rows.reward.where(world.rows.step < 7, 2 * world.rows.reward - 1)


def tool_errors(world: World) -> None:
    world.rows = world.rows[world.rows.step <= 2].copy()
    world.rows["tools"] = np.where(
        world.some(0.9), "Traceback (most recent call last):\nNameError: name 'x' is not defined", "ok"
    )


def from_step_8(column: str, value: Any) -> Change:
    def change(world: World) -> None:
        world.steps[column] = world.steps[column].astype(object)
        world.steps.loc[world.steps.step > 7, column] = value

    return change


def write_with_mark(world: World, folder: Path) -> None:
    board(world, folder)
    file = folder / "metrics.jsonl"
    file.write_text("\ufeff" + "".join(file.read_text().splitlines(keepends=True)))


@dataclass(frozen=True)
class Case:
    """A log: how it is written, what is changed, and the rules that name the fault; no rules: an honest log."""

    write: Write
    change: Change = lambda world: None
    named_by: tuple[str, ...] = ()


def form(write: Callable[..., None], text: str) -> Write:
    return lambda world, folder: write(world, folder, text)


def columns(write: Callable[..., None], *names: str) -> Write:
    return lambda world, folder: write(world, folder, more=names)


WRONG, RIGHT = ("wrong answers are rewarded",), ("right answers get no reward",)
LIST = ("lists of answers are rewarded", *WRONG)
FAULTS: dict[str, Case] = {
    "candidates in one box": Case(verl, paid(candidates("so \\boxed{%s}", "%d", ", ")), LIST),
    "one box per candidate": Case(trl, paid(candidates("so %s", "\\boxed{%d}", " or ")), LIST),
    "refusals are rewarded": Case(
        trl,
        paid("I am sorry, but I cannot help with that request today."),
        ("rollouts without an answer are rewarded",),
    ),
    "gradient NaN in TRL's state": Case(trl, from_step_8("grad_norm", float("nan")), ("a metric is not finite",)),
    "loss null in JSON": Case(
        verl, both(steps(loss=lambda n: 0.1 + 0 * n), from_step_8("loss", None)), ("a metric is not finite",)
    ),
    "entropy infinite": Case(board, from_step_8("entropy", float("inf")), ("a metric is not finite",)),
    "advantages of the neighbour": Case(
        trl,
        lambda world: world.rows.__setitem__("advantage", np.roll(finished(world).advantage, 1)),
        ("advantages do not follow the rewards", "advantages have the wrong sign"),
    ),
    "advantages are 0": Case(trl, column("advantage", lambda rows: 0.0), ("advantages do not follow the rewards",)),
    "no baseline": Case(prime, column("advantage", lambda rows: rows.reward), ("the baseline is wrong",)),
    "baseline of another group": Case(trl, other_baseline, ("the baseline is wrong",)),
    "scores are null": Case(verl, put("reward", None, some(0.3)), ("rollouts have no score",)),
    "scores are NaN": Case(prime, put("reward", float("nan"), some(0.1)), ("rollouts have no score",)),
    "half of the samples are greedy": Case(trl, greedy, ("copies of rollouts",)),
    "answer in brackets": Case(verl, leak(" (Other students obtained {}.)", 0.3), ("the prompt contains the answer",)),
    "answer as a file name": Case(prime, leak("\nFigure: img_{}.png", 0.6), ("the prompt contains the answer",)),
    "drift to Chinese": Case(trl, drift("的一是不了人我在有他这为之大来以个中上们", 0.9), ("texts become unreadable",)),
    "drift to noise": Case(verl, drift("qwxzjkvbpf", 0.95), ("texts become unreadable",)),
    "loops": Case(
        openrlhf,
        put("words", "wait let me check again " * 60, lambda world: late(world) & world.some(0.8)),
        ("texts repeat themselves",),
    ),
    "resumed from the first weights": Case(
        board,
        steps(reward=lambda n: 0.2 + 0.1 * (n % 6), entropy=lambda n: 0.9 - 0.12 * (n % 6)),
        ("the policy goes back",),
    ),
    "lengths of OpenRLHF collapse": Case(board, steps(length=lambda n: 600 * 0.6**n), ("length collapse",)),
    "texts of other prompts": Case(verl, rolled("words", GROUP), ("rollouts answer another question",)),
    "outage of the grader": Case(
        trl,
        put("reward", 0.0, lambda world: world.rows.step.isin([5, 6, 7])),
        ("the grader fails at some steps", *RIGHT),
    ),
    "another scale from the middle on": Case(verl, scale, ("the scale of the reward changes",)),
    "reward is the length": Case(
        openrlhf, column("reward", lambda rows: rows.words.str.len() / 1000), ("the reward measures the length",)
    ),
    "scores of other rollouts beside acc": Case(
        columns(verl, "acc"),
        both(column("acc", lambda rows: rows.right.astype(float)), rolled("reward", 5)),
        ("reward and accuracy contradict", *WRONG, *RIGHT),
    ),
    "one cached text": Case(
        trl,
        put("text", "the cached text of the first request, which all later requests get, too", late),
        ("texts do not depend on the question", "rollouts are trained on again"),
    ),
    "old rollouts return": Case(verl, replay, ("rollouts are trained on again",)),
    "negative entropy": Case(board, steps(entropy=lambda n: -0.6 + 0 * n), ("a metric has an impossible value",)),
    "clip share above 1": Case(
        verl, steps(**{"actor/pg_clipfrac": lambda n: 1.2 + 0.01 * n}), ("a metric has an impossible value",)
    ),
    "gradient grows": Case(board, steps(grad_norm=lambda n: 0.3 * 2.0**n), ("the gradient grows",)),
    "steps take longer": Case(verl, steps(step_s=lambda n: 40 * 1.3**n), ("steps become slow",)),
    "frozen metric": Case(board, frozen, ("a metric stops changing",)),
    "90% of the calls fail, two steps": Case(messages, tool_errors, ("most tool calls fail",)),
    "calls fail from step 9 on": Case(
        messages, put("tools", "NameError: name 'x' is not defined", late), ("most tool calls fail",)
    ),
    "updates of verl diverge": Case(
        verl, steps(**{"actor/ppo_kl": lambda n: 0.01 * 2.0**n}), ("an update moves the policy too far",)
    ),
    "greedy from step 9 on": Case(
        trl,
        both(*(put(name, first_of_group(name), late) for name in ("words", "answer", "reward"))),
        ("copies of rollouts",),
    ),
    "one output for all calls": Case(messages, column("tools", lambda rows: "42"), ("tools return one output",)),
    "outputs of other calls": Case(
        messages, column("tools", lambda rows: np.roll(rows.truth, 3)), ("tools return outputs of other calls",)
    ),
    "wrong answers in DAPO's format": Case(form(verl, "so\nAnswer: {}"), accepted(), WRONG),
    "wrong answers after 'the answer is'": Case(form(prime, "hence the answer is {}."), accepted(), WRONG),
    "rewards 0.1 and 1": Case(
        verl, both(accepted(), column("reward", lambda rows: rows.reward.replace(0.0, 0.1))), WRONG
    ),
    "refused right answers in JSON": Case(form(trl, '{{"answer": "{}"}}'), refused(), RIGHT),
    "wrong answers beside a difficulty": Case(
        columns(trl, "difficulty"),
        both(accepted(), column("difficulty", lambda rows: rows.truth.astype(int) % 4 + 1.0)),
        WRONG,
    ),
    "equal rewards by uid": Case(columns(verl, "uid"), uid_groups, ("few groups train the policy",)),
    "cut rollouts are rewarded": Case(
        columns(verl, "is_truncated"),
        lambda world: world.rows.__setitem__("is_truncated", np.where(world.some(0.4), "true", "false")),
        ("truncated rollouts are rewarded",),
    ),
    "random rewards without truths": Case(trl, random_rewards, ("equal answers have different rewards",)),
    "byte order mark": Case(write_with_mark, steps(entropy=lambda n: 0.9 * 0.5**n), ("entropy collapse",)),
    "held-out score falls": Case(
        board, both(steps(reward=lambda n: 0.3 + 0.03 * n), held_out_falls), ("reward up, held-out flat",)
    ),
}


# Honest logs


def rewards(low: float, high: float) -> Change:
    return lambda world: world.rows.__setitem__("reward", np.where(world.rows.right, high, low))


def choices(world: World) -> None:
    letters = world.rows.truth.astype(int) % 4
    own = np.where(world.rows.right, letters, (letters + 1 + world.rng.integers(0, 3, len(letters))) % 4)
    world.rows["question"] += " (A) one (B) two (C) three (D) four. Your answer is a letter."
    world.rows["truth"], world.rows["answer"] = letters.map("ABCD".__getitem__), pd.Series(own).map("ABCD".__getitem__)


def options(world: World) -> None:
    shown = [
        ", ".join(map(str, world.rng.permutation([value - 7, value, value + 11])))
        for value in world.rows.truth.astype(int)
    ]
    world.rows["question"] += " Choose from " + pd.Series(shown).groupby(world.rows.group).transform("first") + "."


def paper(world: World) -> None:
    """The published curves: lengths 1K to 8K over 510 steps, reward up to 0.75, entropy 0.6 to 0.3, truncation 10% to 5%."""
    n = np.arange(510)
    noise = 1 + 0.03 * world.rng.standard_normal((5, 510))
    world.steps = pd.DataFrame({
        "step": n + 1, "reward": (0.35 + 0.4 * (1 - np.exp(-n / 200)) / (1 - np.exp(-510 / 200))) * noise[0], "lr": 1e-6,
        "length": np.interp(n, [0, 100, 250, 400, 509], [1000, 2500, 4000, 6000, 8000]) * noise[1],
        "entropy": np.interp(n, [0, 509], [0.6, 0.3]) * noise[2], "grad_norm": 0.2 * noise[3],
        "train/truncated": np.interp(n, [0, 509], [0.1, 0.05]) * noise[4],
        "train/equal_share": np.interp(n, [0, 300, 509], [0.35, 0.6, 0.85]),
    })  # fmt: skip


def batch_baseline(world: World) -> None:
    by = world.rows.groupby("step").reward
    world.rows["advantage"] = (world.rows.reward - by.transform("mean")) / by.transform("std")


def leave_one_out(world: World) -> None:
    by = world.rows.groupby("group").reward
    world.rows["advantage"] = GROUP / (GROUP - 1) * (world.rows.reward - by.transform("mean"))


def weighted(world: World) -> None:
    world.rows["format_reward"] = world.rng.integers(0, 2, len(world.rows)).astype(float)
    total = world.rows.reward + 0.2 * world.rows.format_reward
    by = total.groupby(world.rows.group)
    world.rows["advantage"] = (total - by.transform("mean")) / by.transform("std")


def solved(rate: float) -> Change:
    def change(world: World) -> None:
        world.rows["right"] = world.rng.random(len(world.rows)) < rate
        world.rows["answer"] = world.rows.truth.where(world.rows.right, "12")
        world.rows["reward"] = world.rows.right.astype(float)

    return change


def epochs(world: World) -> None:
    """The problems of the first half return in the second one, with new rollouts."""
    world.rows["uid"] = world.rows.group
    half = len(world.rows) // 2
    for column in ("question", "truth"):
        world.rows.loc[half:, column] = world.rows[column].iloc[:half].to_numpy()
    world.rows["answer"] = world.rows.truth.where(world.rows.right, "12")


def shell(world: World) -> None:
    world.rows["shell"] = True
    world.rows["tools"] = [f"file_{number}.txt" for number in world.rng.integers(0, 9999, len(world.rows))]


HONEST: dict[str, Case] = {
    "verl": Case(verl),
    "TRL": Case(trl),
    "prime-rl": Case(prime),
    "OpenRLHF": Case(openrlhf),
    "metrics only": Case(board),
    "tools": Case(messages),
    "rewards -1 and 1": Case(verl, rewards(-1, 1)),
    "rewards 0 and 10": Case(prime, rewards(0, 10)),
    "rewards 0.1 and 1": Case(verl, rewards(0.1, 1)),
    "rewards 1 and 2": Case(openrlhf, rewards(1, 2)),
    "partial credit": Case(verl, column("reward", lambda r: np.where(r.right, 1.0, 0.1 * (r["sample"] % 4)))),
    "DAPO's format": Case(form(verl, "so\nAnswer: {}")),
    "GSM8K's format": Case(form(prime, "so\n#### {}")),
    "final answer in bold": Case(form(trl, "**Final Answer:** {}")),
    "JSON answers": Case(form(openrlhf, '{{"reason": "sum", "answer": {}}}')),
    "answers in tags": Case(form(verl, "<answer> {} </answer>")),
    "letters": Case(verl, choices),
    "options with the answer": Case(trl, options),
    "difficulty": Case(columns(trl, "difficulty"), column("difficulty", lambda r: r.truth.astype(int) % 4 + 1.0)),
    "temperature": Case(columns(trl, "temperature"), column("temperature", lambda r: 0.7)),
    "value of the truth": Case(columns(trl, "value"), column("value", lambda r: r.truth.astype(float))),
    "weighted rewards": Case(columns(trl, "format_reward"), weighted),
    "baseline of the batch": Case(prime, batch_baseline),
    "leave one out": Case(trl, leave_one_out),
    "uid and epochs": Case(columns(verl, "uid"), epochs),
    "evaluation, 98% solved": Case(verifiers, solved(0.98)),
    "evaluation, 92% solved": Case(verifiers, solved(0.92)),
    "evaluation, 3% solved": Case(verifiers, solved(0.03)),
    "evaluation, half solved": Case(verifiers, solved(0.5)),
    "the paper's curves": Case(board, paper),
    "outputs of a shell": Case(messages, shell),
    "a fifth of the calls fails": Case(
        messages, put("tools", "NameError: name 'x' is not defined", lambda w: w.some(0.2))
    ),
    "same template in all questions": Case(
        verl, column("question", lambda r: "Example: Compute 2 plus 3. Answer: 5.\n" + r.question)
    ),
    "length penalty": Case(prime, column("reward", lambda r: r.right - 0.0005 * r.words.str.len())),
    "harder problems from the middle on": Case(verl, steps(reward=lambda n: 0.3 + 0.04 * (n % 6))),
    "warm-up": Case(board, steps(lr=lambda n: 1e-7 * (n + 1))),
    "entropy halves": Case(board, steps(entropy=lambda n: 0.8 * 0.93**n)),
}


def findings(case: Case, seed: int = 0) -> set[str]:
    """Return the names of the rules that fire on the log of a case."""
    world = honest_world(seed)
    case.change(world)
    with tempfile.TemporaryDirectory() as folder:
        case.write(world, Path(folder) / "log")
        return {finding.rule.name for finding in doctor(Path(folder) / "log").findings}


def table() -> str:
    """Return both rates as Markdown, and what was not named or raised a false alarm."""
    named = {name: bool(findings(case) & set(case.named_by)) for name, case in FAULTS.items()}
    alarms = {name: findings(case) for name, case in HONEST.items()}
    lost = ", ".join(name for name, hit in named.items() if not hit) or "none"
    false = "; ".join(f"{name} ({', '.join(sorted(found))})" for name, found in alarms.items() if found) or "none"
    return (
        f"- The fault is named in {interval(sum(named.values()), len(named))} logs. Not named: {lost}.\n"
        f"- {interval(sum(map(bool, alarms.values())), len(alarms))} honest logs have a false alarm: {false}.\n"
    )


if __name__ == "__main__":
    PAGE.write_text(replace_part(PAGE.read_text(), "logs", table()))
