# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does Resample-on-Correct do anything?
#
# GRPO rewards the final answer only, so a right answer that came by way of failing code is reinforced, failures and
# all. RoC rolls out twice as much and keeps the cleaner successes. Here the arms differ in that alone: same start, same
# problems, same number of kept rollouts a step.
#
# RoC pays for its choice with twice the generation. Two controls belong beside it: plain GRPO, and **twice the rollouts
# kept at random**, which costs the same and chooses nothing. One run proves nothing: every arm is run with several seeds.

# %% tags=["parameters"]
runs_dir = "../runs"
recipe = "tiny"
name = "ablation"
seeds = [0, 1, 2, 3, 4]
steps = 24
arms = {
    "GRPO": {"rl.roc": "none"},
    "2x at random": {"rl.roc": "random"},
    "RoC (paper)": {"rl.roc": "paper"},
    "RoC (released)": {"rl.roc": "released"},
    "RoC, errors only": {"rl.roc": "paper", "rl.roc_penalties": ["errors"]},
    "RoC, format only": {"rl.roc": "paper", "rl.roc_penalties": ["format"]},
}
overrides = {"rl.problems_per_step": 8}  # for all arms, the SFT included; half a step of the recipe
train = True  # False: only draw what is there

# %%
import pandas as pd
from IPython.display import display

from rstar_lab.analysis import inspect, open_runs
from rstar_lab.analysis.comparison import compare
from rstar_lab.analysis.figures import plot_ablation
from rstar_lab.jobs.grid import run_grid

if train:
    made = run_grid(
        recipe, arms, seeds, runs_dir=runs_dir, name=name, overrides={"stages.0.steps": steps, "rl.token_arrays": "sampled"} | overrides
    )
else:
    made = [run for run in open_runs(runs_dir).runs().run_id if run.startswith(f"{name}-") and run.endswith("-rl")]
runs = open_runs(runs_dir, run_ids=made)
runs.runs()[["run_id", "status", "steps", "trajectories"]]

# %% [markdown]
# ## Against steps
#
# Over all rollouts of a step, dropped ones too. Lines are means over seeds, bands 95% intervals over seeds (Student's t).

# %%
metrics = ["pass1", "tool_error_rate_correct", "response_tokens", "duplicate_answers", "entropy", "reflection_tokens"]
plot_ablation(runs, "label", metrics)

# %% [markdown]
# ## Against compute
#
# The same against the tokens generated so far, where oversampling shows what it costs.

# %%
plot_ablation(runs, "label", metrics[:4], x="tokens")

# %% [markdown]
# ## Paired differences
#
# Each arm against the control that costs as much, over the last third of the steps, on the problems that both met.

# %%
late = f"step > {2 * steps // 3}"
control = "2x at random" if "2x at random" in arms else next(iter(arms))
known = runs.runs()
of_arm = {arm: open_runs(runs_dir, run_ids=list(known[known["recipe.label"] == arm].run_id)) for arm in arms}
cards = {arm: compare(of_arm[control], of_arm[arm], where=late, name_a=control, name_b=arm) for arm in arms if arm != control}
pd.concat({arm: card.table for arm, card in cards.items()}, names=["arm"])

# %%
for card in cards.values():
    display(card)

# %% [markdown]
# A click on a trajectory that a card lists opens it here.

# %%
inspect(runs)
