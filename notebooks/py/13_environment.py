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
# # Train in your own environment
#
# **You learn** how to train in a task with state of your own. **Time**: 10 minutes, most of it training on two CPU cores.
#
# An environment is a task with state. Here every rollout has a small SQL database of its own, and the model queries it
# with a tool. A model with random weights first learns from conversations, some of which contain a failing query. Then
# GRPO-RoC trains it: a failing query makes a successful rollout less likely to be kept, so such queries become rarer.
#
# The environment is 30 lines of code and needs no change of the package.
# [docs/environments.md](../docs/environments.md) describes the protocol: environments can also send messages after a turn, reward
# single turns, score whole groups, and be mixed in one run.

# %% tags=["parameters"]
profile: str = "laptop"  # hardware: laptop, one_gpu, h100x8, mi300x_8x8
runs_dir: str = ""  # folder of runs; empty: the profile's shared storage, on a laptop the nearest runs/ folder
name: str = "environment"  # name of the run
examples: int = 2000  # conversations for SFT
steps: int = 6  # RL steps
overrides: dict = {}  # recipe keys, for example {"rl.group_size": 4}

# %%
from rstar_lab.jobs import find_job_runs_dir
from rstar_lab.common.parameters import check_parameters

check_parameters(globals())
runs_dir = find_job_runs_dir(profile, runs_dir)

# %% [markdown]
# ## The environment
#
# `reset` makes the database and asks the question. `tools` names the methods that the model can call; their schemas are
# generated from types and docstrings. `score` returns the parts of the reward by name; a weight of 0 makes a metric.

# %%
# %%writefile my_shop.py
import sqlite3

from rstar_lab.rl.environments.base import Environment, RewardPart


class Shop(Environment):
    """Look up a price in a database."""

    @property
    def tools(self):
        return [self.query]

    def query(self, sql: str) -> str:
        """Run an SQL query on the table items(name, price) and return its rows.

        Args:
            sql: The query.
        """
        return "\n".join(", ".join(map(str, row)) for row in self.database.execute(sql))

    def reset(self, problem, seed):
        self.truth = problem.answer
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("CREATE TABLE items (name TEXT, price INT)")
        self.database.executemany("INSERT INTO items VALUES (?, ?)", problem.info["items"])
        return problem.question

    def score(self, trajectory):
        failed = sum(call.outcome != "ok" for call in trajectory.calls)
        return {"correct": float(trajectory.answer == self.truth), "failed_queries": RewardPart(failed, weight=0)}

    def close(self):
        self.database.close()


# %% [markdown]
# Problems carry the data of the environment in `info`. Try one rollout by hand before training:

# %%
import random

from my_shop import Shop

from rstar_lab.rl.problems import Problem, write_problems

rng = random.Random(0)
fruits = ["apple", "pear", "plum", "kiwi", "fig"]


def make_problem(number):
    items = [[fruit, rng.randrange(10)] for fruit in rng.sample(fruits, 3)]
    fruit, price = rng.choice(items)
    return Problem(
        problem_id=f"shop-{number}",
        question=f"What does a {fruit} cost?",
        answer=str(price),
        info={"items": items, "fruit": fruit},
    )


problem, shop = make_problem(0), Shop()
print(shop.reset(problem, seed=0), problem.info["items"])
print(shop.query(f"SELECT price FROM items WHERE name = '{problem.info['fruit']}'"), "=", problem.answer)
shop.close()

# %% [markdown]
# ## SFT data
#
# 30% of the conversations query the database correctly. 30% first use a column that does not exist, read the error and
# correct the query. 40% only guess.

# %%
from rstar_lab.rl.renderers.conversations import Conversation, Message, tool_calls, write_conversations
from rstar_lab.rl.renderers.paper import SYSTEM_PROMPT, format_question
from rstar_lab.rl.environments.loading import load_environment

schema = load_environment("shop", "my_shop:Shop", 30.0).tools["query"].schema
ERROR = "OperationalError: no such column: cost"


