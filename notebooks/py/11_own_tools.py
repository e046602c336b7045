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
# # Train with your own tool and reward
#
# **You learn** how to add a tool and a reward. **Time**: 5 minutes, of which two to three are training on two CPU
# cores.
#
# A Python function becomes a tool that the model can call, and another function becomes the reward. A recipe names them
# as `module:function`; the module is imported from the working directory. Here a model with random weights learns to look
# up prices that it cannot know.
#
# Your functions are trusted code: they run in the trainer's process with a time limit, without a sandbox. Code that a
# *model* writes always runs in the sandbox. [docs/own-tools.md](../docs/own-tools.md) describes tools with state, remote
# tools and how failures are handled.

# %% tags=["parameters"]
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
name: str = "own_tools"  # name of the run
examples: int = 1000  # conversations for SFT
steps: int = 6  # RL steps
overrides: dict = {}  # recipe keys, for example {"rl.group_size": 4}

# %%
from rstar_lab.jobs import find_job_runs_dir
from rstar_lab.common.parameters import check_parameters

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir)

# %% [markdown]
# ## The tool and the reward
#
# The model sees a schema that is generated from the signature and the docstring: every argument needs a type and a
# description. The reward receives the model's own text and the correct answer. This one multiplies the reward by 0.8 for
# every call after the first.

# %%
# %%writefile my_tools.py
from rstar_lab.rl.reward import verify


def price(fruit: str, market: str) -> int:
    """Return the price of a fruit at a market, in coins.

    Args:
        fruit: Name of the fruit.
        market: Name of the market.
    """
    return (7 * len(fruit) + 3 * ord(fruit[0]) + 5 * ord(market[0])) % 10


def thrifty(text: str, answer: str) -> float:
    """1 for the correct price, times 0.8 for every call after the first."""
    return float(verify(text, answer)) * 0.8 ** max(text.count("<tool_call>") - 1, 0)


# %%
import json

from rstar_lab.rl.tools.registry import make_tools

tools = make_tools(["my_tools:price"], None)
print(json.dumps(tools["price"].schema, indent=1))

# %%
for arguments in ({"fruit": "kiwi", "market": "north"}, {"fruit": "", "market": "north"}, {"fruit": "kiwi", "market": 4}):
    result = await tools["price"](arguments, seed=0, traj_id="test")
    print(arguments, "->", result.outcome, "|", result.text)

# %% [markdown]
# ## SFT data
#
# The model starts from random weights, so SFT teaches it conversations with the tool: 30% call the tool once, 20% twice, and
# 50% only guess. RL has to find out which behaviour is rewarded.

# %%
import random
from pathlib import Path

from my_tools import price

from rstar_lab.rl.renderers.paper import SYSTEM_PROMPT, format_question
from rstar_lab.rl.renderers.conversations import Conversation, Message, tool_calls, write_conversations
from rstar_lab.rl.problems import Problem, write_problems

rng = random.Random(0)
fruits = ["apple", "pear", "plum", "kiwi", "fig", "lime", "melon", "grape"]
markets = ["north", "south", "east", "west"]


def make_problem(number):
    fruit, market = rng.choice(fruits), rng.choice(markets)
    question = f"What does a {fruit} cost at the {market} market?"
    return Problem(problem_id=f"fruit-{number}", question=question, answer=str(price(fruit, market))), fruit, market


def make_conversation(number):
    problem, fruit, market = make_problem(number)
    messages = [Message(role="system", content=SYSTEM_PROMPT), Message(role="user", content=format_question(problem.question))]
    calls = rng.choices([0, 1, 2], [0.5, 0.3, 0.2])[0]
    for i in range(calls):
        thought = "I look up the price." if i == 0 else "I look up the price again."
        messages.append(Message(role="assistant", content=tool_calls([("price", {"fruit": fruit, "market": market})], thought)))
        messages.append(Message(role="tool", content=problem.answer))
    answer, thought = (problem.answer, "The tool returned the price.") if calls else (str(rng.randrange(10)), "I guess.")
    messages.append(Message(role="assistant", content=f"<reason>{thought}</reason>\n<answer>\\boxed{{{answer}}}</answer>"))
    return Conversation(conversation_id=str(number), source="notebook", messages=messages, tools=[tools["price"].schema])


folder = runs_dir / f".{name}"
folder.mkdir(parents=True, exist_ok=True)
write_conversations(folder / "conversations.jsonl", [make_conversation(i) for i in range(examples)])
write_problems(folder / "problems.jsonl", [make_problem(i)[0] for i in range(500)])
print("\n".join(message.content for message in make_conversation(7).messages[1:]))

