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
# # Counterfactual lab: what would another rule have trained on?
#
# **You learn** which rollouts another rule would have trained on, and how far the gradient changes. **Time**: 10
# minutes to read; the cells run in a minute.
#
# RoC generates more rollouts than it trains on. This notebook takes the stored rollouts of finished steps and selects them
# again with other rules, with the functions that training uses. Nothing is sampled. It shows which rollouts each rule
# keeps, the advantages they get, and how far the direction of the gradient changes.
#
# Start with a run of the demo (`make demo`), or with any training run.

# %% tags=["parameters"]
runs_dir: str = ""  # folder of runs; empty: the nearest runs/ folder
run: str = ""  # id of a training run; empty: the one with the most steps that store token arrays
steps: list[int] = []  # steps to compare; empty: the first, the middle and the last three
rules: list = ["paper rule", "released rule", "random", "quotas"]  # or changed keys of rl, such as {"method.clip_high": 0.4}
draws: int = 20  # draws of a random rule

# %%
import pandas as pd
from IPython.display import display

from rstar_lab.analysis import counterfactual, inspect, open_runs
from rstar_lab.common.parameters import check_parameters
from rstar_lab.runs import RunStoreError, find_runs_dir

check_parameters(globals())
runs_dir = find_runs_dir(runs_dir, required=True)
if not run:
    with_arrays = open_runs(runs_dir).sql(
        """SELECT r.run_id, count(*) AS steps FROM runs r JOIN rollup USING (run_id)
           WHERE r.kind = 'train' AND entropy_n > 0 GROUP BY ALL ORDER BY steps DESC, max(r.created) DESC LIMIT 1"""
    )
    if with_arrays.empty:
        raise RunStoreError(f"{runs_dir} has no training run with token arrays: run `make demo`, or set runs_dir")
    run = with_arrays.run_id[0]
    print(f"of all runs here, {run} has the most steps with token arrays; set `run` for another")
runs = open_runs(runs_dir, run_ids=[run])
all_steps = sorted(runs.trajectories(columns=["step"]).step.unique())
steps = steps or sorted({*all_steps[:1], all_steps[len(all_steps) // 2], *all_steps[-3:]})
print(f"run {run}, steps {', '.join(map(str, steps))} of {len(all_steps)}")

# %% [markdown]
# ## By step
#
# *rollouts replaced*: share of the kept rollouts that were not trained on. *quotas* keeps as many successes and failures
# as the paper's rule but ignores the penalties. The paper's rule itself is drawn with the seed of training: if the run used
# it, it replaces nothing.

# %%
result = counterfactual(runs_dir / run, steps, rules, draws=draws)
result.figure

# %%
shown = [
    "step", "rule", "kept", "changed", "positive_share", "error_rate_correct", "mean_positive_advantage", "loss",
    "gradient_norm", "gradient_cosine", "weights_step",
]
noted = result.summary.loc[result.summary.note != "", ["step", "rule", "note"]]
display(result.summary[shown].round(3), *([noted] if len(noted) else []))

# %% [markdown]
# The gradient is computed at the weights of the stored checkpoint that is nearest to the step (`weights_step`). A run keeps only
# its newest checkpoints, so the gradients of older steps are not at the weights that generated them. The gradient also needs the
# tokens of dropped rollouts: train with `rl.token_arrays: all`, as the demo does. If there is no gradient, the column `note`
# of the second table gives the reason.
#
# ## Rollout by rollout
#
# The advantages of one step under each rule. An empty cell means that the rule does not keep the rollout.

# %%
step = steps[-1]
advantages = result.advantages(step)
advantages.round(2)

# %% [markdown]
# Correct rollouts by their penalty: the share of draws in which each rule keeps them. A rule with a preference keeps those
# with a low penalty.

# %%
correct = result.rows[(result.rows.reward > 0) & (result.rows.rule != "as trained")].copy()
paper = result.rows[result.rows.rule == "as trained"].set_index(["step", "traj_id"]).penalty
correct["penalty of the run"] = paper.reindex(pd.MultiIndex.from_frame(correct[["step", "traj_id"]])).to_numpy()
bins = pd.cut(correct["penalty of the run"], [-0.01, 0.01, 0.5, 1.0, 2.0], labels=["0", "up to 0.5", "up to 1", "above 1"])
correct.groupby([bins, "rule"], observed=True).kept_share.agg(["mean", "count"]).unstack("rule").round(2)

# %% [markdown]
# ## The rollouts that a rule would have replaced
#
# The list shows the rollouts of the step. Opened first: one that was trained on and that the last rule drops.

# %%
dropped = advantages[advantages["as trained"].notna() & advantages.iloc[:, -1].isna()].traj_id.tolist()
inspect(runs, where={"step": int(step)}, selected=dropped[0] if dropped else "")

# %% [markdown]
# ## Next steps
#
# - [06_ablation](06_ablation.ipynb) trains with the rules and compares the models.
# - [docs/algorithm.md](../docs/algorithm.md) describes the rules.
