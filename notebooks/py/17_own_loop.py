# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py//py:percent
#     notebook_metadata_filter: -kernelspec,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
# ---

# %% [markdown]
# # Your own training loop
#
# **You learn** how to write the training loop yourself, and how to change the algorithm. **Time**: 10 minutes, most of
# it training on two CPU cores.
#
# `TrainingLoop` gives you the parts of a training run as blocking calls: sample, score, update, evaluate, save. This notebook
# writes GRPO-RoC by hand in about 30 lines, trains with it, and then changes it. The run is stored like any other, so the
# inspector follows it. Interrupt the kernel at any time: a call ends, and the loop can go on.

# %% tags=["parameters"]
recipe: str = "tiny_fast"  # name of a shipped recipe, or a file; its section rl has the limits, the tools and the update
model: str = ""  # folder of the model to start with; empty: the SFT model of the recipe, which is trained if it is missing
name: str = ""  # the run is called NAME-loop; empty: a new name
overrides: dict = {}  # recipe keys: {"rl.lr": 1e-4}
steps: int = 4  # updates before the change, and again after it
problems_per_step: int = 12  # problems of a step
group_size: int = 16  # rollouts of each problem, of which half are kept
runs_dir: str = ""  # folder of runs; empty: the nearest runs/ folder

# %%
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from rstar_lab.analysis import inspect, open_runs, plot_curves
from rstar_lab.common.parameters import check_parameters
from rstar_lab.rl import TrainingLoop
from rstar_lab.runs import find_runs_dir

check_parameters(globals())
runs_dir = find_runs_dir(runs_dir)
if not model:
    command = [sys.executable, "-m", "rstar_lab.cli", "sft", recipe, "--runs-dir", str(runs_dir)]
    trained = subprocess.run(command, capture_output=True, text=True)  # returns at once if the model exists
    assert trained.returncode == 0, trained.stderr
    model = str(runs_dir / f"{Path(recipe).stem}-sft" / "sft" / "model")

# %% [markdown]
# ## Start
#
# `open` starts the engines and the sandbox. `loop.problems` are the training problems of the recipe, and `loop.held_out` its
# evaluation sets.

# %%
loop = TrainingLoop(recipe, model, name=name or time.strftime("own-%m%d-%H%M%S"), runs_dir=runs_dir, overrides=overrides)
loop.open()
held_out = next(iter(loop.held_out.values()))
before = loop.evaluate(held_out, samples=2)["pass1"]
print(f"pass@1 on {len(held_out)} held-out problems: {before[0]:.1%} [{before[1]:.1%}, {before[2]:.1%}]")

# %% [markdown]
# ## GRPO-RoC by hand
#
# A group is all rollouts of one problem. RoC keeps half of each group: wrong rollouts at random, so that all ways to fail
# stay, and right ones more often the fewer tool errors and superfluous answers they have. Then each rollout's advantage is
# its reward compared with its group. Source: rStar2-Agent, section 2.2.3 (arXiv 2508.20722).

# %%
rng = np.random.default_rng(0)


def groups_of(rollouts):
    groups = defaultdict(list)
    for rollout in rollouts:
        if rollout.usable:  # not failed through our fault
            groups[rollout.group_id].append(rollout)
    return list(groups.values())


def draw(rollouts, count, weights):
    chosen = rng.choice(len(rollouts), count, replace=False, p=weights / weights.sum()) if count else []
    return [rollouts[i] for i in chosen]


def roc(group):
    right = [rollout for rollout in group if rollout.reward > 0]
    wrong = [rollout for rollout in group if rollout.reward <= 0]
    penalties = np.array([rollout.p_err + rollout.p_format for rollout in right])
    return draw(right, len(right) // 2, 1 / (penalties + 0.1)) + draw(wrong, len(wrong) // 2, np.ones(len(wrong)))


def advantages_of(group):
    rewards = np.array([rollout.reward for rollout in group])
    return list((rewards - rewards.mean()) / (rewards.std() + 1e-6))


def train_step(reward=None):
    batch = [loop.problems[i] for i in rng.choice(len(loop.problems), problems_per_step, replace=False)]
    rollouts = loop.sample(batch, n=group_size)
    if reward is not None:
        rollouts = loop.score(rollouts, reward)
    kept = [roc(group) for group in groups_of(rollouts)]
    kept = [group for group in kept if len({rollout.reward for rollout in group}) > 1]  # others have no advantage
    return loop.update(sum(kept, []), sum(map(advantages_of, kept), [])) if kept else None


# %%
for _ in range(steps):
    train_step()

# %% [markdown]
# ## Look at it
#
# While a cell trains, `rstar-lab runs list` shows the run, and another notebook can follow it with `watch`.

# %%
runs = open_runs(runs_dir, run_ids=[loop.run_dir.name])
plot_curves(runs, ["rewarded", "tool_error_rate", "response_tokens"])

# %%
inspect(runs, where={"errors": True})

# %% [markdown]
# ## Change it
#
# Anything can change between two calls. Here a right answer is worth less the longer it is, the learning rate is halved, and
# RoC stays. `loop.score` stores the new rewards.

# %%
limit = loop.rl.limits.max_response_tokens


def shorter_is_better(rollout):
    return rollout.reward * (1 - 0.5 * len(rollout.response_ids) / limit)


loop.rl = loop.rl.model_copy(update={"lr": loop.rl.lr / 2})
for _ in range(steps):
    train_step(shorter_is_better)

# %%
plot_curves(runs, ["rewarded", "tool_error_rate", "response_tokens"])

# %% [markdown]
# ## Evaluate and save
#
# The evaluation uses the verified answers, not the changed reward. A run of a few steps on one seed shows that the loop
# works, not that the change is good: [docs/ablation.md](../docs/ablation.md) compares
# settings over seeds.

# %%
after = loop.evaluate(held_out, samples=2)["pass1"]
print(f"pass@1: {before[0]:.1%} [{before[1]:.1%}, {before[2]:.1%}] before, {after[0]:.1%} [{after[1]:.1%}, {after[2]:.1%}] after {loop.step} steps")
print(loop.save(loop.run_dir / "model"))
loop.close()

# %% [markdown]
# ## Next steps
#
# - [06_ablation](06_ablation.ipynb) compares a change over several seeds.
# - [docs/extending.md](../docs/extending.md) describes methods that a recipe can name, for the trainers and the cluster.
