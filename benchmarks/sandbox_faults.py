"""What failures of the sandbox cost, and what helps: the runs of docs/ablation.md, section "Failures of the sandbox".

    python -m benchmarks.sandbox_faults FOLDER [SEED...]   # 50 runs of about a minute on a busy machine; continues when interrupted

A share of the tool calls fails during training. The rollouts with such a call are counted as failures of the model, masked, or
generated once more (`rl.on_infrastructure_failure`). All runs start from one SFT model, and evaluations have no failures. When all
runs are done, the sums over their steps and the figure are written.
"""

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch

from benchmarks.doctor import replace_part
from benchmarks.recorded import plot_faults
from benchmarks.short_runs import LIMITS, RememberingSandbox, done_file, open_engine, sft_model, train_one
from rstar_lab.analysis import open_runs
from rstar_lab.analysis.ablation import ablation_report, ablation_sums
from rstar_lab.common.estimates import mean_interval
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.common.resources import benchmark_file
from rstar_lab.rl.reward import reward
from rstar_lab.rl.tools.code import FaultySandbox
from rstar_lab.rl.training.trainer import HeldOut, Trainer
from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.sandbox.call import Call

SHARES = (0.05, 0.15, 0.5)
SEEDS = range(5)
STEPS = 12
KEYS: dict[str, Any] = {
    "processes": 1, "sft": None, "stages.0.steps": STEPS, "rl.problems_per_step": 8, "rl.limits.max_response_tokens": 64,
    "rl.token_arrays": "sampled", "rl.checkpoint_every": 100, "engine.count": 2, "engine.mismatch_limit": 1e9,
    "evaluate.during.every": STEPS, "evaluate.sets.held_out.synthetic.count": 128, "evaluate.max_response_tokens": 64,
}  # fmt: skip


def zero_if_failed(text: str, answer: str, *, calls: Sequence[ToolCallRecord]) -> float:
    """Return the reward of a trainer that counts a failure of the sandbox as one of the model: 0 after such a call."""
    return 0.0 if any(call.outcome in INFRASTRUCTURE_FAILURES for call in calls) else reward(text, answer)


HANDLING: dict[str, dict[str, Any]] = {
    "counted": {"rl.on_infrastructure_failure": "keep", "rl.reward": "benchmarks.sandbox_faults:zero_if_failed"},
    "masked": {"rl.on_infrastructure_failure": "mask"},
    "retried": {"rl.on_infrastructure_failure": "retry"},
}


def fault_arms() -> dict[str, dict[str, Any]]:
    """Return the arms: name -> recipe keys. `plot_faults` reads share and handling from the name."""
    return {"0%": {}} | {
        f"{share:.0%}, {name}": {"sandbox.fault_share": share, **keys}
        for share in SHARES
        for name, keys in HANDLING.items()
    }


@contextlib.contextmanager
def evaluations_without_failures() -> Iterator[None]:
    """Inject no failures into evaluations while the context is open, so that their scores measure the policy alone."""
    evaluate, fails = Trainer.evaluate_weights, FaultySandbox._fails
    evaluating = False

    async def evaluate_weights(trainer: Trainer, *arguments: Any) -> HeldOut:
        nonlocal evaluating
        evaluating = True
        try:
            return await evaluate(trainer, *arguments)
        finally:
            evaluating = False

    def fails_in_training(sandbox: FaultySandbox, call: Call) -> bool:
        return not evaluating and fails(sandbox, call)

    with (
        mock.patch.object(Trainer, "evaluate_weights", evaluate_weights),
        mock.patch.object(FaultySandbox, "_fails", fails_in_training),
    ):
        yield


