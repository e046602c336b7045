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
# # Evaluate and compare models
#
# **You learn** how good a model is, with intervals, and whether another one is better. **Time**: 5 minutes; two small
# models on 32 problems.
#
# Evaluate a model on a set of problems with several rollouts each. You get avg@k, pass@k and maj@k with intervals that
# account for rollouts sharing a problem, a table of problems, a comparison with another evaluation on the same problems,
# and every rollout to read.
#
# `rstar-lab evaluate MODEL --problems FILE` does the same in a terminal. Results go to the run store. Evaluations that
# are finished are not repeated.

# %% tags=["parameters"]
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
models: list[str] = []  # model folders, runs (their last model) or server URLs; empty: only show `evaluations`, or without them those of the newest demo
problems: str = ""  # a file, the name of a set and a file in its format joined by an equals sign, or aime24, math500 ... from the hub; empty: 32 generated problems
fields: str = ""  # names of the columns in the file, if they differ from question and answer; see `rstar-lab evaluate --help`
samples: int = 4  # rollouts per problem; the paper uses 16
overrides: dict = {}  # recipe keys: {"evaluate.max_response_tokens": 8192, "engine.kind": "transformers"}
evaluations: list[str] = []  # run ids of earlier evaluations to show beside the new ones

# %%
import json
from pathlib import Path

import pandas as pd
from IPython.display import display

from rstar_lab.analysis import compare, format_numbers, inspect, link, open_runs, plot_pass_at_k, problem_table
from rstar_lab.jobs import find_job_runs_dir, submit
from rstar_lab.common.parameters import check_parameters

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir)
if not models and not evaluations:
    demos = sorted(runs_dir.glob("*-eval-rl/run.json"), key=lambda path: path.stat().st_mtime)
    demo = demos[-1].parent.name.removesuffix("-eval-rl") if demos else "tiny"
    models = [f"{demo}-sft", f"{demo}-rl"]

# %% [markdown]
# ## Evaluate
#
# Each evaluation is a job on the hardware of `profile`. Interrupting the cell ends it; running the cell again continues it. On a
# cluster, models and problems need paths that its nodes see.

# %%
from rstar_lab.rl.problems import write_problems
from rstar_lab.rl.synthetic.families import synthesize

if not problems:
    problems = str(runs_dir / ".cache" / "problems_04.jsonl")
    write_problems(Path(problems), synthesize(4, 32))


def evaluate(model):
    arguments = [model, "--problems", problems, "--samples", str(samples), "--fields", fields]
    job = submit("evaluate", profile, overrides, command="evaluate", arguments=arguments, runs_dir=runs_dir)
    try:
        assert job.wait() == "finished", job.logs(tail=20)
    except KeyboardInterrupt:
        job.stop()
        raise
    return json.loads(job.logs(tail=1))


results = [evaluate(model) for model in models]
new_runs = [result["run"].rsplit("/", 1)[-1] for result in results]
shown = list(dict.fromkeys([*evaluations, *new_runs]))
runs = open_runs(runs_dir, run_ids=shown)
table = runs.runs().set_index("run_id").loc[shown]
models_of = table.model.fillna(table.index.to_series())
# Two evaluations of a model are told apart by their run.
names = {run: f"{model} ({run})" if (models_of == model).sum() > 1 else model for run, model in models_of.items()}
table[["model", "status", "trajectories"]]

# %% [markdown]
# ## Results
#
# Intervals are 95%, over problems. With few problems they are wide, even if each has many rollouts.
# maj@k is the share of problems whose most frequent answer is correct.

# %%
from rstar_lab.analysis.metrics import measure
from rstar_lab.common.estimates import format_interval

table = measure(runs, ["pass1", "response_tokens", "calls", "tool_error_rate", "truncation_rate"])
table["shown"] = [f"{row.value:.3g} [{row.low:.3g}, {row.high:.3g}]" for row in table.itertuples()]
summary = table.pivot(index="run_id", columns="metric", values="shown").loc[shown]
majority = {result["run"].rsplit("/", 1)[-1]: result.get(f"maj{samples}") for result in results}
if majority:  # only new evaluations have it
    summary[f"maj@{samples}"] = [format_interval(value, ".3g") if (value := majority.get(run)) else "" for run in shown]
summary.rename(index=names).rename_axis("model")

# %% [markdown]
# ## pass@k
#
# The probability that at least one of k rollouts is correct. If the curve still rises, more rollouts would solve more problems.

# %%
counts = runs.sql("SELECT min(n) AS n FROM (SELECT count(*) AS n FROM trajectories GROUP BY run_id, problem_id)")
ks = [2**i for i in range(int(counts.n.iloc[0]).bit_length())]
inspector = inspect(runs)
link(plot_pass_at_k(runs, ks, names=names), inspector)

# %% [markdown]
# ## Per problem
#
# One row per model and problem. Problems with a pass rate in the middle are the most informative to read.

# %%
solved = pd.concat({names[run]: problem_table(open_runs(runs_dir, run_ids=[run])) for run in shown}, names=["model"])
format_numbers(solved[["problem_id", "rollouts", "pass_rate"]].sort_values("pass_rate"))

# %% [markdown]
# ## Comparison
#
# The first and the last evaluation, on the problems that both contain.

# %%
if len(shown) > 1:
    first, last = shown[0], shown[-1]
    sides = [open_runs(runs_dir, run_ids=[run]) for run in (first, last)]
    display(compare(*sides, name_a=names[first], name_b=names[last]))

# %% [markdown]
# ## Read the rollouts
#
# Click a point of the curve above, or choose in the list.

# %%
inspector

# %% [markdown]
# ## Next steps
#
# - [05_inspect](05_inspect.ipynb) and [07_tokens](07_tokens.ipynb) look into the rollouts of these evaluations.
# - [06_ablation](06_ablation.ipynb) compares methods over several seeds.
