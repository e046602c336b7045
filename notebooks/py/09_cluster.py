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
# # The same recipe on a cluster
#
# **You learn** how to send a job to a cluster, watch it, and find it again. **Time**: 10 minutes on a laptop, where it
# starts a Ray cluster of one node.
#
# The job runs on the cluster; this notebook submits it, watches it and reads its run. With a `host` the notebook runs on your own
# machine: set `host` and `recipe`, and run the cells up to *Attach to the job*. Runs are copied here while they are written.
# Without a host it starts a Ray cluster of one node on this machine, so every cell can be tried without a cluster.
#
# A hardware profile selects trainer and scheduler. Store yours once on the host: `scp my_profile.yaml HOST:rstar-lab/profile.yaml`.
# See [docs/cluster.md](../docs/cluster.md).

# %% tags=["parameters"]
host: str = ""  # login host of the cluster, reached with ssh: HOST, USER@HOST or an alias of ~/.ssh/config
recipe: str = "tiny_fast"  # name of a shipped recipe, or a file
overrides: dict = {}  # recipe keys: {"stages.0.steps": 2}; "verl.KEY" is a key of verl
profile: str = ""  # laptop, one_gpu, h100x8, mi300x_8x8, or a file; empty: the host's own profile, or laptop without a host
backend: str = ""  # local, ray, slurm; empty: the profile's, and Ray on a laptop
address: str = ""  # address of Ray's dashboard: http://HEAD:8265
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage; on a laptop and with ssh the nearest runs/ folder
job_id: str = ""  # attach to this job instead of submitting one
timeout_s: int = 3600  # longest wait for the job, in seconds

# %%
from rstar_lab.analysis import inspect, open_runs, phase_table
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.jobs import JobBoard, attach, describe, find_job_runs_dir, submit
from rstar_lab.common.parameters import check_parameters

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir, host=host)

# %% [markdown]
# ## What the job needs
#
# Time per stage, GPU-hours, cost (with `hardware.price_per_gpu_hour` in the profile), disk, the checks that fail, and the state of
# the queue. `submit` runs the same checks and stops at a failure.

# %%
describe(recipe, profile or None, overrides, host=host or None)

# %% [markdown]
# ## Submit
#
# On a laptop, this starts a Ray cluster. On other hardware the cluster is running already, or the Slurm job starts it.

# %%
cluster = None
if profile in ("", "laptop") and backend in ("", "ray") and not address and not host:
    from rstar_lab.hardware.local_ray import LocalRay

    cluster = LocalRay(cpus=2)
    cluster.__enter__()
    backend, address = "ray", cluster.address
target = {"runs_dir": runs_dir, "backend": backend or None, "address": address or None, "host": host or None}
job = attach(job_id, runs_dir=runs_dir) if job_id else submit(recipe, profile or None, overrides, **target)
job

# %% [markdown]
# ## Attach to the job
#
# The job does not depend on this notebook. Another notebook, or this one after a restart, attaches to it by its id.

# %%
again = attach(job.id, runs_dir=runs_dir)
again.status()

# %% [markdown]
# ## Watch
#
# Interrupting the cell stops the printing, not the job.

# %%
status = again.watch(timeout_s=timeout_s)
assert status == "finished", f"job {again.id}: {status}; the end of its log:\n{again.logs(tail=30)}"

# %% [markdown]
# ## Stop
#
# `stop` ends the job and every process it started, on every backend. This example stops a second job.

# %%
other = submit(recipe, profile or None, overrides, name="stopped", preflight=False, **target)
other.stop()

# %% [markdown]
# ## Analyse
#
# The run store has the same format on every machine, so every notebook can read it.

# %%
phase_table(runs_dir, job.run_dir.name.removesuffix("-rl"))

# %%
runs = open_runs(runs_dir, run_ids=[job.run_dir.name])
plot_curves(runs)

# %%
runs.trajectories()[["traj_id", "step", "reward", "kept", "p_err", "turns", "errors"]].head()

# %%
inspect(runs)

# %% [markdown]
# ## All jobs of this folder
#
# The table follows the jobs of all hosts. Select one to read its log, stop it, or inspect its run.

# %%
JobBoard(runs_dir, inspect=inspect)

# %%
if cluster:
    cluster.close()

# %% [markdown]
# ## Next steps
#
# - [05_inspect](05_inspect.ipynb) opens the run while it is being written.
# - [docs/cluster.md](../docs/cluster.md) describes profiles, images and storage.
