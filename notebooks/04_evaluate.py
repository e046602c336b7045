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
# # How good is it, and how sure are we?
#
# A model on a set of problems, several samples each. What you get: avg@k, pass@k and maj@k with intervals that know that
# samples share problems, a table of the problems, a comparison with another evaluation on the same problems, and every
# rollout to read.
#
# The same from a terminal is `rstar-lab evaluate MODEL --problems FILE`; both land in the run store, and what is there
# already is not made again.

# %% tags=["parameters"]
runs_dir = "../runs"
models = ["tiny-rl"]  # a model folder, a run (its last model), or the URL of a server; empty: only look at `evaluations`
problems = "problems.jsonl"  # a file; aime24=FILE for one in that set's schema; aime24, HuggingFaceH4/aime_2024 ... from the hub
fields = ""  # names in the file, where they are others: question=problem,answer=final_answer
samples = 16
overrides = {}  # recipe keys: {"evaluate.max_response_tokens": 8192, "engine.kind": "transformers"}
evaluations = []  # run ids of evaluations that are there already, to look at beside the new ones

# %%
import json
import subprocess
import sys

from IPython.display import display

from rstar_lab.analysis import compare, inspect, link, open_runs, plot_pass_at_k
from rstar_lab.analysis import problems as problem_table

# %% [markdown]
# ## Evaluate
#
# In a process of its own: interrupting the cell ends it, and running the cell again goes on where it was.

# %%
def evaluate(model):
    sets = [item for key, value in overrides.items() for item in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "rstar_lab.cli", "evaluate", model, "--problems", problems, "--samples", str(samples), "--fields", fields]
    done = subprocess.run([*command, "--runs-dir", runs_dir, *sets, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


results = [evaluate(model) for model in models]
made = [result["run"].rsplit("/", 1)[-1] for result in results]
shown = list(dict.fromkeys([*evaluations, *made]))
runs = open_runs(runs_dir, run_ids=shown)
runs.runs()[["run_id", "status", "trajectories"]]

# %% [markdown]
# ## The numbers
#
# 95% intervals, a bootstrap over problems: with few problems they are wide, however many samples each has.

# %%
from rstar_lab.analysis.metrics import measure

table = measure(runs, ["pass1", "response_tokens", "calls", "tool_error_rate", "truncation_rate"])
table["shown"] = [f"{row.value:.3g} [{row.low:.3g}, {row.high:.3g}]" for row in table.itertuples()]
table.pivot(index="run_id", columns="metric", values="shown").loc[shown]

# %% [markdown]
# ## pass@k
#
# The chance that at least one of k samples is right. Where the curve still rises, sampling more would find more.

# %%
counts = runs.sql("SELECT min(n) AS n FROM (SELECT count(*) AS n FROM trajectories GROUP BY run_id, problem_id)")
ks = [2**i for i in range(int(counts.n.iloc[0]).bit_length())]
inspector = inspect(runs)
link(plot_pass_at_k(runs, ks), inspector)

# %% [markdown]
# ## Problem by problem
#
# The ones in the middle are where a model is undecided: there the rollouts are worth reading.

# %%
per_problem = problem_table(runs).sort_values("pass_rate")
per_problem[["problem_id", "runs", "rollouts", "pass_rate"]]

# %% [markdown]
# ## Against another
#
# The first and the last of the evaluations, on the problems that both met.

# %%
if len(shown) > 1:
    first, last = shown[0], shown[-1]
    display(compare(open_runs(runs_dir, run_ids=[first]), open_runs(runs_dir, run_ids=[last]), name_a=first, name_b=last))

# %% [markdown]
# ## Read them
#
# Click a point of the curve above, or choose here.

# %%
inspector
