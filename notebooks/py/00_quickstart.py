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

# %%
from IPython.display import Markdown, display

from rstar_lab.analysis import inspect, open_runs, phase_table
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

# %%
phase_table(root, f"{name}")

# %%
far = sorted(path.name for path in root.glob(f"{name}-eval-*-*") if path.name.startswith(tuple(f"{run}-" for run in stages.values())))
if far:
    transfer = measure(open_runs(root, run_ids=far), ["pass1"])
    transfer.insert(0, "model", [next(stage for stage, run in stages.items() if row.startswith(f"{run}-")) for row in transfer.run_id])
    transfer = transfer.sort_values("model", key=lambda column: column.map(list(stages).index))
    display(Markdown("**Problems of another kind**, which the training does not resemble:"))
    display(transfer[["model", "run_id", "value", "low", "high", "n"]].style.hide(axis="index").format(precision=3))

# %% [markdown]
# ## How did it learn?
#
# Each point is one training step, measured over all rollouts of the step, including the ones that RoC dropped. Watch
# **tool errors in correct trajectories**: the reward does not penalise failing code on the way to a correct answer, so
# without RoC nothing pushes the model to write cleaner code.

# %%
plot_curves(training)

# %% [markdown]
# How tool calls ended at each step, and how long the responses were.

# %%
plot_outcomes(training)

# %%
plot_lengths(training)

# %% [markdown]
# ## What changed through RL?
#
# The same held-out problems before and after RL, compared problem by problem.

# %%
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

# %%
last = training.steps().step.max()
kept = training.trajectories(f"step = {last} AND reward > 0", columns=["traj_id", "calls"], order_by="kept DESC, calls DESC", limit=1)
everything = open_runs(root, run_ids=[f"{name}-rl", *stages.values()])  # the links of the comparison open here too
inspect(everything, where={"run_id": f"{name}-rl", "steps": [int(last), int(last)]}, selected=kept.traj_id.iloc[0] if len(kept) else "")

# %% [markdown]
# ## Next steps
#
# - [05_inspect](05_inspect.ipynb) links curves to the rollouts behind them.
# - [03_train](03_train.ipynb) trains any recipe, with your changes, as a job outside of the notebook.
#
# The notebooks are four paths:
#
# | path | notebooks |
# |---|---|
# | **See** what a run did | [00_quickstart](00_quickstart.ipynb), [05_inspect](05_inspect.ipynb), [04_evaluate](04_evaluate.ipynb), [01_sandbox](01_sandbox.ipynb) |
# | **Train** | [02_sft](02_sft.ipynb), [03_train](03_train.ipynb), [10_recipe](10_recipe.ipynb), [16_own_model](16_own_model.ipynb), [09_cluster](09_cluster.ipynb) |
# | **Analyse** | [07_tokens](07_tokens.ipynb), [14_counterfactual](14_counterfactual.ipynb), [15_doctor](15_doctor.ipynb), [06_ablation](06_ablation.ipynb), [12_async](12_async.ipynb), [08_scheduler](08_scheduler.ipynb), [18_paper](18_paper.ipynb) |
# | **Extend** | [11_own_tools](11_own_tools.ipynb), [13_environment](13_environment.ipynb), [17_own_loop](17_own_loop.ipynb) |
#
# A single run, as here, cannot show the effect of RoC: [06_ablation](06_ablation.ipynb) compares GRPO with GRPO-RoC over several seeds.
