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
# # The same recipe on a cluster
#
# A profile says what the machine has; the job runs there, and this notebook looks on. With `profile = "laptop"` the cluster is
# a Ray of one node on this machine, so that every cell below runs here as it would there. `docs/cluster.md` has the rest.

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
from pathlib import Path

from rstar_lab.analysis import inspect, open_runs
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.jobs import attach, list_jobs, submit

# %% [markdown]
# ## Look before you queue
#
# What cannot be seen from here is a skip; `--strict` on the cluster itself makes it a failure.

# %%
# !rstar-lab preflight {recipe} --profile {profile}

# %% [markdown]
# ## Submit
#
# On a laptop a Ray cluster is started first, with a token of its own; elsewhere it is there already, or Slurm brings it up.

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
# The job does not know this notebook. Another one, or this one after a restart, finds it by its id.

# %%
again = attach(job.id, runs_dir=runs_dir)
again.status()

# %% [markdown]
# ## Watch
#
# An interrupt ends the watching; the job goes on.

# %%
status = again.watch(timeout_s=timeout_s)
assert status == "finished", f"the job {status}; its log ends:\n{again.logs(tail=30)}"

# %% [markdown]
# ## Stop
#
# `stop` ends the job and every process it started, on every backend. Here it is tried on a job that would run for long.

# %%
other = submit(
    recipe, profile, overrides, runs_dir=runs_dir, name="stopped", backend=backend or None, address=address or None, preflight=False
)
other.stop()

# %% [markdown]
# ## Analyse
#
# The run store is the same wherever the run was made: every notebook works on it.

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
