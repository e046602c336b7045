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
# # Your own tool, your own reward
#
# A dozen lines of Python become a tool that the model may call and a reward that it is trained on. A recipe names them as
# `module:function`; the module is found from the folder you work in. Here a model from nothing learns to ask for prices
# that it cannot know, in two or three minutes on two CPU cores.
#
# Your functions are yours: they run in the trainer's process, with a time limit and without a sandbox. Code that a *model* writes
# never does. [docs/own-tools.md](../docs/own-tools.md) has the rest: tools with state, remote ones, what becomes of their failures.

# %% tags=["parameters"]
runs_dir = "../runs"
name = "own_tools"
examples = 1000  # conversations to imitate before RL
steps = 6
overrides = {}  # recipe keys, for smaller or larger trials

# %% [markdown]
# ## A dozen lines
#
# The signature and the docstring are what the model is told; each argument needs a type and a line. The reward sees the
# model's own text and the right answer. This one takes a fifth off for every call after the first.

# %%
# %%writefile my_tools.py
from rstar_lab.rl.reward import verify


def price(fruit: str, market: str) -> int:
    """What a fruit costs at a market, in coins.

    Args:
        fruit: Its name.
        market: Where it is sold.
    """
    return (7 * len(fruit) + 3 * ord(fruit[0]) + 5 * ord(market[0])) % 10


def thrifty(text: str, answer: str) -> float:
    """1 for the right price, a fifth less for every call after the first."""
    return float(verify(text, answer)) * 0.8 ** max(text.count("<tool_call>") - 1, 0)


# %%
import json

from rstar_lab.rl.tools.registry import make_tools

tools = make_tools(["my_tools:price"], None)
print(json.dumps(tools["price"].schema, indent=1))

# %%
for arguments in ({"fruit": "kiwi", "market": "north"}, {"fruit": "", "market": "north"}, {"fruit": "kiwi", "market": 4}):
    result = await tools["price"](arguments, seed=0, traj_id="by hand")
    print(arguments, "->", result.outcome, "|", result.text)

# %% [markdown]
# ## Something to imitate
#
# The model starts from nothing, so it is first shown conversations that use the tool: some ask once, some ask twice, many
# just guess. What is good among that is for RL to find out.

# %%
import random
from pathlib import Path

from my_tools import price

from rstar_lab.rl.chat_format.template import SYSTEM_PROMPT, format_question
from rstar_lab.rl.chat_format.conversations import Conversation, Message, tool_calls, write_conversations
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
    said = [Message(role="system", content=SYSTEM_PROMPT), Message(role="user", content=format_question(problem.question))]
    calls = rng.choices([0, 1, 2], [0.5, 0.3, 0.2])[0]
    for i in range(calls):
        asks = "I look it up." if i == 0 else "I look again."
        said.append(Message(role="assistant", content=tool_calls([("price", {"fruit": fruit, "market": market})], asks)))
        said.append(Message(role="tool", content=problem.answer))
    answer, why = (problem.answer, "That is it.") if calls else (str(rng.randrange(10)), "I guess.")
    said.append(Message(role="assistant", content=f"<reason>{why}</reason>\n<answer>\\boxed{{{answer}}}</answer>"))
    return Conversation(conversation_id=str(number), source="notebook", messages=said, tools=[tools["price"].schema])


folder = Path(runs_dir).resolve() / f".{name}"
folder.mkdir(parents=True, exist_ok=True)
write_conversations(folder / "conversations.jsonl", [make_conversation(i) for i in range(examples)])
write_problems(folder / "problems.jsonl", [make_problem(i)[0] for i in range(500)])
print("\n".join(message.content for message in make_conversation(7).messages[1:]))

# %% [markdown]
# ## The recipe
#
# Two keys of it are new: `rl.tools` and `rl.reward`.

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
        "problems_per_step": 12, "group_size": 8, "max_response_tokens": 250, "max_turns": 4, "lr": 5e-4,
        "warmup_steps": 0, "mini_batches": 2, "old_log_probs": "engine", "rollout": "lockstep",
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
# As a job, which finds `my_tools.py` where this notebook runs.

# %%
from rstar_lab.jobs import submit

job = submit(folder / f"{name}.yaml", "laptop", overrides, runs_dir=runs_dir, name=name)
status = job.watch()
assert status == "finished", f"the job {status}; its log ends:\n{job.logs(tail=20)}"

# %% [markdown]
# ## What became of it
#
# The reward of each step, and what the rollouts did: guessing gives way to one call.

# %%
from rstar_lab.analysis import inspect, open_runs

runs = open_runs(runs_dir, run_ids=[f"{name}-rl"])
runs.sql(
    "SELECT step, avg(reward) AS reward, avg((calls = 0)::INT) AS guessed, avg((calls = 1)::INT) AS asked_once, "
    "avg((calls > 1)::INT) AS asked_again FROM trajectories GROUP BY step ORDER BY step"
).round(2)

# %%
runs.sql("SELECT tool, outcome, count(*) AS calls FROM calls GROUP BY ALL ORDER BY calls DESC")

# %% [markdown]
# A rollout that used the tool, as the model wrote it:

# %%
best = runs.trajectories("calls > 0 AND reward > 0", order_by="step DESC", limit=1)
if len(best):
    for message in json.loads(runs.transcript(best.iloc[0].traj_id)["messages"]):
        print(f"{message['role']:9} | {message['content'].strip()}")
else:
    print("none was right: give it more examples, or more steps")

# %%
inspect(runs)
