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
# # Look at what the model did
#
# Curves first, then the rollouts behind them. Click a point of a curve, or draw a box around several, and the list
# below shows the trajectories they are made of: what the model wrote, what its code did, token by token.
#
# Everything here reads the run store alone. It works while a run is being written, and needs neither a GPU nor torch.

# %% tags=["parameters"]
runs_dir = "runs"  # a folder of runs, or one run
where = {}  # what the list starts with, such as {"correct": True, "errors": True}
selected = ""  # traj_id to open first
metrics = ["pass1", "tool_error_rate_correct"]  # the curves to draw

# %%
from IPython.display import Markdown, display

from rstar_lab.analysis import inspect, link, open_runs, watch
from rstar_lab.analysis.figures import plot_curves, plot_outcomes

runs = open_runs(runs_dir)
runs.runs()[["run_id", "kind", "status", "steps", "trajectories"]]

# %% [markdown]
# ## Curves
#
# Of the training runs, where there are any: evaluations have one step. Every point knows its rollouts; the button *Box
# Select* takes several. Double-click an empty place to list all of them again.

# %%
inspector = inspect(runs, where=where, selected=selected)
known = runs.runs().query("trajectories > 0")
trained = known.query("kind == 'train'").run_id.tolist()
link(plot_curves(runs, metrics, where={"run_id": trained} if trained else None), inspector)

# %% [markdown]
# ## Trajectories
#
# `j` and `k` go down and up the list, `[` and `]` through the rollouts of the same group, `1` to `6` change the colour
# of the tokens, `c` sets two rollouts side by side, `/` searches. The button *Keys* lists the others.

# %%
inspector

# %% [markdown]
# ## Where calls fail
#
# Click a bar to see the rollouts with that outcome.

# %%
link(plot_outcomes(runs), inspector)

# %% [markdown]
# ## The same from Python
#
# What you choose in the list is here too, and what you set here shows in the list.

# %%
inspector.rows(limit=5)[["traj_id", "step", "reward", "kept", "errors", "answer", "truth"]]

# %%
lucky = runs.trajectories("reward > 0 AND errors > 0", columns=["traj_id", "step", "errors", "kept"], order_by="errors DESC, step", limit=5)
display(Markdown("Right answers after the most tool errors, which RoC is there to thin out:"), lucky)
# inspector.show("right after errors", correct=True, errors=True)

# %% [markdown]
# ## A run that is being written
#
# `watch` follows the newest run until it ends. After a kernel restart, run the cell again: it reads the run's folder.

# %%
newest = known[known.run_id.isin(trained or known.run_id)].sort_values("created").iloc[-1]
watch(newest.path)
