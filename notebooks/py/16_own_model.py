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
# # Train your own model on your own problems
#
# **You learn** how to train a chat model on problems of your own, and how to use it elsewhere. **Time**: half an hour
# on two CPU cores, most of it training.
#
# Give a chat model and a file of problems. The notebook writes a recipe with `rstar-lab init`, checks it, trains, and
# shows what the model learnt. With the defaults it trains SmolLM2-135M-Instruct, which it downloads, on generated
# arithmetic. [docs/own-model.md](../docs/own-model.md) explains every step in
# a terminal.

# %% tags=["parameters"]
model: str = "smollm2-135m"  # a folder, ORG/NAME on the Hugging Face Hub, or smollm2-135m
problems: str = ""  # a CSV, JSONL, JSON or Parquet file with questions and answers; empty: 200 generated problems
fields: str = ""  # names of its columns, if they are not recognised; see `rstar-lab init --help`
recipe: str = "own_model.yaml"  # recipe to write, or to use if it exists; its name is the name of the run
overrides: dict = {}  # recipe keys: {"stages.0.steps": 5, "rl.limits.max_response_tokens": 512}
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
wait: bool = True  # wait until the job ends; the curves are live meanwhile

# %%
import subprocess
import sys
from pathlib import Path

from rstar_lab.analysis import inspect, open_runs, phase_table, watch
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.jobs import find_job_runs_dir, submit
from rstar_lab.common.parameters import check_parameters
from rstar_lab.rl.problems import write_problems
from rstar_lab.rl.synthetic.families import synthesize

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir)
recipe = Path(recipe).absolute()


def rstar_lab(*arguments):
    """Run a command of rstar_lab and print what it prints."""
    done = subprocess.run([sys.executable, "-m", "rstar_lab.cli", *map(str, arguments)], capture_output=True, text=True)
    print(done.stdout + done.stderr)
    assert done.returncode == 0, "the last line says what to change"


# %% [markdown]
# ## Write the recipe
#
# `rstar-lab init` splits the problems into training and held-out ones and writes a recipe of at most 25 lines. If the
# chat template of the model knows no tools, the recipe starts with SFT, which teaches tool calls. Edit the file as you like.

# %%
if not problems:
    problems = recipe.with_name("problems_16.jsonl")
    write_problems(problems, synthesize(0, 200, levels=(1, 2)))
if not recipe.exists():
    rstar_lab("init", "--model", model, "--problems", problems, "--fields", fields, "--profile", profile, "--out", recipe)
print(recipe.read_text())

# %% [markdown]
# ## Check it
#
# Preflight checks model, tokens, problems, sandbox, memory and time before anything is trained.

# %%
rstar_lab("preflight", recipe, "--profile", profile, *(word for key, value in overrides.items() for word in ("--set", f"{key}={value}")))

# %% [markdown]
# ## Train
#
# The job is a process of its own: run the cell again to attach to it or to resume it. After the first step the log says
# how many rollouts are correct, used the tool and have an answer in the asked format, and when the run will end. After a
# reload of the page, interrupt the cell and run it again: it prints the log from its beginning.

# %%
job = submit(str(recipe), profile, overrides, runs_dir=runs_dir)
run = recipe.stem
watch(Path(runs_dir) / f"{run}-sft", Path(runs_dir) / f"{run}-rl")

# %%
if wait:
    status = await job.watched()
    assert status == "finished", f"job {job.id}: {status}; its log ends:\n{job.logs(tail=20)}"

# %% [markdown]
# ## Result
#
# Held-out problems before training, after SFT and after RL, with 95% intervals over problems. With `wait = False`, run the
# cells from here on again when the job has ended.

# %%
phase_table(runs_dir, run) if job.status() == "finished" else "the job is still running"

# %%
run_dir = Path(runs_dir) / f"{run}-rl"
runs = open_runs(runs_dir, run_ids=[run_dir.name]) if (run_dir / "rollup.parquet").exists() else None
plot_curves(runs) if runs else "no step yet"

# %%
inspect(runs) if runs else None

# %% [markdown]
# ## Use the model elsewhere
#
# The trained model is a folder in Hugging Face format with its chat template. transformers loads it, and vLLM serves it on a GPU:
# `vllm serve FOLDER --enable-auto-tool-choice --tool-call-parser hermes`.

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sorted((run_dir / "stages").glob("*"))[-1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = AutoModelForCausalLM.from_pretrained(folder)
    print(folder)
    print(f"{sum(weight.numel() for weight in trained.parameters()) / 1e6:.1f}M parameters, {len(tokenizer)} tokens")

# %% [markdown]
# ## Next steps
#
# - [04_evaluate](04_evaluate.ipynb) compares the model with the one it started from.
# - [11_own_tools](11_own_tools.ipynb) gives it a tool and a reward of your own.
