"""Tests of what tools and rewards of the user can read (problem, calls, final state) and of the metrics they report."""

import sys

import pytest
from helpers.rollouts import roll_out

from rstar_lab.analysis import open_runs
from rstar_lab.analysis.filters import where_sql
from rstar_lab.analysis.metrics import measure
from rstar_lab.common.errors import UserError
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.renderers.paper import render_tool_call
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.rollout.records import step_rows
from rstar_lab.rl.step import rollout_metrics
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter

PROBLEM = Problem(problem_id="p", question="How many apples?", answer="5", info={"start": 3})
MODULE = '''
from rstar_lab.rl.problems import Problem

class Basket:
    def __init__(self, problem: Problem):
        self.apples = problem.info["start"]
        self.closed = False

    def __call__(self, add: int, *, problem: Problem) -> str:
        """Add apples to the basket.

        Args:
            add: Number of apples.
        """
        self.apples += add
        return f"{self.apples} of {problem.problem_id}"

    def close(self):
        self.closed = True

def full(text, answer, *, problem, calls, tools):
    basket = tools["Basket"]
    assert not basket.closed
    right = basket.apples == int(answer)
    return float(right), {"apples": basket.apples, "ok_calls": sum(call.outcome == "ok" for call in calls)}

def strange(text, answer, *, weather):
    return 1.0

def infinite(text, answer):
    return 1.0, {"x": float("inf")}
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "baskets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "baskets", raising=False)


async def roll(add: int, reward="baskets:full", sample: int = 0):
    tools = make_tools(["baskets:Basket"], None)
    turns = [f"</reason>\n{render_tool_call('Basket', {'add': add})}", "</reason>\n<answer>5</answer>"]
    return await roll_out(*turns, reward=make_reward(reward), problem=PROBLEM, tools=tools, sample=sample)


async def test_tools_and_reward_read_the_problem_and_the_final_state(module):
    trajectory = await roll(add=2)
    assert trajectory.calls[0].response == "5 of p"
    assert trajectory.reward == 1.0 and trajectory.metrics == {"apples": 5.0, "ok_calls": 1.0}
    assert (await roll(add=1)).reward == 0.0


async def test_metrics_reach_the_store_sql_filters_and_curves(module, tmp_path):
    trajectories = [await roll(add, sample=add) for add in (1, 2)]
    metrics = rollout_metrics(trajectories)
    assert metrics["metrics/apples"] == 4.5
    with RunWriter.open(tmp_path / "runs", "r", kind="train", recipe={"rl": {"reward": "verify"}}, seed=0) as writer:
        writer.write_step("rl", 1, **step_rows(trajectories, {}, "all"), metrics=metrics)
        writer.finish("finished")
    runs = open_runs(tmp_path / "runs")
    assert runs.sql("SELECT metrics['apples'] AS a FROM trajectories ORDER BY sample").a.tolist() == [4.0, 5.0]
    assert runs.count(where_sql({"metrics": {"apples": (5, 6)}})) == 1
    assert measure(runs, ["metrics.apples"])["value"][0] == 4.5
    assert runs.steps()["metrics/apples"][0] == 4.5
    assert dict(RunReader(tmp_path / "runs" / "r").read("trajectories")["metrics"][0].as_py())["apples"] == 4.0


async def test_wrong_parameters_and_metrics_are_named(module):
    with pytest.raises(UserError, match="strange: unknown parameter weather; choose from problem, calls, tools"):
        make_reward("baskets:strange")
    with pytest.raises(UserError, match="requires calls, problem, tools, which the run store does not have"):
        make_reward("baskets:full")("text", "5")
    with pytest.raises(UserError, match=r"infinite returned .*finite numbers"):
        await roll(add=1, reward="baskets:infinite")