def make_conversation(number):
    problem = make_problem(number)
    messages = [
        Message(role="system", content=SYSTEM_PROMPT),
        Message(role="user", content=format_question(problem.question)),
    ]
    kind = rng.choices(["guess", "query", "repair"], [0.4, 0.3, 0.3])[0]
    columns = {"guess": [], "query": ["price"], "repair": ["cost", "price"]}[kind]
    for column in columns:
        thought = "I correct the column." if column == "price" and kind == "repair" else "I ask the database."
        sql = f"SELECT {column} FROM items WHERE name = '{problem.info['fruit']}'"
        messages.append(Message(role="assistant", content=tool_calls([("query", {"sql": sql})], thought)))
        messages.append(Message(role="tool", content=problem.answer if column == "price" else ERROR))
    answer, thought = (
        (problem.answer, "The database returned the price.") if columns else (str(rng.randrange(10)), "I guess.")
    )
    messages.append(
        Message(role="assistant", content=f"<reason>{thought}</reason>\n<answer>\\boxed{{{answer}}}</answer>")
    )
    return Conversation(conversation_id=str(number), source="notebook", messages=messages, tools=[schema])


folder = runs_dir / f".{name}"
folder.mkdir(parents=True, exist_ok=True)
write_conversations(folder / "conversations.jsonl", [make_conversation(i) for i in range(examples)])
write_problems(folder / "problems.jsonl", [make_problem(i) for i in range(500)])
print("\n".join(message.content for message in make_conversation(3).messages[1:]))

# %% [markdown]
# ## The recipe
#
# `rl.environments` names the environment, its problems, and the penalties by which RoC ranks successful rollouts.

# %%
import yaml

recipe = {
    "model": "tiny",
    "vocabulary": 700,
    "processes": 2,
    "sft": {
        "conversations": [{"file": str(folder / "conversations.jsonl")}],
        "epochs": 1,
        "optimizer": "muon",
        "lr": 0.002,
        "muon_lr": 0.01,
        "schedule": "linear_tail",
        "batch_size": 10,
        "packing": False,
    },
    "rl": {
        "tools": [],
        "environments": [
            {
                "name": "shop",
                "environment": "my_shop:Shop",
                "problems": {"file": str(folder / "problems.jsonl")},
                "roc_penalties": ["errors"],
            }
        ],
        "problems_per_step": 12,
        "group_size": 8,
        "limits": {"max_response_tokens": 300, "max_turns": 4},
        "lr": 5e-4,
        "warmup_steps": 0,
        "mini_batches": 2,
        "old_log_probs": "engine",
        "schedule": {"lockstep": True},
    },
    "stages": [{"name": "rl", "steps": steps}],
    "engine": {"dtype": "float32", "kv_cache_gb": 0.25, "count": 1},
    "evaluate": {"max_response_tokens": 300},
}
(folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
print(yaml.safe_dump({"rl": {"environments": recipe["rl"]["environments"]}}, sort_keys=False))

# %% [markdown]
# ## Train
#
# The job imports `my_shop.py` from the folder of this notebook.

# %%
from rstar_lab.jobs import submit

job = submit(folder / f"{name}.yaml", profile, overrides, runs_dir=runs_dir, name=name)
status = job.watch()
assert status == "finished", f"job {job.id}: {status}; its log ends:\n{job.logs(tail=20)}"

# %% [markdown]
# ## Result
#
# The share of successful rollouts, the tool-error rate in them, and the failed queries of a rollout. With several
# environments there is one curve for each.

# %%
from rstar_lab.analysis import inspect, open_runs, plot_curves

runs = open_runs(runs_dir, run_ids=[f"{name}-rl"])
plot_curves(runs, ["rewarded", "tool_error_rate_correct", "metrics.failed_queries", "calls"], by="environment")

# %%
runs.sql(
    "SELECT environment, step, avg(reward) AS reward, avg(metrics['failed_queries']) AS failed_queries, "
    "avg((calls = 0)::INT) AS guessed FROM trajectories GROUP BY ALL ORDER BY ALL"
).round(2)

# %% [markdown]
# Outcomes of the queries:

# %%
runs.sql("SELECT step, outcome, count(*) AS calls FROM calls GROUP BY ALL ORDER BY ALL")

# %% [markdown]
# The rollouts themselves. The header shows the environment and the metrics of each.

# %%
inspect(runs)

# %% [markdown]
# ## Next steps
#
# - [docs/environments.md](../docs/environments.md) describes the protocol: messages after a turn, rewards of turns, and groups.
# - [05_inspect](05_inspect.ipynb) shows which queries fail, and why.
