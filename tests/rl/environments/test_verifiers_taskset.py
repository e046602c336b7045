"""Tasksets of verifiers (v1) as environments (examples/verifiers_taskset.py), where verifiers is installed."""

import sys
from pathlib import Path

import pytest
from helpers.scripted_engine import ScriptedEngine

pytest.importorskip("verifiers.v1", reason="verifiers is not installed; its pins conflict with those of the tests")

from rstar_lab.rl.environments.loading import load_environment
from rstar_lab.rl.environments.mixture import RunEnvironment
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.paper import render_tool_call
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.trajectory import StopReason

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from verifiers_taskset import VerifiersTaskset

ENVIRONMENTS = """
from verifiers_taskset import VerifiersTaskset

def __getattr__(name):
    return VerifiersTaskset(f"shop_tasks:{name}", 5.0)
"""
MODULE = '''
import verifiers.v1 as vf


class ShopState(vf.State):
    seen: int = 0


class ShopData(vf.TaskData):
    answer: str


class ShelfConfig(vf.ToolsetConfig):
    stock: dict[str, int] = {"apples": 3}


class Shelf(vf.Toolset[ShelfConfig, ShopState]):
    async def setup_task(self, task):
        self.name = task.name

    @vf.tool
    async def count(self, item: str, extra: int = 0) -> str:
        """Return how many items there are."""
        self.state.seen += 1
        return f"{self.config.stock[item] + extra} on shelf {self.name}"


class Index(vf.Toolset[vf.SharedToolsetConfig, ShopState]):
    TOOL_PREFIX = None

    async def setup(self):
        self.items = ["apples"]

    @vf.tool
    def items_of(self) -> str:
        """List the items."""
        self.state.seen += 10
        return ",".join(self.items)


class ShopTask(vf.Task[ShopData, ShopState, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(ShelfConfig())]

    async def setup(self, trace, runtime):
        await runtime.write("note.txt", b"three")

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(vf.extract_boxed_answer(trace.last_reply) == self.data.answer)

    @vf.reward(weight=0.5)
    async def note(self, trace, runtime) -> float:
        return float((await runtime.read("note.txt")) == b"three")

    @vf.metric
    async def looks(self, trace) -> float:
        return trace.state.seen

    @vf.metric
    async def calls(self, trace) -> float:
        return float(len(trace.tool_messages))


class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Index(vf.SharedToolsetConfig())]

    def load(self):
        for name in ("north", "south"):
            yield ShopTask(ShopData(name=name, prompt=f"How many apples are in the {name}?", system_prompt="Count.", answer="3"),
                           self.config.task)


class BrokenTask(ShopTask):
    @vf.reward
    async def right(self, trace) -> float:
        raise KeyError("grader")


class Broken(vf.Taskset[BrokenTask, vf.TasksetConfig]):
    def load(self):
        yield BrokenTask(ShopData(prompt="q", answer="3"))
'''
TOKENIZER = train_tokenizer(["How many apples are in the north?"], 300)
COUNT = f"I look.</reason>\n{render_tool_call('shelf_count', {'item': 'apples'})}"
ITEMS = f"I list.</reason>\n{render_tool_call('items_of', {})}"
RIGHT = "Three.</reason>\n<answer>\\boxed{3}</answer>"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "shop_tasks.py").write_text(MODULE)
    (tmp_path / "shop_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop_tasks", raising=False)


def problems(target="shop_environments:Shop"):
    made = VerifiersTaskset(target.replace("_environments", "_tasks"), 5.0).problems()
    return [problem.model_copy(update={"environment": "shop"}) for problem in made]


async def roll(*turns, problem=None, target="shop_environments:Shop", environment=None):
    environment = environment or load_environment("shop", target, 5.0)
    context = RolloutContext(
        Codec(TOKENIZER, {}), {}, lambda text, answer: 0.0, LimitsSection(max_response_tokens=4000)
    )
    own = RunEnvironment(environment.tools, lambda text, answer: 0.0, environment, {})
    engine = ScriptedEngine(TOKENIZER, lambda prompt, turn: turns[turn])
    task = RolloutTask(problem or problems(target)[0], "t", "g", 0, seed=1)
    return await run_rollout(task, engine, context.with_environments({"shop": own})), engine


def test_tasks_become_problems():
    first, second = problems()
    assert (first.problem_id, first.question) == ("Shop-0", "Count.\n\nHow many apples are in the north?")
    assert second.info == {"task": "1"} and first.answer == "3"


async def test_toolsets_state_rewards_and_metrics_are_those_of_the_task():
    trajectory, engine = await roll(COUNT, ITEMS, COUNT, RIGHT, problem=problems()[1])
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [call.response for call in trajectory.calls] == ["3 on shelf south", "apples", "3 on shelf south"]
    assert trajectory.reward == 2.0 + 0.5
    assert trajectory.metrics == {"right": 1.0, "note": 1.0, "looks": 12.0, "calls": 3.0}
    prompt = TOKENIZER.decode(engine.prompts[0])
    assert '"name": "shelf_count"' in prompt and "Return how many items there are." in prompt


async def test_a_reward_that_raises_is_an_environment_error():
    trajectory, _ = await roll(RIGHT, target="shop_environments:Broken")
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert trajectory.error.startswith("environment shop, problem Broken-0: score raised TaskError")
