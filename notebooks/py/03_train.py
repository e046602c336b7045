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
# # Train a recipe as a job
#
# **You learn** how to train a recipe with your changes, and how to find the job again. **Time**: 10 minutes, most of it
# training on two CPU cores; with `recipe` `tiny_fast` it is shorter.
#
# This notebook submits a recipe, with your changes, as a job. The job is a separate process: it keeps running when you
# close the notebook, restart the kernel or lose the browser. Run the cells again and they attach to the running job. If
# the job was killed, they submit it again and it continues from its last checkpoint.

# %% tags=["parameters"]
recipe: str = "tiny"  # name of a shipped recipe, or a file
overrides: dict = {}  # recipe keys: {"stages.0.steps": 20, "rl.method.roc.rule": "none"}
name: str = ""  # name of the run; empty: the name of the recipe
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
job_id: str = ""  # attach to this job; empty: to a running job of this run, else submit a new one
wait: bool = True  # wait until the job ends; the curves are live meanwhile

# %%
from pathlib import Path

from rstar_lab.analysis import inspect, open_runs, phase_table, watch
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.jobs import attach, find_job_runs_dir, list_jobs, submit
from rstar_lab.common.parameters import check_parameters

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir)
run = name or Path(recipe).stem
running = [job for job in list_jobs(runs_dir) if job.spec.run == f"{run}-rl" and job.status() == "running"]
if job_id:
    job = attach(job_id, runs_dir=runs_dir)
elif running:
    job = running[-1]
else:
    job = submit(recipe, profile, overrides, runs_dir=runs_dir, name=name or None)
job

# %% [markdown]
# ## Watch the job
#
# The curves are live: they move on from SFT to RL while the job writes its runs.

# %%
root = Path(runs_dir)
watch(root / f"{run}-sft", root / f"{run}-rl")

# %% [markdown]
# The log of the job. Interrupting the cell stops the printing, not the job. After a reload of the page, interrupt the cell and
# run it again: it prints the log from its beginning.

# %%
if wait:
    status = await job.watched()
    assert status == "finished", f"job {job.id}: {status}; its log ends:\n{job.logs(tail=20)}"

# %% [markdown]
# ## Result
#
# Held-out problems before training, after SFT and after RL, with 95% intervals over problems. With `wait = False`, run these
# cells again when the job has ended.

# %%
phase_table(root, run) if job.status() == "finished" else "the job is still running"

# %%
runs = open_runs(runs_dir, run_ids=[f"{run}-rl"]) if (root / f"{run}-rl" / "rollup.parquet").exists() else None
plot_curves(runs) if runs else "no step yet"

# %%
runs.steps().tail() if runs else None

# %%
inspect(runs) if runs else None

# %% [markdown]
# ## All jobs of this folder
#
# `attach(id)` connects to a job from any notebook. `job.stop()` ends it together with every process that it started.

# %%
list_jobs(runs_dir)

# %% [markdown]
# ## Next steps
#
# - [05_inspect](05_inspect.ipynb) goes from a point of a curve to the rollouts behind it.
# - [04_evaluate](04_evaluate.ipynb) compares the trained model with another one on the same problems.
