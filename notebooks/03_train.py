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
# # Train, outside the notebook
#
# A recipe and any change to it, submitted as a job. The job is a process of its own: closing the notebook, restarting
# the kernel or losing the browser does not touch it, and the same cells find it again. Killed, it goes on from its last
# checkpoint when it is submitted anew under the same name.

# %% tags=["parameters"]
recipe = "tiny"  # a recipe's file, or the name of one that ships
overrides = {}  # recipe keys: {"stages.0.steps": 20, "rl.roc": "none"}
name = ""  # of this run; empty: the recipe's name
profile = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir = "../runs"
job_id = ""  # attach to this job instead of submitting one
wait = True  # until the job ends; papermill wants it, people may rather not

# %%
from pathlib import Path

from rstar_lab.analysis import inspect, open_runs, watch
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.jobs import attach, list_jobs, submit

if job_id:
    job = attach(job_id, runs_dir=runs_dir)
else:
    job = submit(recipe, profile, overrides, runs_dir=runs_dir, name=name or None)
job

# %% [markdown]
# ## While it runs
#
# `job.watch()` prints its lines; interrupting the cell ends the watching, not the job.

# %%
if wait:
    status = job.watch()
    assert status == "finished", f"the job {status}; its log ends:\n{job.logs(tail=20)}"

# %%
run_dir = job.run_dir
watch(run_dir) if run_dir else "not begun yet: run this cell again"

# %% [markdown]
# ## What it did

# %%
run_name = (name or Path(recipe).stem) + "-rl"
runs = open_runs(runs_dir, run_ids=[run_name])
plot_curves(runs)

# %%
runs.steps().tail()

# %%
inspect(runs)

# %% [markdown]
# ## All jobs of this folder
#
# `attach(id)` takes one up again, from any notebook; `job.stop()` ends it with every process it started.

# %%
list_jobs(runs_dir)
