"""RoC on a pretrained model that makes tool errors by itself: the runs of docs/ablation.md, section "A pretrained model".

    python -m benchmarks.pretrained FOLDER [SEED...]   # 12 runs of about 5 minutes on two busy cores; continues when interrupted

SmolLM2-135M-Instruct learns the tool from few SFT conversations, in none of which a call fails. All arms start from this SFT model and
generate equally many rollouts. When all runs are done, the recorded data and the tables of the page are written.
"""

import argparse
import asyncio
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.doctor import replace_part
from rstar_lab.analysis import open_runs
from rstar_lab.analysis.ablation import ablation_report, ablation_sums
from rstar_lab.common.estimates import Estimate, Side, paired_difference, ratio
from rstar_lab.common.progress import Reporter
from rstar_lab.common.resources import benchmark_file
from rstar_lab.rl.engines.group import EngineGroup, open_engines
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.pipeline import evaluate_model, fine_tune, train
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.session import RunSession
from rstar_lab.runs.reader import RunReader

RECIPE = "smollm2_laptop"
STEPS = 6
SEEDS = range(4)
FAMILIES = {
    "families": ["product_remainder", "common_divisor", "common_multiple", "base_value", "exclusive_or", "squares_sum"],
}
WITH_ERRORS = ("error_then_fix", "malformed_then_fix", "wrong_code", "guess", "error_then_guess")
KEYS: dict[str, Any] = {
    # SFT shows levels 1 and 2 (small numbers); RL and evaluation also have large numbers and questions in two parts.
    "sft.problems.synthetic": {"count": 128, "seed": 1, "levels": [1, 2]} | FAMILIES,
    "sft.mix": {"clean": 0.5, "double_check": 0.5} | dict.fromkeys((*WITH_ERRORS, "hardness", "duplicate_answers"), 0.0),
    "stages.0.steps": STEPS,
    "stages.0.problems.synthetic": {"count": 4000, "seed": 2} | FAMILIES,
    "rl.problems_per_step": 4,
    "rl.token_arrays": "sampled",
    "rl.checkpoint_every": STEPS,
    "engine.count": 2,
    "engine.kv_cache_gb": 0.25,
    "evaluate.during.every": STEPS,
    "evaluate.samples": 1,
    "evaluate.sets.held_out.synthetic": {"count": 64, "seed": 1000} | FAMILIES,
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "RoC (paper)": {"rl.group_size": 4, "rl.method.roc": {"rule": "paper", "oversample": 2}},
    "2x at random": {"rl.group_size": 4, "rl.method.roc": {"rule": "random", "oversample": 2}},
    "GRPO": {"rl.group_size": 8, "rl.method.roc": {"rule": "none", "oversample": 1}},
}
CONTROL = "RoC (paper)"
METRICS = ("pass1", "tool_error_rate_correct", "tool_error_rate", "model_tokens")
PAGE = Path(__file__).parents[1] / "docs" / "ablation.md"


def recipe_of(folder: Path, keys: dict[str, Any]) -> Recipe:
    """Return the recipe of a run in `folder` with the keys of the study and `keys`."""
    return load_recipe(RECIPE, KEYS | {"runs": str(folder / "runs")} | keys)


def run_name(arm: str, seed: int) -> str:
    return re.sub("[^a-z0-9]+", "-", f"pretrained-{arm}-{seed}".lower())


def is_finished(folder: Path, arm: str, seed: int) -> bool:
    run = folder / "runs" / f"{run_name(arm, seed)}-rl"
    return (run / "run.json").exists() and RunReader(run).status == "finished"


