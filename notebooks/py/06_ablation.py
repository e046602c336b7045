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
# # Ablation: does Resample-on-Correct help?
#
# **You learn** whether RoC makes correct rollouts cleaner, over several seeds. **Time**: 10 minutes to read the recorded
# runs; with `train = True` it trains 35 runs, which takes hours.
#
# GRPO rewards only the final answer, so a correct answer reached through failing code is reinforced together with its
# failures. RoC generates twice as many rollouts and prefers the successes with fewer tool errors. The arms below differ only
# in how they choose the rollouts to train on: they share the starting model, the problems and the number of rollouts
# trained on per step. Every arm runs with several seeds.
#
# RoC has two controls: plain GRPO, and **twice the rollouts, kept at random**, which costs as much as RoC. *Quotas* keeps the same
# numbers of successes and failures as RoC but ignores the penalties: it separates the effect of the quotas from the effect of
# the preference.

# %% tags=["parameters"]
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
recipe: str = "tiny"  # name of a shipped recipe, or a file
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
concurrency: int = 1  # runs at a time
name: str = "ablation"  # prefix of the runs
seeds: list[int] = [0, 1, 2, 3, 4]  # one run per arm and seed
steps: int = 24  # RL steps of a run
arms: dict = {
    "GRPO": {"rl.method.roc.rule": "none"},
    "2x at random": {"rl.method.roc.rule": "random"},
    "2x, quotas": {"rl.method.roc.rule": "paper", "rl.method.roc.penalties": []},
    "RoC (paper)": {"rl.method.roc.rule": "paper"},
    "RoC (released)": {"rl.method.roc.rule": "released", "rl.method.roc.min_positive": 2, "rl.method.roc.min_negative": 2},
    "RoC, errors only": {"rl.method.roc.rule": "paper", "rl.method.roc.penalties": ["errors"]},
    "RoC, format only": {"rl.method.roc.rule": "paper", "rl.method.roc.penalties": ["format"]},
}  # arms: name, and the recipe keys that it changes
overrides: dict = {
    "rl.problems_per_step": 8,
    "evaluate.during.every": 8,
    "evaluate.sets.held_out.synthetic.count": 96,
    "evaluate.samples": 2,
}  # recipe keys of all arms, SFT included
train: bool = False  # True: train the runs that are missing: 35 with these arms and seeds, which takes hours

# %%
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display

from rstar_lab.analysis import inspect, open_runs
from rstar_lab.analysis.ablation import ablation_report, ablation_sums, load_sums, plot_frontier
from rstar_lab.analysis.comparison import compare
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.jobs import find_job_runs_dir, run_grid
from rstar_lab.common.parameters import check_parameters
from rstar_lab.common.resources import benchmark_file

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir)

# %% [markdown]
# ## The recorded grid
#
# Seven arms with eight seeds each, on two cores ([docs/ablation.md](../docs/ablation.md)). The table is computed from the
# sums in `benchmarks/data`.

# %%
recorded = load_sums(benchmark_file("ablation.parquet"))
Markdown(ablation_report(recorded, control="2x at random", arms=list(dict.fromkeys(recorded.arm))).to_markdown())

# %%
plot_frontier(recorded)

# %% [markdown]
# ## The recorded grid of newer options
#
# RoC alone, and with a token baseline (OTB) or with branching after tool responses.

# %%
plot_frontier(load_sums(benchmark_file("ablation-options.parquet")))

# %% [markdown]
# ## Your runs
#
# With `train = True`, the cell trains every arm with every seed. Otherwise it shows the runs that exist.

# %%
if train:
    print(f"{len(arms) * len(seeds)} runs of {steps} steps, {concurrency} at a time; interrupt the cell to stop, run it again to continue")
    run_ids = run_grid(
        recipe, arms, seeds, runs_dir=runs_dir, profile=profile, name=name, concurrency=concurrency,
        overrides={"stages.0.steps": steps, "rl.token_arrays": "sampled"} | overrides,
    )  # fmt: skip
else:
    found = open_runs(runs_dir).runs().run_id if Path(runs_dir).is_dir() else []
    run_ids = [run for run in found if run.startswith(f"{name}-") and run.endswith("-rl")]
runs = open_runs(runs_dir, run_ids=run_ids) if run_ids else None
runs.runs()[["run_id", "status", "steps", "trajectories"]] if runs else f"no runs {name}-*-rl yet: set train = True"

# %% [markdown]
# ## By step
#
# All rollouts of a step, including the dropped ones. Lines are means over seeds, bands are 95% intervals over seeds
# (Student's t).

# %%
metrics = ["pass1", "tool_error_rate_correct", "response_tokens", "duplicate_answers", "entropy", "reflection_tokens"]
plot_curves(runs, metrics, by="label") if runs else None

# %% [markdown]
# ## By compute
#
# The same curves over the number of generated tokens, which shows the cost of oversampling.

# %%
plot_curves(runs, metrics[:4], by="label", x="tokens") if runs else None

# %% [markdown]
# Held-out pass@1 over all tokens, generated and trained on, if the runs were evaluated (`evaluate.during.every`):

# %%
sums = ablation_sums(runs) if runs else pd.DataFrame()
if "held_out_numerator" in sums:
    display(plot_frontier(sums, [arm for arm in arms if arm in set(sums.arm)]))

# %% [markdown]
# ## Paired differences
#
# Each arm minus the control of equal cost, over the last third of the steps, on the problems that both saw.

# %%
late = f"step > {2 * steps // 3}"
control = "2x at random" if "2x at random" in arms else next(iter(arms))
cards = {}
if runs:
    run_table = runs.runs()
    of_arm = {arm: open_runs(runs_dir, run_ids=list(run_table[run_table["recipe.label"] == arm].run_id)) for arm in arms}
    cards = {arm: compare(of_arm[control], of_arm[arm], where=late, name_a=control, name_b=arm) for arm in arms if arm != control}
pd.concat({arm: card.table for arm, card in cards.items()}, names=["arm"]) if cards else None

# %%
for card in cards.values():
    display(card)

# %% [markdown]
# Click a trajectory in a table above to open it here.

# %%
inspect(runs) if runs else None

# %% [markdown]
# ## Next steps
#
# - [14_counterfactual](14_counterfactual.ipynb) compares the rules on the rollouts of one run, without training.
# - [12_async](12_async.ipynb) compares the modes of training in the same way.
