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
# # From a base model to a tool-using model
#
# **You learn** what the demo trained: its accuracy before and after each phase, its curves, and its rollouts. **Time**:
# 5 minutes to read; the cells run in seconds.
#
# `make demo` trains a small model from random weights on your machine with the method of rStar2-Agent. `rstar-lab demo --real`
# does the same with SmolLM2-135M-Instruct and word problems. This notebook shows the result of either.
#
# 1. **Non-reasoning SFT.** The model imitates conversations whose programs were executed. It learns to write tool calls
#    as JSON and to put its answer into `\boxed{}`. Some of the conversations contain errors, wrong programs or guesses.
# 2. **GRPO-RoC.** The model solves new problems with a real Python sandbox. Each problem is rolled out twice as often as
#    needed. RoC keeps half of the rollouts: failures at random, successes preferably with few tool errors.
# 3. **Evaluation** on problems that neither phase has seen.
#
# Every number below is computed in this notebook from the stored runs. If there are no runs yet, run `make demo` first.

# %% tags=["parameters"]
runs_dir: str = ""  # folder of runs; empty: the nearest runs/ folder
name: str = ""  # the recipe's name: tiny, tiny_fast, or smollm2_laptop (`demo --real`); empty: the newest demo

# %% jupyter={"source_hidden": true}
from IPython.display import Markdown, display

from rstar_lab.analysis import format_numbers, inspect, open_runs
from rstar_lab.analysis.comparison import compare
from rstar_lab.analysis.figures import plot_curves, plot_lengths, plot_outcomes
from rstar_lab.analysis.metrics import measure
from rstar_lab.common.parameters import check_parameters
from rstar_lab.runs import find_runs_dir

check_parameters(globals())
root = find_runs_dir(runs_dir, required=True)
demos = sorted(root.glob("*-eval-rl/run.json"), key=lambda path: path.stat().st_mtime)
name = name or (demos[-1].parent.name.removesuffix("-eval-rl") if demos else "tiny")
training = open_runs(root, run_ids=[f"{name}-rl"])
stages = {"before training": f"{name}-eval-base", "after SFT": f"{name}-eval-sft", "after GRPO-RoC": f"{name}-eval-rl"}
evaluations = open_runs(root, run_ids=list(stages.values()))

# %% [markdown]
# ## What did it learn?
#
# Held-out problems, several rollouts each. Intervals are 95%, over problems.

# %% jupyter={"source_hidden": true}
table = measure(evaluations, ["pass1", "tool_error_rate_correct", "response_tokens"])
table.insert(0, "model", table.run_id.map({run: stage for stage, run in stages.items()}))
order = list(stages)
table = table.sort_values("model", key=lambda column: column.map(order.index)).drop(columns="run_id").reset_index(drop=True)
format_numbers(table.pivot(index="model", columns="metric", values="value").loc[order])

# %% jupyter={"source_hidden": true}
passed = table[table.metric == "pass1"].set_index("model")
display(
    Markdown(
        " → ".join(f"**{row.value:.1%}** [{row.low:.1%}, {row.high:.1%}] {model}" for model, row in passed.loc[order].iterrows())
        + f"  (pass@1, {int(passed.clusters.iloc[0])} problems; {', '.join(f'{int(row.n)} rollouts {model}' for model, row in passed.loc[order].iterrows())})"
    )
)

# %% jupyter={"source_hidden": true}
far = sorted(path.name for path in root.glob(f"{name}-eval-*-*") if path.name.startswith(tuple(f"{run}-" for run in stages.values())))
if far:
    transfer = measure(open_runs(root, run_ids=far), ["pass1"])
    transfer.insert(0, "model", [next(stage for stage, run in stages.items() if row.startswith(f"{run}-")) for row in transfer.run_id])
    transfer = transfer.sort_values("model", key=lambda column: column.map(order.index))
    display(Markdown("**Problems of another kind**, which the training does not resemble:"))
    display(transfer[["model", "run_id", "value", "low", "high", "n"]].style.hide(axis="index").format(precision=3))

# %% [markdown]
# ## How did it learn?
#
# Each point is one training step, measured over all rollouts of the step, including the ones that RoC dropped. Watch
# **tool errors in correct trajectories**: the reward does not penalise failing code on the way to a correct answer, so
# without RoC nothing pushes the model to write cleaner code.

# %% jupyter={"source_hidden": true}
plot_curves(training)

# %% [markdown]
# How tool calls ended at each step, and how long the responses were.

# %% jupyter={"source_hidden": true}
plot_outcomes(training)

# %% jupyter={"source_hidden": true}
plot_lengths(training)

# %% [markdown]
# ## What changed through RL?
#
# The same held-out problems before and after RL, compared problem by problem.

# %% jupyter={"source_hidden": true}
card = compare(
    open_runs(root, run_ids=[stages["after SFT"]]), open_runs(root, run_ids=[stages["after GRPO-RoC"]]),
    name_a="after SFT", name_b="after GRPO-RoC",
)  # fmt: skip
card

# %% [markdown]
# ## Read the trajectories
#
# Filter by step, reward, errors, or whether RoC kept the rollout. Open one to read what the model wrote, what its code
# returned, and the entropy of every token. `j` and `k` move through the list. The list starts at the last step.

# %% jupyter={"source_hidden": true}
last = training.steps().step.max()
kept = training.trajectories(f"step = {last} AND reward > 0", columns=["traj_id", "calls"], order_by="kept DESC, calls DESC", limit=1)
everything = open_runs(root, run_ids=[f"{name}-rl", *stages.values()])  # the links of the comparison open here too
inspect(everything, where={"run_id": f"{name}-rl", "steps": [int(last), int(last)]}, selected=kept.traj_id.iloc[0] if len(kept) else "")

# %% [markdown]
# ## Next steps
#
# - `05_inspect` links curves to the rollouts behind them.
# - `03_train` trains any recipe, with your changes, as a job outside of the notebook.
#
# The notebooks are four paths:
#
# | path | notebooks |
# |---|---|
# | **See** what a run did | `00_quickstart`, `05_inspect`, `04_evaluate`, `01_sandbox` |
# | **Train** | `02_sft`, `03_train`, `10_recipe`, `16_own_model`, `09_cluster` |
# | **Analyse** | `07_tokens`, `14_counterfactual`, `15_doctor`, `06_ablation`, `12_async`, `08_scheduler` |
# | **Extend** | `11_own_tools`, `13_environment`, `17_own_loop` |
#
# A single run, as here, cannot show the effect of RoC: `06_ablation` compares GRPO with GRPO-RoC over several seeds.
