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
# # Asynchronous training: is it faster, and does it reach the same accuracy?
#
# **You learn** how the modes of training differ in speed and accuracy. **Time**: 5 minutes to read with recorded
# curves; training takes about an hour.
#
# In mode `sync`, the trainer waits for the longest rollout of a step, and the engines wait for the update. `one_step_off`
# generates the next step's rollouts during the update. In mode `async` generation never stops: requests in flight continue
# under new weights, and every token keeps the version of the weights that generated it.
#
# Rollouts of older weights need an off-policy correction (`rl.correction`). This notebook compares the modes by held-out
# pass@1 at equal trained tokens and at equal time, with and without the correction, and with and without RoC.

# %% tags=["parameters"]
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
recipe: str = "tiny_fast"  # name of a shipped recipe, or a file
name: str = "async"  # prefix of the runs
seeds: list[int] = [0, 1, 2, 3, 4]  # one run per arm and seed
steps: int = 30  # RL steps of a run
lr: float = 1.5e-4  # learning rate of RL
overrides: dict = {}  # further keys of all runs
train: bool = False  # True: train the runs here (about an hour); False: show the recorded curves

# %%
import pandas as pd
from IPython.display import Markdown, display

from rstar_lab.analysis import open_runs
from rstar_lab.analysis.ablation import learning_curves, learning_table, plot_learning
from rstar_lab.analysis.timeline import plot_staleness
from rstar_lab.jobs import find_job_runs_dir, run_grid
from rstar_lab.common.parameters import check_parameters
from rstar_lab.common.resources import benchmark_file

check_parameters(globals())
two_processes = {"engine.count": 1, "processes": 1}
stale_1, stale_2, stale_4 = (
    two_processes | {"rl.schedule": {"type": "async", "max_staleness": staleness}} for staleness in (1, 2, 4)
)
no_correction = {"rl.correction": {"type": "none"}, "rl.schedule.allow_uncorrected": True}
arms = {
    "sync": {},
    "one step off": two_processes | {"rl.schedule": {"type": "one_step_off"}},
    "async, staleness 1": stale_1,
    "async, staleness 2": stale_2,
    "async, staleness 4": stale_4,
    "async, staleness 2, no correction": stale_2 | no_correction,
    "sync, no RoC": {"rl.method.roc.rule": "none"},
    "async, staleness 2, no RoC": stale_2 | {"rl.method.roc.rule": "none"},
}
keys = {
    "stages.0.steps": steps,
    "rl.schedule": {"type": "sync"},
    "rl.old_log_probs": "trainer",
    "rl.correction": {"type": "tis"},
    "rl.mini_batches": 1,
    "rl.lr": lr,
    "rl.token_arrays": "sampled",
    "evaluate.during.every": max(1, steps // 3),
    "evaluate.sets.held_out.synthetic.count": 200,
    "evaluate.samples": 2,
}

# %% [markdown]
# ## The runs
#
# Every arm starts from one SFT model, with several seeds. In mode `sync`, two engines generate and then two processes update. In the
# other modes one engine generates while one process updates, so all arms use two cores.

# %%
if train:
    runs_dir = find_job_runs_dir(profile, runs_dir)
    run_ids = run_grid(recipe, arms, seeds, runs_dir=runs_dir, profile=profile, name=name, overrides=keys | overrides)
    runs = open_runs(runs_dir, run_ids=run_ids)
    curves = learning_curves(runs)
else:
    run_ids, curves = [], pd.read_csv(benchmark_file("async.csv"))
curves.groupby("arm", sort=False).agg(seeds=("seed", "nunique"), evaluations=("step", "size"))

# %% [markdown]
# ## Held-out pass@1 by trained tokens and by time
#
# Means over seeds with 95% intervals (Student's t).

# %%
plot_learning(curves, "tokens")

# %%
plot_learning(curves, "seconds")

# %%
Markdown(learning_table(curves).to_markdown())

# %% [markdown]
# The same with twice the learning rate, from the record: the weights change more between two versions, so the same staleness
# costs more.

# %%
Markdown(learning_table(pd.read_csv(benchmark_file("async-fast.csv"))).to_markdown())

# %% [markdown]
# ## Staleness and idle time of a run
#
# With `when_stale: wait`, the default, no group is dropped: the generator starts no group too early, and the trainer waits for
# slow ones. With `drop`, the third panel shows whether mainly long or hard problems were dropped.

# %%
for run in run_ids[1:2]:
    display(plot_staleness(runs, run))

# %% [markdown]
# ## Next steps
#
# - [08_scheduler](08_scheduler.ipynb) predicts the step time of each mode on GPUs.
# - [docs/async.md](../docs/async.md) describes the modes and their recipe keys.
