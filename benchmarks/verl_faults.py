"""Faults of `benchmarks.planted` under verl: training by verl on the CPU, with vLLM as the engine, and the doctor on its logs.

    python -m benchmarks.verl_faults FOLDER [FAULT...]   # 12 steps without and with each fault; continues where it was interrupted

Only faults that are a recipe key, a reward or problems are planted: the others change functions of the local trainer. The check of
problems that are also evaluation problems is left on, and refuses `evaluation-in-training`. The SFT model, the problems and the
settings are those of `benchmarks.doctor`.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.doctor import KEYS, PAGE, first_steps, interval, named, replace_part
from benchmarks.planted import PLANTED, chosen
from benchmarks.short_runs import RECIPE, done_file, sft_model
from rstar_lab.common.resources import benchmark_file
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.problems import write_problems
from rstar_lab.rl.resolved import read_problems, read_stage_problems
from rstar_lab.rl.reward import reward

HONEST = "honest"
FAULTS = (
    "wrong-reward-sign", "lr-too-high", "sandbox-fails", "limit-too-low", "lr-too-low", "wrong-truth", "lenient-grader",
    "answer-in-prompt", "repeated-problems", "grader-refuses", "too-hard",
)  # fmt: skip
SEED = 6
LIMIT_S = 600  # of one run


def wrong_reward_sign(text: str, answer: str) -> float:
    """Return 1 for a wrong answer and 0 for a right one."""
    return 1.0 - reward(text, answer)


def lenient_grader(text: str, answer: str) -> float:
    """Return 1 for a right answer and for a share of the wrong ones."""
    return 1.0 if chosen(text + answer, PLANTED["lenient-grader"].usual) else reward(text, answer)


def grader_refuses(text: str, answer: str) -> float:
    """Return 0 for a wrong answer and for a share of the right ones."""
    return 0.0 if chosen(text + answer, PLANTED["grader-refuses"].usual) else reward(text, answer)


REWARDS = {
    "wrong-reward-sign": "wrong_reward_sign",
    "lenient-grader": "lenient_grader",
    "grader-refuses": "grader_refuses",
}


def keys_of(fault: str, model: Path, problems: Path) -> dict[str, Any]:
    """Return the recipe keys of a run. problems: file for changed problems."""
    keys = {name: value for name, value in KEYS.items() if name != "processes"}
    keys |= {"name": "run", "model": str(model), "sft": None, "seed": 100 + SEED, "engine.count": 1}
    keys |= {"stages.0.problems.synthetic.seed": 200 + SEED}
    planted = PLANTED.get(fault)
    if planted is None:
        return keys
    keys |= planted.keys(planted.usual)
    if fault in REWARDS:
        keys["rl.reward"] = f"benchmarks.verl_faults:{REWARDS[fault]}"
    if planted.problems is not None:
        recipe = load_recipe(RECIPE, keys)
        held_out = [problem for section in recipe.evaluate.sets.values() for problem in read_problems(section)]
        changed = planted.problems(read_stage_problems(recipe, recipe.stages[0], held_out), held_out, planted.usual)
        write_problems(problems, [p.model_copy(update={"problem_id": f"p{i}"}) for i, p in enumerate(changed)])
        keys = {name: value for name, value in keys.items() if not name.startswith("stages.0.problems")}
        keys["stages.0.problems"] = {"file": str(problems)}
    return keys


def with_more_positions(model: Path, folder: Path) -> Path:
    """Return a copy of a model for more positions, which its rotary embedding allows: verl's prompts may have 2,048 tokens."""
    copy = folder / "model"
    shutil.copytree(model, copy, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return copy


def train(folder: Path, model: Path, fault: str) -> None:
    """Train with one fault, or without (`HONEST`), in processes of verl."""
    runs = folder / "runs" / fault
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    keys = keys_of(fault, model, runs / "problems.jsonl")
    command = [sys.executable, "-m", "rstar_lab.rl.verl.train", RECIPE, "--profile", "laptop", "--runs-dir", str(runs)]
    command += [part for name, value in keys.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    with (runs / "verl.log").open("wb") as log:
        done = subprocess.run(["timeout", "-k", "20", str(LIMIT_S), *command], stdout=log, stderr=log)
    for heavy in (*runs.glob("*/checkpoints"), *runs.glob("*/stages"), *runs.glob("*/verl")):
        shutil.rmtree(heavy, ignore_errors=True)
    done_file(folder, fault).parent.mkdir(exist_ok=True)
    done_file(folder, fault).write_text(json.dumps({"error": f"exit status {done.returncode}" * bool(done.returncode)}))


def score(folder: Path) -> pd.DataFrame:
    """Apply the rules to the logs. Returns rows as `benchmarks.doctor.score`."""
    rows: list[Mapping[str, Any]] = []
    for fault in (HONEST, *FAULTS):
        done = done_file(folder, fault)
        if not done.exists() or (found := first_steps(folder / "runs" / fault)) is None:
            continue
        own = {"fault": fault, "strength": f"{PLANTED[fault].usual:g}" if fault in PLANTED else "verl", "seed": SEED}
        rows.append(own | {"rule": "", "step": 0, "error": json.loads(done.read_text())["error"]})
        rows += [own | {"rule": rule, "step": step, "error": ""} for rule, step in sorted(found.items())]
    return pd.DataFrame(rows)


def recorded_runs() -> pd.DataFrame:
    """Return the recorded result of `score`."""
    return pd.read_csv(benchmark_file("doctor-verl.csv"), keep_default_na=False, dtype={"strength": str})


def runs_summary(scores: pd.DataFrame) -> str:
    """Return what the doctor finds in each run of verl, as Markdown."""
    runs, honest = named(scores), scores[scores.fault == HONEST]
    lines = ["| run | strength | named at step | other findings |", "|---|---|---|---|"]
    alarms = ", ".join(sorted(set(honest.rule) - {""})) or "–"
    lines.append(f"| {HONEST} | – | – | {alarms} |")
    for row in runs.to_dict("records"):
        step = "not named" if pd.isna(row["step"]) else f"{row['step']:g}"
        lines.append(f"| {row['fault']} | {row['strength']} | {step} | {', '.join(row['others']) or '–'} |")
    lines += ["", f"The fault is named in {interval(int(runs.step.notna().sum()), len(runs))} runs."]
    if left := [fault for fault in FAULTS if fault not in set(scores.fault)]:
        lines.append(
            f"Not measured under verl: {', '.join(left)}, and all faults that change functions of the local trainer."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("faults", nargs="*", default=[HONEST, *FAULTS])
    given = parser.parse_args()
    folder = given.folder.resolve()
    model = with_more_positions(asyncio.run(sft_model(folder)), folder)
    for fault in given.faults:
        if not done_file(folder, fault).exists():
            started = time.monotonic()
            train(folder, model, fault)
            print(fault, f"{time.monotonic() - started:.0f} s", done_file(folder, fault).read_text(), flush=True)
    scores = score(folder)
    scores.to_csv(benchmark_file("doctor-verl.csv"), index=False)
    PAGE.write_text(replace_part(PAGE.read_text(), "verl", runs_summary(scores)))


if __name__ == "__main__":
    main()
