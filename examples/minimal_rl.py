"""GRPO-RoC in one file: from problems to a better model, with `TrainingLoop`.

    python examples/minimal_rl.py                    # about three minutes on two cores
    python examples/minimal_rl.py --steps 2 --runs-dir /tmp/runs

It trains the small model of the recipe `tiny_fast`: SFT teaches it the format, then each step of RL
  1. generates 16 rollouts of each problem, in which the model may run Python in a sandbox,
  2. keeps 8 of them: RoC prefers correct rollouts with few tool errors and a clean format,
  3. computes group advantages and takes two optimizer steps on the clipped policy loss,
  4. sends the new weights to the engine and stores all rollouts, so that the inspector can show them.
Left out, compared with `rstar-lab train`: checkpoints and resuming. Source: rStar2-Agent (arXiv 2508.20722).
"""

import argparse
import asyncio
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from rstar_lab.common.progress import Reporter
from rstar_lab.rl import TrainingLoop, Trajectory, group_advantages, load_recipe, resample
from rstar_lab.rl.pipeline import run_recipe

PROBLEMS_PER_STEP, GROUP, KEPT = 12, 16, 8  # RoC keeps KEPT of GROUP rollouts


def select(rollouts: list[Trajectory], seed: int) -> list[Trajectory]:
    """Return the rollouts to train on: RoC in each group, then only groups with different rewards."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.usable:  # did not fail through our fault
            groups[rollout.group_id].append(rollout)
    kept: list[Trajectory] = []
    for number, group in enumerate(groups.values()):
        rewards, penalties = [t.reward for t in group], [t.p_err + t.p_format for t in group]
        chosen = resample(rewards, penalties, KEPT, rng=np.random.default_rng([seed, number]))
        if len({rewards[i] for i in chosen}) > 1:  # otherwise all advantages are 0
            kept += [group[i] for i in chosen]
    return kept


def main(steps: int, runs_dir: Path, seed: int = 0) -> tuple[float, float]:
    """Train and return the pass rate on held-out problems before and after RL."""
    recipe = load_recipe("tiny_fast", {"runs": str(runs_dir)})
    models = asyncio.run(run_recipe(recipe, Reporter(), stages=False, evaluations=False))  # SFT, once
    draw = random.Random(seed)
    with TrainingLoop(
        recipe, models["model_sft"], name=time.strftime("minimal-%m%d-%H%M%S"), runs_dir=runs_dir
    ) as loop:
        held_out = loop.held_out["held_out"]
        before = loop.evaluate(held_out, samples=2)["pass1"][0]
        for step in range(1, steps + 1):
            kept = select(loop.sample(draw.sample(list(loop.problems), PROBLEMS_PER_STEP), n=GROUP), seed=step)
            if kept:
                loop.update(kept, group_advantages([t.reward for t in kept], [t.group_id for t in kept]))
        after = loop.evaluate(held_out, samples=2)["pass1"][0]
    print(
        f"held-out pass@1: {before:.3f} before, {after:.3f} after {steps} steps ({len(held_out)} problems, 2 rollouts each)"
    )
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="steps of RL (default: 7)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    options = parser.parse_args()
    main(options.steps, options.runs_dir)
