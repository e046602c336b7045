"""GRPO-RoC in one file: from problems to a better model. `TrainingLoop` generates the rollouts and stores the run; selection and
update are spelled out here. `rstar_lab/rl/step.py` is the same step with all options.

    python examples/minimal_rl.py                    # about three minutes on two cores
    python examples/minimal_rl.py --steps 2 --runs-dir /tmp/runs

It trains the small model of the recipe `tiny_fast`: SFT teaches it the format, then each step of RL
  1. samples 16 rollouts of each problem, in which the model may run Python in a sandbox,
  2. selects 8 of them: RoC prefers correct rollouts with few tool errors and a clean format,
  3. computes group advantages and takes two optimizer steps on the clipped policy loss,
  4. sends the new weights to the engine and stores all rollouts, so that the inspector can show them.
Left out, compared with `rstar-lab train`: checkpoints, packing, several processes. Source: rStar2-Agent (arXiv 2508.20722).
"""

import argparse
import asyncio
import random
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rstar_lab.common.progress import Reporter
from rstar_lab.rl import TrainingLoop, Trajectory, group_advantages, load_recipe, policy_loss, resample
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.pipeline import run_recipe
from rstar_lab.rl.resolved import resolve

PROBLEMS_PER_STEP, GROUP, KEPT = 12, 16, 8  # RoC keeps KEPT of GROUP rollouts
MINI_BATCHES, LR = 2, 5e-4


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


def response_log_probs(model: torch.nn.Module, rollouts: list[Trajectory]) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the responses, (batch, tokens), and a mask of the tokens that the model generated."""
    ids_BS = pad_sequence([torch.tensor(t.prompt_ids + t.response_ids) for t in rollouts], batch_first=True)
    masks = [torch.tensor([False] * len(t.prompt_ids) + list(t.loss_mask)) for t in rollouts]
    mask_BT = pad_sequence(masks, batch_first=True)[:, 1:]
    logits_BTV = model(ids_BS[:, :-1]).logits.float()
    return logits_BTV.log_softmax(-1).gather(-1, ids_BS[:, 1:, None]).squeeze(-1), mask_BT


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, selection: Selection) -> dict[str, float]:
    """Take an optimizer step on each mini-batch of the selected rollouts. Return statistics of the loss."""
    rollouts, advantages = selection.trajectories, torch.tensor(selection.advantages, dtype=torch.float32)
    with torch.no_grad():  # the policy at the start of the update
        old = [response_log_probs(model, [t])[0][0] for t in rollouts]
    numbers: dict[str, list[float]] = defaultdict(list)
    for part in np.array_split(np.arange(len(rollouts)), MINI_BATCHES):
        log_probs_BT, mask_BT = response_log_probs(model, [rollouts[i] for i in part])
        old_BT = pad_sequence([old[i] for i in part], batch_first=True)
        advantages_BT = advantages[part, None].expand_as(log_probs_BT)
        loss, stats = policy_loss(log_probs_BT, old_BT, advantages_BT, mask_BT, clip_low=0.2, clip_high=0.28)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in (stats | {"loss": float(loss), "grad_norm": float(norm)}).items():
            numbers[name].append(value)
    return {name: float(np.mean(values)) for name, values in numbers.items() if name != "tokens"}


def main(steps: int, runs_dir: Path, seed: int = 0) -> tuple[float, float]:
    """Train and return the pass rate on held-out problems before and after RL."""
    recipe = load_recipe("tiny_fast", {"runs": str(runs_dir)})
    models = asyncio.run(
        run_recipe(resolve(recipe, stages=()), Reporter(), stages=False, evaluations=False)
    )  # SFT, once
    draw, name = random.Random(seed), time.strftime("minimal-%m%d-%H%M%S")
    with TrainingLoop(recipe, models["model_sft"], name=name, runs_dir=runs_dir) as loop:
        optimizer = torch.optim.AdamW(loop.model.parameters(), lr=LR, weight_decay=0.0)
        held_out = loop.held_out["held_out"]
        before = loop.evaluate(held_out, samples=2)["pass1"][0]
        for step in range(1, steps + 1):
            rollouts = loop.sample(draw.sample(list(loop.problems), PROBLEMS_PER_STEP), n=GROUP)
            kept = select(rollouts, seed=step)
            if kept:
                advantages = group_advantages([t.reward for t in kept], [t.group_id for t in kept])
                loop.update(kept, advantages, own=partial(update, loop.model, optimizer))
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