# %% [markdown]
# ## The recipe
#
# `rl.tools` and `rl.reward` name your functions.

# %%
import yaml

recipe = {
    "model": "tiny",
    "vocabulary": 700,
    "processes": 2,
    "sft": {
        "conversations": [{"file": str(folder / "conversations.jsonl")}],
        "epochs": 1, "optimizer": "muon", "lr": 0.002, "muon_lr": 0.01, "schedule": "linear_tail", "batch_size": 10,
        "packing": False,
    },
    "rl": {
        "tools": ["my_tools:price"], "reward": "my_tools:thrifty",
        "problems_per_step": 12, "group_size": 8, "limits": {"max_response_tokens": 250, "max_turns": 4}, "lr": 5e-4,
        "warmup_steps": 0, "mini_batches": 2, "old_log_probs": "engine", "schedule": {"lockstep": True},
    },
    "stages": [{"name": "rl", "problems": {"file": str(folder / "problems.jsonl")}, "steps": steps}],
    "engine": {"dtype": "float32", "kv_cache_gb": 0.25, "count": 1},
    "evaluate": {"max_response_tokens": 250},
}
Path(folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
print(yaml.safe_dump({"rl": {key: recipe["rl"][key] for key in ("tools", "reward")}}))

# %% [markdown]
# ## Train
#
# The job imports `my_tools.py` from the folder of this notebook.

# %%
from rstar_lab.jobs import submit

job = submit(folder / f"{name}.yaml", profile, overrides, runs_dir=runs_dir, name=name)
status = job.watch()
assert status == "finished", f"job {job.id}: {status}; its log ends:\n{job.logs(tail=20)}"

# %% [markdown]
# ## Result
#
# Mean reward per step, and the share of rollouts that guessed, called the tool once, or called it more than once.

# %%
from rstar_lab.analysis import inspect, open_runs

runs = open_runs(runs_dir, run_ids=[f"{name}-rl"])
runs.sql(
    "SELECT step, avg(reward) AS reward, avg((calls = 0)::INT) AS guessed, avg((calls = 1)::INT) AS one_call, "
    "avg((calls > 1)::INT) AS more_calls FROM trajectories GROUP BY step ORDER BY step"
).round(2)

# %%
runs.sql("SELECT tool, outcome, count(*) AS calls FROM calls GROUP BY ALL ORDER BY calls DESC")

# %% [markdown]
# A rewarded rollout that used the tool:

# %%
best = runs.trajectories("calls > 0 AND reward > 0", order_by="step DESC", limit=1)
if len(best):
    for message in runs.transcript(best.iloc[0].traj_id).itertuples():
        print(f"{message.role:9} | {message.content.strip()}")
else:
    print("no rollout that used the tool was rewarded: increase examples or steps")

# %%
inspect(runs)

# %% [markdown]
# ## Programs with hidden test cases
#
# For programs, no function of your own is needed: `rl.reward: tests` gives 1 if the final program of a rollout passes the hidden
# test cases of its problem, else 0. Programs run in the sandbox, which never contains the expected outputs. Here are four replies
# to one problem. [docs/data.md](../docs/data.md#programs-with-hidden-test-cases) describes problem files; `rstar-lab data
# prepare` makes them from APPS, TACO, CodeContests, Codeforces, SYNTHETIC and LiveCodeBench.

# %% tags=["code"]
import pandas as pd

from rstar_lab.rl.reward import HiddenTests
from rstar_lab.sandbox import Limits, LocalSandbox

tests = [{"input": f"{n}\n", "output": f"{n * (n + 1) // 2}\n"} for n in (1, 2, 10, 100)]
triangle = Problem(problem_id="triangle", question="Print the sum of 1 to n.", info={"tests": tests})
programs = {
    "correct": "n = int(input())\nprint(n * (n + 1) // 2)",
    "wrong from 2 on": "print(int(input()))",
    "raises an exception": "print(sum(range(input() + 1)))",
    "never ends": "while True:\n    pass",
}
rows = []
async with LocalSandbox(Limits(timeout_s=1.0), workers=2) as sandbox:
    for reply, program in programs.items():
        text = f"I add the numbers.</reason>\n<answer>\n```python\n{program}\n```\n</answer>"
        reward, metrics = await HiddenTests(sandbox.run_many).score_rollout(text, triangle)
        rows.append({"reply": reply, "reward": reward, "tests_passed": metrics["tests_passed"]})
pd.DataFrame(rows)

# %% [markdown]
# ## Next steps
#
# - [13_environment](13_environment.ipynb) keeps a state between the calls.
# - [docs/own-tools.md](../docs/own-tools.md) describes tools with state, remote tools and how failures are handled.
