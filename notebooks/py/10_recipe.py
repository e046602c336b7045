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
# # A complete recipe: SFT and three stages of RL
#
# **You learn** how the stages of the paper follow each other, and how to change a recipe. **Time**: 20 minutes, most of
# it training on two CPU cores.
#
# rStar2-Agent trains in stages of growing length and difficulty: first with short responses, then with longer ones when the
# share of truncated responses stops falling, and finally only on problems that the policy does not always solve. The recipe
# is one file. After an interruption, `rstar-lab run` resumes and skips finished parts. `tiny_three_stage` is a small version
# of the paper's recipe for two CPU cores.

# %% tags=["parameters"]
recipe: str = "tiny_three_stage"  # name of a shipped recipe, or a file
overrides: dict = {}  # recipe keys: {"stages.one.steps": 10}
name: str = ""  # name of the run; empty: the name of the recipe
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
dry_run_profile: str = "one_gpu"  # hardware whose memory and time are predicted; empty: no prediction
job_id: str = ""  # attach to this job instead of submitting one
wait: bool = True  # wait until the job ends; the curves are live meanwhile

# %% [markdown]
# ## Change the recipe
#
# The recipe in full. A change is an entry of `overrides` above, such as `{"rl.lr": 2e-6, "stages.one.steps": 10}`; on the command
# line it is `--set rl.lr=2e-6`. All keys, with defaults and meaning: [recipe-keys](../docs/recipe-keys.md). A file of your own
# starts as `rstar-lab recipes NAME > mine.yaml`.

# %%
from rstar_lab.jobs import attach, find_job_runs_dir, submit
from rstar_lab.common.parameters import check_parameters
from rstar_lab.rl.overrides import load_recipe, recipe_file

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir)
print(recipe_file(recipe).read_text())

# %% [markdown]
# ## Memory and time of an update on a GPU
#
# A dry run executes one update of the real trainer on tensors without values, on this machine. It predicts the memory per GPU
# by kind in each phase, and the time of each class of kernels if all run at the peak rate of the GPU.
# For the paper's recipe on 64 GPUs, which takes about a minute:
# `rstar-lab preflight qwen3_14b_mi300x --profile mi300x_8x8 --dry-run`.

# %%
from IPython.display import display

from rstar_lab.dry_run import dry_run_rows, plot_memory, plot_time
from rstar_lab.hardware.profiles import load_profile

if dry_run_profile:
    planned, gpu = load_recipe(recipe, overrides), load_profile(dry_run_profile)
    predicted = list(dry_run_rows(planned, gpu))
    display(plot_memory(predicted), plot_time(predicted))

# %% [markdown]
# ## Submit the job

# %%
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display

from rstar_lab.analysis import inspect, open_runs, phase_table, watch
from rstar_lab.analysis.figures import plot_curves, plot_lengths
from rstar_lab.runs.reader import RunReader

job = attach(job_id, runs_dir=runs_dir) if job_id else submit(
    recipe, profile, overrides, runs_dir=runs_dir, name=name or None
)  # fmt: skip
job

# %% [markdown]
# ## Watch the job
#
# Live curves, then the log. Interrupting the cell stops the printing, not the job. Run the cell again to continue. After a
# reload of the page, interrupt it first: it prints the log from its beginning.

# %%
run = name or Path(recipe).stem
watch(Path(runs_dir) / f"{run}-sft", Path(runs_dir) / f"{run}-rl")

# %%
if wait:
    status = await job.watched()
    assert status == "finished", f"job {job.id}: {status}; the end of its log:\n{job.logs(tail=20)}"

# %% [markdown]
# ## The stages
#
# A stage ends after its steps, or earlier by its hand-off rule. The next stage starts from its model.

# %%
assert job.status() == "finished", f"job {job.id} is {job.status()}: run the cells from here on when it has finished"
training = open_runs(runs_dir, run_ids=[f"{run}-rl"])
info = RunReader(training.run_dir(f"{run}-rl")).info
stages = pd.DataFrame(info["result"]["stages"])
stages[["stage", "first_step", "last_step", "ended_by"]]

# %% [markdown]
# ## Results by stage
#
# Held-out problems; 95% intervals over problems. The model after the last stage is "after RL".

# %%
phase_table(runs_dir, run)

# %% [markdown]
# ## Length and difficulty
#
# Response length over all steps, with the boundaries of the stages. The first stage has a short limit, so that the model
# learns short responses before it may write long ones.

# %%
plot_curves(training, ["response_tokens", "truncation_rate", "pass1", "tool_error_rate_correct"])

# %%
plot_lengths(training)

# %% [markdown]
# ## Problems removed by the filter
#
# Before a stage with a `filter`, the policy samples several rollouts of every problem. Problems that it always solves give
# no signal and are removed.

# %%
tables = [path for path in stages.difficulty if isinstance(path, str)]
for path in tables:
    difficulty = pd.read_parquet(training.run_dir(f"{run}-rl") / path)
    display(Markdown(f"Before stage **{difficulty.stage.iloc[0]}**: {int(difficulty.kept.sum())} of {len(difficulty)} problems kept."))
    solved = difficulty.solved.value_counts().sort_index().rename("problems")
    display(solved.rename_axis(f"solved of {difficulty.samples.max()}").to_frame().T)

# %% [markdown]
# ## Read the trajectories

# %%
inspect(training)

# %% [markdown]
# ## Next steps
#
# - [06_ablation](06_ablation.ipynb) measures what one change of the recipe does.
# - [09_cluster](09_cluster.ipynb) sends the same recipe to a cluster.
