"""The recipe that `rstar-lab init` writes, on problems that its SFT data were not made from: the table of docs/own-model.md.

    python -m benchmarks.own_model FOLDER [SEED...]   # a seed takes about 45 minutes on two busy cores; continues when interrupted

When all seeds are done, the recorded data and the table are written.
"""

import argparse
import csv
import random
import subprocess
from pathlib import Path

import pandas as pd

from benchmarks.doctor import replace_part
from rstar_lab.analysis import open_runs
from rstar_lab.common.estimates import Estimate, Side, mean_interval, paired_difference, ratio
from rstar_lab.common.resources import benchmark_file

MODEL = "smollm2-135m"
PROBLEMS = 900  # init holds out a tenth
SEEDS = (0, 1, 2)
STAGES = {"base": "the model as it comes", "sft": "after SFT", "rl": "after RL"}
PAGE = Path(__file__).parents[1] / "docs" / "own-model.md"
_NAMES = ("Ana", "Ben", "Chen", "Dina", "Emre", "Fay", "Gus", "Hana", "Ivan", "Jo")
_THINGS = ("apples", "pens", "stamps", "marbles", "cards", "shells", "books", "beads")
Problem = tuple[str, int]


def problems(count: int, seed: int = 5) -> list[Problem]:
    """Return different questions with their answers, of four kinds in turn, shuffled."""
    rng = random.Random(seed)
    found: dict[str, int] = {}
    while len(found) < count:
        question, answer = _KINDS[len(found) % len(_KINDS)](rng)
        found.setdefault(question, answer)
    rows = list(found.items())
    rng.shuffle(rows)
    return rows


def _boxes(rng: random.Random) -> Problem:
    who, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, each, given = rng.randint(3, 25), rng.randint(4, 30), rng.randint(2, 11)
    return (
        f"{who} has {boxes} boxes with {each} {thing} in each box. {who} gives away {given} {thing}. "
        f"How many {thing} are left?",
        boxes * each - given,
    )


def _shop(rng: random.Random) -> Problem:
    who = rng.choice(_NAMES)
    pens, pen, books, book = (rng.randint(2, 12) for _ in range(4))
    return (
        f"{who} buys {pens} pens for {pen} dollars each and {books} books for {book} dollars each. "
        f"How many dollars does {who} pay?",
        pens * pen + books * book,
    )


def _trip(rng: random.Random) -> Problem:
    speed, hours, more = rng.randint(30, 90), rng.randint(2, 9), rng.randint(5, 60)
    return (
        f"A train drives {hours} hours at {speed} km per hour and then another {more} km. "
        "How many km does it drive in total?",
        speed * hours + more,
    )


def _share(rng: random.Random) -> Problem:
    who, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    friends, each, before = rng.randint(3, 12), rng.randint(4, 20), rng.randint(2, 15)
    return (
        f"{who} shares {friends * each} {thing} equally among {friends} friends. Each friend already had {before} {thing}. "
        f"How many {thing} does each friend have now?",
        each + before,
    )


_KINDS = (_boxes, _shop, _trip, _share)


def train(folder: Path, seeds: list[int]) -> None:
    """Write the problems, and run `init` and `run` on them, once for each seed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "problems.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *problems(PROBLEMS)])
    if not (folder / "recipe.yaml").exists():
        command = ["rstar-lab", "init", "--model", MODEL, "--problems", "problems.csv"]
        subprocess.run(command, cwd=folder, check=True)
    for seed in seeds:
        keys = ["--set", f"seed={seed}", "--set", f"name=own-{seed}"]
        subprocess.run(["rstar-lab", "run", "recipe.yaml", *keys], cwd=folder, check=True)


def recorded(folder: Path) -> pd.DataFrame:
    """Return the sums of each held-out problem: seed, stage, problem, samples, correct, calls, errors, truncated."""
    parts = []
    for seed in SEEDS:
        for stage in STAGES:
            run = f"own-{seed}-held_out-{stage}"
            rows = open_runs(folder / "runs", run_ids=[run]).trajectories()
            columns = {
                "problem": rows.problem_id, "samples": 1, "correct": (rows.reward > 0).astype(int), "calls": rows.calls,
                "errors": rows.errors, "truncated": rows.truncated.astype(int),
            }  # fmt: skip
            sums = pd.DataFrame(columns).groupby("problem", as_index=False).sum()
            parts.append(sums.assign(seed=seed, stage=stage))
    frame = pd.concat(parts)
    return frame[["seed", "stage", *(name for name in frame if name not in ("seed", "stage"))]]


def gain(sums: pd.DataFrame, seed: int) -> Estimate:
    """Return pass@1 after RL minus pass@1 after SFT for a seed, paired by problem."""

    def side(stage: str) -> Side:
        own = sums[(sums.stage == stage) & (sums.seed == seed)]
        return Side(*(own[[key]].to_numpy().T for key in ("correct", "samples")))

    return paired_difference(side("sft"), side("rl"), len(sums) // len(SEEDS))


def table(sums: pd.DataFrame) -> str:
    """Return pass@1 and failed calls of each stage, and the gain of RL, as Markdown."""
    lines = ["| | pass@1 | failed calls |", "|---|---|---|"]
    for stage, title in STAGES.items():
        own = sums[sums.stage == stage]
        by_problem = own.groupby("problem")[["correct", "samples"]].sum()
        rate = ratio(by_problem.correct.to_numpy(), by_problem.samples.to_numpy(), len(own))
        total = own[["calls", "errors"]].sum()
        value, low, high = (100 * each for each in (rate.value, rate.low, rate.high))
        lines.append(f"| {title} | {value:.1f}% [{low:.1f}, {high:.1f}] | {total.errors} of {total.calls} |")
    gains = [gain(sums, seed) for seed in SEEDS]
    mean, low, high, _ = mean_interval([found.value for found in gains])  # SFT and RL of a seed belong together
    texts = [
        "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * each for each in parts))
        for parts in ((mean, low, high), *((found.value, found.low, found.high) for found in gains))
    ]
    return "\n".join(lines) + f"\n\nRL against SFT: {texts[0]}; by seed {', '.join(texts[1:])}.\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seeds", nargs="*", type=int, default=[*SEEDS])
    given = parser.parse_args()
    folder = given.folder.resolve()
    train(folder, given.seeds)
    if all((folder / "runs" / f"own-{seed}-held_out-rl" / "run.json").exists() for seed in SEEDS):
        sums = recorded(folder)
        sums.to_csv(benchmark_file("own-model.csv"), index=False)
        PAGE.write_text(replace_part(PAGE.read_text(), "own model", table(sums)))


if __name__ == "__main__":
    main()
