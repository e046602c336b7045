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
# # SFT: teach the format, not the reasoning
#
# **You learn** how the model learns to call the tool, and what it imitates. **Time**: 10 minutes, most of it SFT on two
# CPU cores; with `recipe` `tiny_fast` it is shorter.
#
# rStar2-Agent starts with a **non-reasoning SFT**. The model learns to follow instructions, to write tool calls as JSON
# and to put its answer into `\boxed{}`. It does not learn to reason: responses stay short, and reasoning is left to RL.
# Here a small model starts from random weights and imitates conversations whose programs were all executed in the sandbox.
#
# The job below runs the SFT of a recipe and evaluates the model before and after it.

# %% tags=["parameters"]
recipe: str = "tiny"  # name of a shipped recipe, or a file
overrides: dict = {}  # recipe keys: {"sft.epochs": 2, "sft.problems.synthetic.count": 4000}
name: str = ""  # name of the run; empty: the name of the recipe
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
job_id: str = ""  # attach to this job instead of submitting a new one
wait: bool = True  # wait until the job ends; the curve is live meanwhile

# %%
from html import escape
from pathlib import Path

import pandas as pd
import plotly.express as px
from IPython.display import HTML, display

from rstar_lab.analysis import inspect, open_runs, phase_table, watch
from rstar_lab.analysis.figure import Figure
from rstar_lab.jobs import attach, find_job_runs_dir, submit
from rstar_lab.common.parameters import check_parameters
from rstar_lab.rl.renderers.paper import CODE_TOOL, render_segments

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir)

if job_id:
    job = attach(job_id, runs_dir=runs_dir)
else:
    # Without RL stages, the job runs SFT and the evaluations.
    job = submit(recipe, profile, overrides | {"stages": []}, runs_dir=runs_dir, name=name or None)
job

# %% [markdown]
# ## Watch the job
#
# A live curve and the log. Interrupting the cell stops the printing, not the job. If the job is killed, submit it
# again: it continues from its last checkpoint. After a reload of the page, interrupt the cell and run it again: it prints the
# log from its beginning.

# %%
run = name or Path(recipe).stem
display(watch(Path(runs_dir) / f"{run}-sft"))
if wait:
    status = await job.watched()
    assert status == "finished", f"job {job.id}: {status}; its log ends:\n{job.logs(tail=20)}"

# %% [markdown]
# ## The training data
#
# One conversation per problem. Some are imperfect on purpose: errors that are fixed in the next turn, wrong programs,
# guesses, answers given twice. RL has to find out which of these behaviours lead to a correct answer.

# %%
assert job.status() == "finished", f"job {job.id} is {job.status()}: run the cells from here on when it has finished"
traces = pd.read_json(open_runs(runs_dir, run_ids=[f"{run}-sft"]).run_dir(f"{run}-sft") / "traces.jsonl", lines=True)
kinds = traces.groupby("kind").agg(conversations=("kind", "size"), correct=("correct", "mean"), calls=("outcomes", lambda o: o.str.len().mean()))
kinds.sort_values("conversations", ascending=False).style.format({"correct": "{:.0%}", "calls": "{:.2f}"})

# %% [markdown]
# One conversation as the model reads it. Only the model's own tokens, <mark>marked</mark> here, contribute to the loss.
# The problem, the tool schemas and the tool responses are context.

# %%
shown = traces[traces.kind == "error_then_fix"].iloc[0]
pieces = render_segments(shown.messages, tools=[CODE_TOOL])
text = "".join(f"<mark>{escape(piece)}</mark>" if own else escape(piece) for piece, own in pieces)
HTML(f'<pre style="white-space: pre-wrap; font-size: 12px; line-height: 1.45">{text}</pre>')

# %% [markdown]
# ## The loss curve

# %%
steps = open_runs(runs_dir, run_ids=[f"{run}-sft"]).steps()
figure = px.line(steps, x="step", y="loss", labels={"loss": "loss (nats per model token)"})
Figure(figure.update_yaxes(rangemode="tozero").update_layout(height=360), steps[["step", "loss"]])

# %% [markdown]
# ## Before and after
#
# Held-out problems before and after SFT. As a starting point for RL, the pass rate matters less than the format: calls that
# parse, boxed answers, short responses.

# %%
phase_table(runs_dir, run, ("pass1", "calls", "tool_error_rate", "response_tokens", "truncation_rate"))

# %% [markdown]
# Read some rollouts: the tool calls, the output of the sandbox, and how the model reached its answer.

# %%
table = open_runs(runs_dir).runs()
evaluations = table[table.run_id.str.startswith(f"{run}-") & (table.kind == "evaluate") & table.run_id.str.endswith(("-base", "-sft"))]
inspect(open_runs(runs_dir, run_ids=list(evaluations.run_id)))

# %% [markdown]
# ## Next steps
#
# - [03_train](03_train.ipynb) continues with RL from this model.
# - [10_recipe](10_recipe.ipynb) runs all stages. On a cluster, the SFT of a recipe runs through verl on the paper's mixture of function calling, instruction
#   following and chat ([docs/data.md](../docs/data.md)).
