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
# # Doctor: why does a run not learn?
#
# **You learn** how to find out why a run does not learn. **Time**: 5 minutes, of which about three are training two short runs
# on two CPU cores.
#
# This notebook trains a run with a wrong recipe key, lets the doctor name the fault from the log, removes it, and compares the
# learning curves. With the parameter `broken` it diagnoses a run of yours, or a log of verl, TRL, prime-rl and others
# ([all formats](../docs/doctor.md)), and trains nothing.

# %% tags=["parameters"]
runs_dir: str = ""  # folder of runs; empty: the nearest runs/ folder
recipe: str = "tiny_fast"  # name of a shipped recipe, or a file
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
wrong: dict = {"rl.lr": 1e-9}  # the fault: keys of the broken run
right: dict = {}  # the remedy: the keys that replace them
broken: str = ""  # folder or log of a run that does not learn; if empty, the notebook trains one
fixed: str = ""  # folder of the run after the remedy; empty: train one, if this notebook trained the broken run

# %%
from pathlib import Path

from rstar_lab.analysis import inspect, open_runs
from rstar_lab.doctor import doctor
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.jobs import find_job_runs_dir, submit
from rstar_lab.common.parameters import check_parameters

check_parameters(globals())
runs_dir = Path(find_job_runs_dir(profile, runs_dir))


def train(name, keys):
    """Train the recipe with these keys as a job; return the folder of the run."""
    job = submit(recipe, profile, keys, runs_dir=runs_dir, name=name)
    status = job.watch()
    assert status == "finished", f"job {job.id}: {status}; its log ends:\n{job.logs(tail=20)}"
    return runs_dir / f"{name}-rl"


trains = not broken
broken = Path(broken) if broken else train("doctor-broken", wrong)

# %% [markdown]
# ## The diagnosis
#
# The first sentence is the most costly finding. Each finding has the observation with its numbers, the cause, the remedy, and the
# share of measured runs with this finding in which a fault had been planted.

# %%
diagnosis = doctor(broken)
diagnosis

# %%
for finding in diagnosis.findings:
    print(f"{finding.rule.name}: {finding.evidence.text}\n    remedy: {finding.rule.remedy}")

# %% [markdown]
# ## The evidence
#
# The rollouts that the findings name; without any, the rollouts of the last step.

# %%
(log, *_) = diagnosis.logs
named = [name for finding in diagnosis.findings for name in finding.evidence.trajectories]
where = {"traj_id": named} if named else {"step": int(log.rollouts.step.max())}
inspect(log.runs, where=where) if log.source == "rstar_lab" else log.rollouts.tail()

# %% [markdown]
# ## After the remedy
#
# The same recipe without the fault. The doctor looks at the new run too.

# %%
if trains and not fixed:
    fixed = train("doctor-fixed", right)
after = doctor(fixed) if fixed else None
after.verdict if after else "set `fixed` to the run after the remedy"

# %%
plot_curves(open_runs([broken, fixed]), ["pass1", "tool_error_rate"]) if fixed and log.source == "rstar_lab" else None

# %% [markdown]
# ## Next steps
#
# - [05_inspect](05_inspect.ipynb) opens the rollouts behind a finding.
# - [docs/doctor.md](../docs/doctor.md) describes the rules, their thresholds and how often they are wrong.