async def train_all(folder: Path, seeds: Sequence[int]) -> None:
    """Make the missing runs of these seeds, all arms of a seed first. They share one SFT model and its engines."""
    async with RunSession.open(resolve(recipe_of(folder, {"name": "pretrained"})), Reporter()) as session:
        model = (await fine_tune(session))[1].resolve()
        await evaluate_model(session, model, session.held_out["held_out"], "eval")
        longest = session.max_sequence_tokens(model)
    async with open_engines(session.recipe.engine, model, folder / "engines", longest) as engines:
        for arm, seed in ((arm, seed) for seed in seeds for arm in ARMS):
            if not is_finished(folder, arm, seed):
                started = time.monotonic()
                own = {"name": run_name(arm, seed), "label": arm, "seed": seed, "model": str(model), "sft": None}
                await _train(recipe_of(folder, own | ARMS[arm]), model, engines)
                print(f"{arm}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)


async def _train(recipe: Recipe, model: Path, engines: EngineGroup) -> None:
    async def ready() -> EngineGroup:
        return engines

    async with RunSession.open(resolve(recipe), Reporter()) as session:
        session._starting = asyncio.ensure_future(ready())
        await train(session, model)
    shutil.rmtree(recipe.runs / f"{recipe.name}-rl" / "checkpoints")


def held_out_sums(folder: Path) -> pd.DataFrame:
    """Return the sums of each held-out problem after each run: arm, seed, problem, samples, correct, and calls and errors in all and
    in correct rollouts. The arm of the SFT model is "SFT"."""
    runs = {(arm, seed): f"{run_name(arm, seed)}-held_out-step{STEPS:06d}" for seed in SEEDS for arm in ARMS}
    parts = []
    for (arm, seed), run in {("SFT", 0): "pretrained-eval", **runs}.items():
        rows = RunReader(folder / "runs" / run).read("trajectories").to_pandas()
        right = rows.reward > 0
        columns = {
            "problem": rows.problem_id, "samples": 1, "correct": right.astype(int), "calls": rows.calls, "errors": rows.errors,
            "calls_in_correct": rows.calls.where(right, 0), "errors_in_correct": rows.errors.where(right, 0),
        }  # fmt: skip
        sums = pd.DataFrame(columns).groupby("problem", as_index=False).sum()
        parts.append(sums.assign(arm=arm, seed=seed))
    frame = pd.concat(parts)
    return frame[["arm", "seed", *(name for name in frame if name not in ("arm", "seed"))]]


def held_out_difference(held_out: pd.DataFrame, arm: str, control: str) -> Estimate:
    """Return held-out pass@1 of an arm minus that of another; the interval covers the problems and the runs."""

    def side(name: str) -> Side:
        own = held_out[held_out.arm == name]
        return Side(
            *(own.pivot(index="seed", columns="problem", values=key).to_numpy() for key in ("correct", "samples"))
        )

    return paired_difference(side(control), side(arm), len(held_out))


def held_out_table(held_out: pd.DataFrame) -> str:
    """Return pass@1 and tool errors of the SFT model and of all arms on the held-out problems as Markdown; seeds are added up."""
    lines = [
        "| model | pass@1 | failed calls | failed calls in correct rollouts | pass@1, compared with RoC |",
        "|---|---|---|---|---|",
    ]
    for arm in ("SFT", *ARMS):
        own = held_out[held_out.arm == arm]
        by_problem = own.groupby("problem")[["correct", "samples"]].sum()
        rate = ratio(by_problem.correct.to_numpy(), by_problem.samples.to_numpy(), len(own))
        value, low, high = (100 * each for each in (rate.value, rate.low, rate.high))
        failed, in_correct = (
            f"{own[errors].sum()} of {own[calls].sum()}"
            for errors, calls in (("errors", "calls"), ("errors_in_correct", "calls_in_correct"))
        )
        other = ""
        if arm not in ("SFT", CONTROL):
            found = held_out_difference(held_out, arm, CONTROL)
            other = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * each for each in (found.value, found.low, found.high)))
        lines.append(f"| {arm} | {value:.1f}% [{low:.1f}, {high:.1f}] | {failed} | {in_correct} | {other} |")
    return "\n".join(lines) + "\n"


def write_results(folder: Path) -> None:
    """Write the recorded data and the tables of the page."""
    runs = [f"{run_name(arm, seed)}-rl" for seed in SEEDS for arm in ARMS]
    sums = ablation_sums(open_runs(folder / "runs", run_ids=runs), METRICS)
    sums = pd.concat([sums[sums.arm == arm] for arm in ARMS], ignore_index=True)
    sums.to_parquet(benchmark_file("ablation-pretrained.parquet"), index=False)
    held_out = held_out_sums(folder)
    held_out.to_csv(benchmark_file("ablation-pretrained.csv"), index=False)
    text = PAGE.read_text()
    for name, table in tables(sums, held_out).items():
        text = replace_part(text, name, table)
    PAGE.write_text(text)


def tables(sums: pd.DataFrame, held_out: pd.DataFrame) -> dict[str, str]:
    """Return the tables of the page by the names of their places."""
    report = ablation_report(sums, control=CONTROL, arms=list(ARMS))
    return {
        "pretrained": f"\n{report.to_markdown()}\n",
        "pretrained, held out": held_out_table(held_out),
        "pretrained, tokens": token_table(sums),
    }


def token_table(sums: pd.DataFrame) -> str:
    """Return the tokens generated by the model and trained on in all runs of each arm, and the failed calls of all steps, as Markdown."""
    lines = ["| arm | tokens generated | tokens trained on | failed calls in correct rollouts |", "|---|---|---|---|"]
    for arm, own in sums.groupby("arm", sort=False):
        total = own.sum(numeric_only=True)
        failed, calls = (total[f"tool_error_rate_correct_{part}"] for part in ("numerator", "denominator"))
        generated = total.model_tokens_numerator
        lines.append(f"| {arm} | {generated:,.0f} | {total.tokens - generated:,.0f} | {failed:.0f} of {calls:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seeds", nargs="*", type=int, default=[*SEEDS])
    given = parser.parse_args()
    folder = given.folder.resolve()
    asyncio.run(train_all(folder, given.seeds))
    if all(is_finished(folder, arm, seed) for arm in ARMS for seed in SEEDS):
        write_results(folder)


if __name__ == "__main__":
    main()
