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
# # Dispatch policies: which rollout runs on which engine, and when
#
# **You learn** where the time of a step goes, how the dispatch policies place rollouts, and what a step costs on GPUs.
# **Time**: 10 minutes to read; the cells run in a minute.
#
# Generation takes most of the time of a step. The scheduler decides when a rollout starts and on which engine.
#
# | policy | rule |
# |---|---|
# | `turn-barrier` | rollouts are split over the engines in advance; a turn starts when all rollouts of the engine have finished the previous one |
# | `static` | the same split; every turn is sent at once |
# | `least-in-flight` | the first turn goes to the engine with the fewest requests in flight; later turns follow it |
# | `kv` | an engine gets as many rollouts as its KV cache holds at the maximum length |
# | `adaptive` | an engine gets as many rollouts as its KV cache is expected to hold, longest first, with balanced work |
#
# [docs/scheduler.md](../docs/scheduler.md) compares them by simulation and on real vLLM servers; `rstar-lab bench scheduler`
# repeats the comparison. The first two exist for this comparison only: `engine.scheduler` takes the other three.

# %% tags=["parameters"]
runs_dir: str = ""  # folder of runs; empty: the nearest runs/ folder
run: str = ""  # training run whose steps are shown; empty: the one with the most steps
step: int = 0  # step of that run; 0: the last one
plan_recipe: str = "qwen3_14b_mi300x"  # recipe and profile of the predicted steps at the end
plan_profile: str = "mi300x_8x8"  # hardware of the predicted steps

# %%
import json
import subprocess
import sys

import pandas as pd
from IPython.display import display

from rstar_lab.analysis import LinkedFigure, inspect, open_runs
from rstar_lab.analysis.runs import training_runs
from rstar_lab.analysis.timeline import plot_staleness, plot_timeline
from rstar_lab.common.parameters import check_parameters
from rstar_lab.common.resources import benchmark_file
from rstar_lab.runs import RunReader, find_runs_dir

check_parameters(globals())
root = find_runs_dir(runs_dir, required=True)
trained = training_runs(open_runs(root).runs()).query("trajectories > 0").sort_values("steps")
run = run or trained.run_id.iloc[-1]
runs = open_runs(root, run_ids=[run])
step = step or int(runs.trajectories(columns=["step"]).step.max())
print(f"step {step} of {run}, which has {len(runs.steps())} steps")

# %% [markdown]
# ## Where the time of a step goes
#
# One lane per rollout: time in the engine, time in the queue of the sandbox, time of the tool calls, and time in which the
# rollout is complete and waits for the longest one. Click a segment to open its rollout below.

# %%
viewer = inspect(runs, where={"steps": [step, step]})
LinkedFigure(plot_timeline(runs, run, step), viewer)

# %%
viewer

# %% [markdown]
# ## Staleness and idle time
#
# For a run in mode `one_step_off` or `async`; the last panel shows whether long and hard problems were starved.

# %%
if any("staleness_mean" in line for line in RunReader(root / run).metrics()):
    display(LinkedFigure(plot_staleness(runs, run), None))
else:
    print(f"{run} was not trained asynchronously: set `run` to a run with rl.schedule.type one_step_off or async")

# %% [markdown]
# ## The policies on real servers
#
# The same scripted rollouts on two vLLM servers, with the real rollout driver: each server runs a tiny model on its own CPU
# core, with a KV cache small enough to preempt. Recorded by `python -m benchmarks.calibration`, beside the time that the
# simulator of `rstar-lab plan` predicts.

# %%
recorded = json.loads(benchmark_file("scheduler-calibration.json").read_text())
pd.DataFrame(recorded["results"]).set_index("policy")

# %% [markdown]
# ## Whole steps on GPUs
#
# `rstar-lab plan` simulates whole steps: generation, tools, update and weight sync. The trainer's own code decides when groups
# start and which an update takes, so the modes `sync`, `one_step_off` and `async` can be compared for every split of the GPUs
# (see [docs/async.md](../docs/async.md)). These are predictions from formulas, not measurements.

# %%
command = [sys.executable, "-m", "rstar_lab.cli", "plan", plan_recipe, "--profile", plan_profile, "--json"]
plan = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
print("recommended:", plan["recommended"])
pd.DataFrame(plan["rows"]).round(2)

# %% [markdown]
# ## Next steps
#
# - [12_async](12_async.ipynb) trains in the modes that this notebook predicts.
# - [docs/scheduler.md](../docs/scheduler.md) describes the policies and how the simulator was calibrated.
