# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The same recipe on a cluster
#
# A profile describes the machine and selects its trainer and scheduler. The job runs on the cluster; this notebook submits it,
# watches it and reads its run. With `profile = "laptop"` the cluster is a Ray cluster of one node on this machine, so every cell
# runs here as it does there. See `docs/cluster.md`.

# %% tags=["parameters"]
recipe = "tiny_fast"  # a recipe's file, or the name of one that ships
overrides = {}  # recipe keys: {"stages.0.steps": 2}; "verl.KEY" is a key of verl
profile = "laptop"  # laptop, one_gpu, h100x8, mi300x_8x8, or a file
backend = ""  # local, ray, slurm; empty: the profile's, and Ray on a laptop
address = ""  # of Ray's dashboard, http://HEAD:8265
runs_dir = "../runs"
job_id = ""  # attach to this job instead of submitting one
timeout_s = 3600

# %%
import subprocess
import sys

from rstar_lab.analysis import inspect, open_runs
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.jobs import attach, list_jobs, submit

# %% [markdown]
# ## Preflight
#
# Checks of the recipe on the profile. A check that needs something this machine does not have is skipped; `submit` runs the same
# checks and stops at a failure.

# %%
command = [sys.executable, "-m", "rstar_lab.cli", "preflight", recipe, "--profile", profile]
print(subprocess.run(command, capture_output=True, text=True).stdout)

# %% [markdown]
# ## Submit
#
# On a laptop this starts a Ray cluster first. Elsewhere the cluster runs already, or the Slurm job starts it.

# %%
cluster = None
if profile == "laptop" and backend in ("", "ray") and not address:
    from rstar_lab.local_ray import LocalRay

    cluster = LocalRay(cpus=2)
    cluster.__enter__()
    backend, address = "ray", cluster.address

# %%
if job_id:
    job = attach(job_id, runs_dir=runs_dir)
else:
    job = submit(
        recipe, profile, overrides, runs_dir=runs_dir, backend=backend or None, address=address or None, preflight=True
    )
job

# %% [markdown]
# ## Find it again
#
# The job does not depend on this notebook. Another notebook, or this one after a restart, finds it by its id.

# %%
again = attach(job.id, runs_dir=runs_dir)
again.status()

# %% [markdown]
# ## Watch
#
# An interrupt stops the printing, not the job.

# %%
status = again.watch(timeout_s=timeout_s)
assert status == "finished", f"the job {status}; the end of its log:\n{again.logs(tail=30)}"

# %% [markdown]
# ## Stop
#
# `stop` ends the job and every process it started, on every backend. This example stops a second job.

# %%
other = submit(
    recipe, profile, overrides, runs_dir=runs_dir, name="stopped", backend=backend or None, address=address or None, preflight=False
)
other.stop()

# %% [markdown]
# ## Analyse
#
# The run store has the same format on every machine, so every notebook can read it.

# %%
runs = open_runs(runs_dir, run_ids=[job.run_dir.name])
plot_curves(runs)

# %%
runs.trajectories()[["traj_id", "step", "reward", "kept", "p_err", "turns", "errors"]].head()

# %%
inspect(runs)

# %% [markdown]
# ## All jobs of this folder

# %%
list_jobs(runs_dir)

# %%
if cluster:
    cluster.close()
