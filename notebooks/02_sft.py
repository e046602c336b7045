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

# %% [markdown]
# # Teach the form, not the reasoning
#
# rStar2-Agent begins with a **non-reasoning SFT**: the model learns to follow instructions, to write a tool call as JSON
# and to put its answer into `\boxed{}`, and no more, so that responses stay short and RL finds its own way of reasoning.
# Here a small model starts from random weights and imitates conversations whose every program was run in the sandbox.
#
# The job below runs the recipe's SFT and evaluates the model before and after it.

# %% tags=["parameters"]
recipe = "tiny"  # a recipe's file, or the name of one that ships
overrides = {}  # recipe keys: {"sft.epochs": 2, "sft.problems.synthetic.count": 4000}
name = ""  # of this run; empty: the recipe's name
profile = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir = "../runs"
job_id = ""  # attach to this job instead of submitting one
wait = True  # until the job ends; papermill wants it, people may rather not

# %%
from html import escape
from pathlib import Path

import pandas as pd
import plotly.express as px
from IPython.display import HTML, Markdown, display

from rstar_lab.analysis import inspect, open_runs, style
from rstar_lab.analysis.comparison import compare
from rstar_lab.analysis.metrics import measure
from rstar_lab.jobs import attach, submit
from rstar_lab.rl.chat_format.template import CODE_TOOL, render_segments

if job_id:
    job = attach(job_id, runs_dir=runs_dir)
else:
    # `run` without RL stages: SFT and the evaluations.
    job = submit(recipe, profile, overrides | {"stages": []}, command="run", runs_dir=runs_dir, name=name or None)
job

# %% [markdown]
# ## While it runs
#
# `job.watch()` prints its lines; interrupting the cell ends the watching, not the job. Killed, it goes on from its last
# checkpoint when this notebook is run again.

# %%
if wait:
    status = job.watch()
    assert status == "finished", f"the job {status}; its log ends:\n{job.logs(tail=20)}"

# %% [markdown]
# ## What it imitates
#
# One conversation a problem, imperfect on purpose: errors that are mended, wrong programs, guesses, answers given twice.
# What is good among all that is for RL to find out.

# %%
run = name or Path(recipe).stem
traces = pd.read_json(open_runs(runs_dir, run_ids=[f"{run}-sft"]).run_dir(f"{run}-sft") / "traces.jsonl", lines=True)
kinds = traces.groupby("kind").agg(conversations=("kind", "size"), correct=("correct", "mean"), calls=("outcomes", lambda o: o.str.len().mean()))
kinds.sort_values("conversations", ascending=False).style.format({"correct": "{:.0%}", "calls": "{:.2f}"})

# %% [markdown]
# One of them, as the model reads it. The loss counts on the model's own tokens alone, <mark>marked</mark> here; problem,
# tools and what the tool said are context.

# %%
shown = traces[traces.kind == "error_then_fix"].iloc[0]
pieces = render_segments(shown.messages, tools=[CODE_TOOL])
text = "".join(f"<mark>{escape(piece)}</mark>" if own else escape(piece) for piece, own in pieces)
HTML(f'<pre style="white-space: pre-wrap; font-size: 12px; line-height: 1.45">{text}</pre>')

# %% [markdown]
# ## How it learned

# %%
steps = open_runs(runs_dir, run_ids=[f"{run}-sft"]).steps()
figure = px.line(steps, x="step", y="loss", template=style.template(), labels={"loss": "loss (nats a token of the model's own)"})
figure.update_yaxes(rangemode="tozero").update_layout(height=360)

# %% [markdown]
# ## What it can do now
#
# Held-out problems before and after. The mark of a good start is not the pass rate but the form: calls that parse, answers
# in their box, short responses; the rest is RL's work.

# %%
stages = {"from nothing": "base", "after SFT": "sft"}
found = [run_id for run_id in open_runs(runs_dir).runs().run_id if run_id.startswith(f"{run}-") and run_id.endswith(("-base", "-sft"))]
evaluations = open_runs(runs_dir, run_ids=[run_id for run_id in found if run_id != f"{run}-sft"])
table = measure(evaluations, ["pass1", "calls", "tool_error_rate", "response_tokens", "truncation_rate"])
table.pivot(index="run_id", columns="metric", values="value")

# %%
passed = table[table.metric == "pass1"].set_index("run_id")
display(
    Markdown(
        "\n".join(f"- `{row.Index}`: pass@1 **{row.value:.1%}** [{row.low:.1%}, {row.high:.1%}], n = {int(row.n)}" for row in passed.itertuples())
    )
)

# %% [markdown]
# Read some: the calls, what the sandbox said, where an answer came from.

# %%
inspect(evaluations)

# %% [markdown]
# ## What next
#
# `03_train` goes on with RL from this model (`rstar-lab train` takes up the same run); `10_recipe` runs all stages.
# On a cluster the same recipe's SFT runs through verl, on the paper's mix of function calling, instructions and chat
# ([docs/data.md](../docs/data.md) says how that mix is made).
