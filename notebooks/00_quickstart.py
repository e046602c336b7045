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
# # From random weights to a tool user
#
# `rstar-lab demo` has just trained a small model on this machine, by the path of rStar2-Agent:
#
# 1. **Non-reasoning SFT**: the model imitates executed conversations. It learns to write JSON tool calls and to put its
#    answer into `\boxed{}`; many of the conversations hold errors, wrong programs and guesses.
# 2. **GRPO-RoC**: it solves fresh problems with a real Python sandbox. Each problem is rolled out twice as often as is
#    trained on; of the failures a random share is kept, of the successes the cleaner ones are kept more often.
# 3. **Evaluation** on problems that neither stage has seen.
#
# Everything below is computed from the run store in this notebook.

# %% tags=["parameters"]
runs_dir = "../runs"  # what `make demo` leaves
name = "tiny"  # the recipe's name: tiny, or tiny_fast

# %%
from pathlib import Path

from IPython.display import Markdown, display

from rstar_lab.analysis import inspect, open_runs
from rstar_lab.analysis.comparison import compare
from rstar_lab.analysis.figures import plot_curves, plot_lengths, plot_outcomes
from rstar_lab.analysis.metrics import measure

root = Path(runs_dir)
training = open_runs(root, run_ids=[f"{name}-rl"])
stages = {"from nothing": f"{name}-eval-base", "after SFT": f"{name}-eval-sft", "after GRPO-RoC": f"{name}-eval-rl"}
evaluations = open_runs(root, run_ids=list(stages.values()))

# %% [markdown]
# ## What it learned
#
# Held-out problems, several samples each; the interval is a 95% bootstrap over problems.

# %%
table = measure(evaluations, ["pass1", "tool_error_rate_correct", "response_tokens"])
table.insert(0, "model", table.run_id.map({run: stage for stage, run in stages.items()}))
order = list(stages)
table = table.sort_values("model", key=lambda column: column.map(order.index)).drop(columns="run_id").reset_index(drop=True)
table.pivot(index="model", columns="metric", values="value").loc[order]

# %%
passed = table[table.metric == "pass1"].set_index("model")
display(
    Markdown(
        " → ".join(f"**{row.value:.1%}** [{row.low:.1%}, {row.high:.1%}] {model}" for model, row in passed.loc[order].iterrows())
        + f"  (pass@1, {int(passed.n.iloc[0])} rollouts of {int(passed.clusters.iloc[0])} problems each)"
    )
)

# %% [markdown]
# ## How it learned it
#
# Each point is a step of training, over all rollouts of the step, dropped ones too. **Tool errors inside correct
# trajectories** is what RoC is about: a right answer that came by way of failing code is rewarded all the same, and
# without RoC nothing tells the model to write cleaner code.

# %%
plot_curves(training)

# %% [markdown]
# How calls ended, step by step, and how long the responses were.

# %%
plot_outcomes(training)

# %%
plot_lengths(training)

# %% [markdown]
# ## What it does now
#
# The same held-out problems before and after RL, problem by problem.

# %%
card = compare(
    open_runs(root, run_ids=[stages["after SFT"]]), open_runs(root, run_ids=[stages["after GRPO-RoC"]]),
    name_a="after SFT", name_b="after GRPO-RoC",
)  # fmt: skip
card

# %% [markdown]
# ## Read the trajectories
#
# Filter by step, reward, kept and errors; open one to read what the model wrote, what its code did, and the value of
# every token. `j` and `k` go through the list. Here is one that RoC kept, from the last step.

# %%
last = training.steps().step.max()
kept = training.trajectories(f"step = {last} AND reward > 0", columns=["traj_id", "calls"], order_by="kept DESC, calls DESC", limit=1)
inspect(training, where={"steps": [int(last), int(last)]}, selected=kept.traj_id.iloc[0] if len(kept) else "")

# %% [markdown]
# ## What next
#
# - `05_inspect` links curves to the rollouts behind them; `07_tokens` looks at entropy and reflection.
# - `03_train` trains with any recipe and any change to it, as a job outside the notebook.
# - `06_ablation` sets GRPO against GRPO-RoC over several seeds: one run, as here, proves nothing about RoC.
