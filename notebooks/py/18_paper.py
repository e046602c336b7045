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
# # The figures and tables of the paper, from your runs
#
# **You learn** how your runs compare with the published results of rStar2-Agent. **Time**: 5 minutes to read; the cells
# run in a minute.
#
# Every figure is computed from the run store: accuracy over the RL steps (Figure 1), the stages (Figure 8 and the stage
# table), pass@1 by benchmark beside the published rows, response lengths, tool calls, and the words where the model
# reflects. Figures for which the runs have no data are left out. `rstar-lab report --paper RUNS` writes the same as one HTML
# page. [Reproduce the paper](../docs/reproduce-the-paper.md) has the commands that train and evaluate the runs.

# %% tags=["parameters"]
runs_dir: str = ""  # folder of runs; empty: the nearest runs/ folder
runs: list[str] = []  # ids of the runs: training runs and their evaluations; empty: all of the folder

# %%
import pandas as pd
from IPython.display import display

from rstar_lab.analysis import figures_of_the_paper, format_numbers, open_runs, results_table
from rstar_lab.analysis.paper import OTHER_SET, SETS, published
from rstar_lab.common.parameters import check_parameters
from rstar_lab.runs import find_runs_dir

check_parameters(globals())
opened = open_runs(find_runs_dir(runs_dir, required=True), run_ids=runs or None)
figures = figures_of_the_paper(opened)
print("from these runs:", ", ".join(figures))

# %% [markdown]
# ## Accuracy over the steps (Figure 1)
#
# Held-out accuracy of the evaluations during training (`evaluate.during`), with the published values as lines.

# %%
figures.get("held-out accuracy", "no run was evaluated during training: set `evaluate.during` in the recipe")

# %% [markdown]
# ## Training: pass@1, tool errors, response length, reflection words

# %%
figures.get("training")

# %% [markdown]
# ## The stages (Figure 8)
#
# Steps, accuracy and response length of each stage.

# %%
stages = figures.get("stages")
stages if stages is None else format_numbers(stages)

# %% [markdown]
# ## Results by benchmark
#
# pass@1 of your evaluations below the published rows, then mean response tokens, then the published results of the general
# benchmarks, which this package does not run.

# %%
format_numbers(results_table(opened).set_index("model"), (*SETS, OTHER_SET))

# %%
format_numbers(results_table(opened, "response_tokens").set_index("model"))

# %%
pd.DataFrame(published()["general"]).T

# %% [markdown]
# ## Tool calls

# %%
figures.get("tool calls", "these runs have no tool calls")

# %% [markdown]
# ## Where the model reflects
#
# Entropy of tokens before and after tool responses, and the words with the highest entropy. They need token arrays
# (`rl.token_arrays`).

# %%
figures.get("tokens", "these runs store no token arrays")

# %%
figures.get("words", "these runs store no token arrays")

# %% [markdown]
# ## Ablation and budget
#
# Arms with different `label` in one figure; pass@1 over the number of turns allowed.

# %%
for name in ("ablation", "accuracy by turns"):
    if name in figures:
        display(figures[name])

# %% [markdown]
# ## Next steps
#
# - [06_ablation](06_ablation.ipynb) measures what RoC does, over several seeds.
# - [07_tokens](07_tokens.ipynb) looks at entropy and reflection token by token.