async def train_all(folder: Path, seeds: Sequence[int]) -> None:
    """Make the missing runs of these seeds."""
    torch.set_num_threads(1)
    model = await sft_model(folder)
    runs = [(arm, keys, seed) for seed in seeds for arm, keys in fault_arms().items()]
    left = [(arm, keys, seed) for arm, keys, seed in runs if not done_file(folder, _name(arm, seed)).exists()]
    if not left:
        return
    async with open_engine(folder, model, KEYS) as engine, RememberingSandbox(LIMITS, 2) as sandbox:
        for number, (arm, keys, seed) in enumerate(left):
            started, name = time.monotonic(), _name(arm, seed)
            own = {
                "name": name,
                "label": arm,
                "model": str(model),
                "seed": seed,
                "stages.0.problems.synthetic.seed": 300 + seed,
            }
            broken = evaluations_without_failures()
            error = await train_one(folder, name, KEYS | own | keys, model, engine, sandbox, broken)
            print(f"{number + 1}/{len(left)} {name} {time.monotonic() - started:.0f} s {error}", flush=True)


def _name(arm: str, seed: int) -> str:
    return f"faults-{re.sub('[^a-z0-9]+', '-', arm)}-{seed}"


def handling_differences(sums: pd.DataFrame) -> pd.DataFrame:
    """Return held-out pass@1 of the arms "masked" and "retried" minus that of "counted", paired by seed, with Student's 95% interval.

    One row per share of failures and arm, and one per arm over all shares, for which the differences of a seed are averaged first:
    share, arm, difference, low, high, positive (seeds with a positive difference), seeds.
    """
    last = sums[sums.step == sums.step.max()]
    values = (last.held_out_numerator / last.held_out_denominator).set_axis(
        pd.MultiIndex.from_frame(last[["arm", "seed"]])
    )
    rows = []
    for name in ("masked", "retried"):
        by_share = pd.DataFrame(
            {f"{share:.0%}": values[f"{share:.0%}, {name}"] - values[f"{share:.0%}, counted"] for share in SHARES}
        )
        for share, own in [*by_share.items(), ("all", by_share.mean(axis=1))]:
            mean, low, high, _ = mean_interval(own.to_numpy())
            rows.append((share, name, mean, low, high, int((own > 0).sum()), len(own)))
    return pd.DataFrame(rows, columns=["share", "arm", "difference", "low", "high", "positive", "seeds"])


def handling_table(sums: pd.DataFrame) -> str:
    """Return `handling_differences` as Markdown, in points."""
    cells: dict[str, list[str]] = {}
    for row in handling_differences(sums).to_dict("records"):
        middle, low, high = (100 * row[name] for name in ("difference", "low", "high"))
        text = f"{middle:+.1f} [{low:+.1f}, {high:+.1f}], {row['positive']} of {row['seeds']} seeds above 0"
        cells.setdefault("all shares" if row["share"] == "all" else row["share"], []).append(text)
    lines = ["| failures | masked, compared with counted | retried, compared with counted |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {share} | {' | '.join(own)} |" for share, own in cells.items())]) + "\n"


def write_results(folder: Path) -> None:
    """Write the sums over the steps of all runs, and the tables and the figure of the page."""
    sums = ablation_sums(open_runs(sorted(map(str, folder.glob("runs/*/*-rl")))))
    sums.to_parquet(benchmark_file("ablation-faults.parquet"))
    page = Path(__file__).parents[1] / "docs" / "ablation.md"
    table = ablation_report(sums, control="0%", arms=list(fault_arms())).to_markdown()
    text = replace_part(page.read_text(), "faults", f"\n{table}\n")
    page.write_text(replace_part(text, "handling", handling_table(sums)))
    plot_faults(sums).save(Path(__file__).parents[1] / "docs" / "images" / "faults.png", width=1100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seeds", nargs="*", type=int, default=[*SEEDS])
    given = parser.parse_args()
    folder = given.folder.resolve()
    asyncio.run(train_all(folder, given.seeds))
    if all(done_file(folder, _name(arm, seed)).exists() for arm in fault_arms() for seed in SEEDS):
        write_results(folder)


if __name__ == "__main__":
    main()
