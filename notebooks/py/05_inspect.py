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
# # Inspect trajectories
#
# **You learn** how to go from a curve to the rollouts behind it, and from a failure to its cause. **Time**: 10 minutes
# to read; the cells run in seconds.
#
# Click a point of a curve, or draw a box around several points: the list below then shows the rollouts behind them. Open
# a rollout to read what the model wrote, what its code returned, and the log-prob and entropy of every token.
#
# This notebook only reads the run store. It works while a run is being written, and it needs neither a GPU nor torch.

# %% tags=["parameters"]
runs_dir: str = ""  # folder of runs, or one run; empty: the nearest runs/ folder
where: dict = {}  # initial filter of the list: {"correct": True, "errors": True}, or a condition: {"sql": "calls > 2"}
selected: str = ""  # traj_id to open first
metrics: list[str] = ["pass1", "tool_error_rate_correct"]  # curves to draw

# %%
from IPython.display import Markdown, display

from rstar_lab.analysis import (
    explore,
    failed_rollouts,
    failure_groups,
    format_numbers,
    link,
    open_runs,
    overview,
    plot_failures,
    plot_heatmap,
    plot_timeline,
    watch,
)
from rstar_lab.analysis.figures import plot_curves, plot_outcomes
from rstar_lab.common.parameters import check_parameters
from rstar_lab.runs import RunStoreError, find_runs_dir

check_parameters(globals())
runs_dir = find_runs_dir(runs_dir, required=True)
runs = open_runs(runs_dir)
runs.runs()[["run_id", "kind", "status", "steps", "trajectories"]]

# %% [markdown]
# ## One screen
#
# Curves of the training runs (evaluations have a single step), the pass rate of each problem at each step of the training
# run with the most steps, and the list of rollouts. Click a point or a cell to list its rollouts and open the first one. Drag a box
# around several points. Double-click an empty place of a figure to list all rollouts again.
#
# `j` and `k` move down and up the list, `[` and `]` through the rollouts of the same group. `1` to `6` change what the
# token colours show, `c` compares two rollouts side by side, `/` searches. The *Keys* button lists all shortcuts.

# %%
with_rollouts = runs.runs().query("trajectories > 0")
trained = with_rollouts.query("kind == 'train'").sort_values(["steps", "created"]).run_id.tolist()
figures = [plot_curves(runs, metrics, where={"run_id": trained} if trained else None)]
if trained:
    figures.append(plot_heatmap(runs, trained[-1]))
inspector = explore(figures, runs, filters=where, selected=selected)
inspector

# %% [markdown]
# ## Where calls fail
#
# Calls of the training runs; evaluations are left out. Click a bar to list the rollouts with that outcome.

# %%
link(plot_outcomes(runs, where={"run_id": trained} if trained else None), inspector)

# %% [markdown]
# ## Groups of failures
#
# Failed rollouts, and correct ones with a failed call, grouped by how they ended and by the message of the last failed
# call. Names and numbers in messages are replaced. Click a bar or a point to list its rollouts.

# %%
try:
    failed = failed_rollouts(runs, {"run_id": trained} if trained else None, limit=5000)  # a sample; None: all rollouts
    display(link(plot_failures(failed), inspector))
    display(format_numbers(failure_groups(failed).head(10)))
except RunStoreError as error:  # no transcripts are stored, or nothing failed
    display(Markdown(f"No groups: {error}."))

# %% [markdown]
# ## Where the time of a step goes
#
# One lane per rollout of the last training step, by duration. A rollout generates, its calls wait for a sandbox worker
# and run, and at the end it waits for the last rollout of the step. Click a segment to open its rollout.

# %%
timed = runs.sql("SELECT r.run_id, max(step) AS step FROM rollup JOIN runs r USING (run_id) WHERE tool_s_n > 0 AND kind = 'train' GROUP BY ALL ORDER BY max(created)")
if timed.empty:
    display(Markdown("No training run has measured times."))
else:
    display(link(plot_timeline(runs, *timed.iloc[-1]), inspector))

# %% [markdown]
# ## Use the list from Python
#
# `inspector.rows()` returns the rows that the list shows. `inspector.show(...)` sets the filter of the list.

# %%
inspector.rows(limit=5)[["traj_id", "step", "reward", "kept", "errors", "answer", "truth"]]

# %%
with_errors = runs.trajectories("reward > 0 AND errors > 0 AND kept IS NOT NULL", columns=["traj_id", "step", "errors", "kept"], order_by="errors DESC, step", limit=5)
display(Markdown("Correct answers with the most tool errors. RoC keeps these less often:"), with_errors)
# inspector.show("correct after errors", correct=True, errors=True)

# %% [markdown]
# ## Follow a running job
#
# `watch` follows the newest run until it ends. After a kernel restart, run the cell again.

# %%
newest = with_rollouts[with_rollouts.run_id.isin(trained or with_rollouts.run_id)].sort_values("created").iloc[-1]
watch(newest.path)

# %% [markdown]
# ## All runs
#
# One row per run with sparklines and alerts. Select runs to overlay their curves; a click on a point lists its rollouts
# in the inspector below the curves.

# %%
overview(runs_dir)

# %% [markdown]
# ## Next steps
#
# - [07_tokens](07_tokens.ipynb) analyses entropy, forking tokens and reflection tokens of the same run.
# - [14_counterfactual](14_counterfactual.ipynb) asks what another rule would have trained on.
