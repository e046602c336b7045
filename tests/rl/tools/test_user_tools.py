"""The user's own tools and rewards: what the model is told of them, how their failures are named, whose state is whose."""

import asyncio
import json
import sys
import time
from textwrap import dedent

import pytest
from helpers.rollouts import roll_out
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_training import problem, recipe_of
from helpers.slots import scheduled

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.plugins import load_named
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.formats import render_prompt
from rstar_lab.rl.renderers.paper import PaperRenderer, render_tool_call
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.reward import make_reward, reward
from rstar_lab.rl.rollout.agent_loop import execute_call
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.run import run_rollouts
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.tools.base import argument_error
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.tools.user import ToolUnavailable, UserTool
from rstar_lab.tool_calls import ToolCall

PRICES = {"apple": 3, "pear": 5}


def lookup(item: str, count: int = 1, where: list[str] | None = None) -> int:
    """The price of some fruit.

    Args:
        item: Name of the fruit.
        count: How many.
        where: Shops to ask.
    """
    if item == "hang":
        time.sleep(60)
    if item == "exit":
        raise SystemExit
    return PRICES[item] * count


class Counter:
    """Counts up."""

    closed: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, by: int, *, seed: int, traj_id: str) -> dict[str, object]:
        """Add to the total.

        Args:
            by: What to add; 0 hangs.
        """
        if by == 0:
            time.sleep(60)
        self.total += by
        return {"total": self.total, "of": traj_id, "seeded": seed}

    def close(self) -> None:
        self.closed.append(self.total)


async def remote(query: str) -> str:
    """Ask a service.

    Args:
        query: What to ask.
    """
    await asyncio.sleep(0)
    if query == "down":
        raise ToolUnavailable("no answer")
    if query == "slow":
        await asyncio.sleep(60)
    return query.upper()


async def call(tool, arguments, traj_id="t", name=None):
    tools = {tool.schema["function"]["name"]: tool}
    wanted = ToolCall(name or next(iter(tools)), arguments, None, "")
    return await execute_call(wanted, tools, PaperRenderer(PromptStyle()), seed=7, traj_id=traj_id, max_chars=1000)


def test_the_schema_matches_signature_and_docstring():
    function = UserTool("m:lookup", lookup, 1.0).schema["function"]
    assert (function["name"], function["description"]) == ("lookup", "The price of some fruit.")
    assert function["parameters"]["required"] == ["item"]
    assert function["parameters"]["properties"]["count"] == {"type": "integer", "description": "How many."}
    of_class = UserTool("m:Counter", Counter, 1.0).schema["function"]
    assert list(of_class["parameters"]["properties"]) == ["by"], "what the loop fills in is not the model's"
    prompt = render_prompt("q", tools=[UserTool("m:lookup", lookup, 1.0).schema])
    assert json.dumps(function["parameters"]) in prompt


GOOGLE_STYLES = [
    'Args:\n    city: The city.\n    unit: A unit. (choices: ["celsius", "fahrenheit"])',
    "Args:\n    city (str): The city.\n    unit (str, optional): A unit. (choices: [celsius, fahrenheit])",
    "Arguments:\n    city : The city.\n    unit : A unit. (choices: ['celsius', 'fahrenheit'])",
    'Args:\n    city (dict[str, tuple(int)]): The city.\n    unit: A unit. (choices: ["celsius", "fahrenheit",])',
    "Parameters:\n    city: The city.\n    unit: A unit. (choices: celsius, fahrenheit)\n\nReturns:\n    The weather (str): as text.",
]


@pytest.mark.parametrize("arguments", GOOGLE_STYLES)
def test_the_usual_forms_of_a_docstring_are_read(arguments):
    def weather(city: str, unit: str = "celsius") -> str:
        return city

    weather.__doc__ = f"Ask for the weather.\n\n{arguments}\n"
    properties = UserTool("m:weather", weather, 1.0).schema["function"]["parameters"]["properties"]
    assert properties["city"]["description"] == "The city."
    assert properties["unit"]["enum"] == ["celsius", "fahrenheit"] and properties["unit"]["description"] == "A unit."


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("größer", "größer"), ({"w": "größer"}, '{"w": "größer"}'), (["答案", 1], '["答案", 1]'), ({(1, 2): "x"}, '{"1,2": "x"}'),
        ({"at": object}, "class 'object'"), ({1}, "[1]"),
    ],
)  # fmt: skip
async def test_results_keep_their_letters(value, text):
    def f(x: str) -> object:
        """Return something.

        Args:
            x: Anything.
        """
        return value

    result = await call(UserTool("m:f", f, 5.0), {"x": "é"})
    assert text in result.text and result.outcome is Outcome.OK and result.code == '{"x": "é"}'


@pytest.mark.parametrize(
    ("arguments", "outcome", "text"),
    [
        ({"item": "apple"}, Outcome.OK, "3"),
        ({"item": "pear", "count": 2}, Outcome.OK, "10"),
        ({"item": "pear", "where": ["here"]}, Outcome.OK, "5"),
        ({"item": "pear", "where": None}, Outcome.OK, "5"),
        ({"item": "plum"}, Outcome.EXCEPTION, "KeyError: 'plum'"),
        ({"item": "exit"}, Outcome.EXCEPTION, "SystemExit"),
        ({}, Outcome.INVALID_ARGUMENTS, "missing argument 'item'"),
        ({"item": "apple", "color": "red"}, Outcome.INVALID_ARGUMENTS, "unknown argument 'color'"),
        ({"item": "apple", "count": "2"}, Outcome.INVALID_ARGUMENTS, "must be a integer"),
        ({"item": "apple", "where": [1]}, Outcome.INVALID_ARGUMENTS, "argument 'where.0' of lookup"),
        ({"item": 3}, Outcome.INVALID_ARGUMENTS, "must be a string"),
    ],
)
async def test_every_call_has_an_outcome(arguments, outcome, text):
    result = await call(UserTool("m:lookup", lookup, 20.0), arguments)
    assert result.outcome is outcome
    assert text in result.text
    unknown = await call(UserTool("m:lookup", lookup, 20.0), {}, name="look_up")
    assert unknown.outcome is Outcome.UNKNOWN_TOOL


VALUES = {"string": "1", "integer": 1, "number": 1.5, "boolean": True, "array": [1], "object": {"a": 1}}


@pytest.mark.parametrize("kind", VALUES)
def test_only_values_of_its_type_are_an_argument(kind):
    properties = {"x": {"type": kind}}
    schema = {"function": {"name": "f", "parameters": {"properties": properties}}}
    fitting = {name for name, value in VALUES.items() if argument_error(schema, {"x": value}) is None}
    assert fitting == {kind} | ({"integer"} if kind == "number" else set())


@pytest.mark.slow
async def test_a_call_that_hangs_is_abandoned_and_frees_its_place():
    tool = UserTool("m:lookup", lookup, 1.0)  # long enough to start all threads on a busy machine
    hung = await asyncio.gather(*(call(tool, {"item": "hang"}) for _ in range(70)))  # more than its threads
    assert {result.outcome for result in hung} == {Outcome.TIMEOUT}
    assert all(result.run_s >= 0.99 for result in hung) and max(result.queue_s for result in hung) > 0.2
    tool.time_limit_s = 20.0
    assert (await call(tool, {"item": "apple"})).outcome is Outcome.OK


async def test_an_instance_a_trajectory_in_order_and_closed_at_its_end():
    tool = UserTool("m:Counter", Counter, 20.0)
    answers = await asyncio.gather(*(call(tool, {"by": by}, traj) for by in (1, 2, 3) for traj in "ab"))
    results = [json.loads(answer.text) for answer in answers]
    assert (
        [t["total"] for t in results if t["of"] == "a"] == [1, 3, 6] == [t["total"] for t in results if t["of"] == "b"]
    )
    assert {t["seeded"] for t in results} == {7}
    await tool.close("a")
    assert Counter.closed.pop() == 6
    assert json.loads((await call(tool, {"by": 1}, "a")).text)["total"] == 1
    tool.time_limit_s = 0.2
    assert (await call(tool, {"by": 0}, "b")).outcome is Outcome.TIMEOUT
    tool.time_limit_s = 20.0
    assert json.loads((await call(tool, {"by": 4}, "b")).text)["total"] == 4, "a hung instance is not used again"


async def test_an_async_tool_and_a_failure_that_is_not_the_models():
    tool = UserTool("m:remote", remote, 20.0)
    assert (await call(tool, {"query": "a"})).text == "A"
    assert (await call(tool, {"query": "down"})).outcome is Outcome.SANDBOX_ERROR
    tool.time_limit_s = 0.1
    assert (await call(tool, {"query": "slow"})).outcome is Outcome.TIMEOUT


async def test_a_rollout_uses_user_tools_and_a_user_reward():
    tools = {"lookup": UserTool("m:lookup", lookup, 20.0), "Counter": UserTool("m:Counter", Counter, 20.0)}
    asked: list[tuple[str, dict]] = [("lookup", {"item": "pear"}), ("Counter", {"by": 2}), ("lookup", {"item": "kiwi"})]
    turns = ["</reason>\n" + "\n".join(render_tool_call(*one) for one in asked), "</reason><answer>5</answer>"]
    Counter.closed.clear()
    trajectory = await roll_out(*turns, reward=lambda text, truth: text.count("answer") / 4, tools=tools)
    assert [(c.tool, str(c.outcome)) for c in trajectory.calls] == [
        ("lookup", "ok"), ("Counter", "ok"), ("lookup", "exception"),
    ]  # fmt: skip
    assert [c.response for c in trajectory.calls][0::2] == ["5", "KeyError: 'kiwi'"]
    assert trajectory.reward == 0.5 and trajectory.p_err == pytest.approx(1 / 3)
    assert Counter.closed == [2]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = '''
        def find(item: str) -> str:
            """Find it.

            Args:
                item: What.
            """
            return item

        def bare(item: str): ...

        def untyped(item):
            """Find it."""

        def many(*items: str):
            """Find them."""

        def score(text, answer):
            return 0.5

        def nothing(text, answer): ...

        def broken(text, answer):
            return 1 / 0

        number = 3
    '''
    (tmp_path / "mine_for_this_test.py").write_text(dedent(source))
    (tmp_path / "half_for_this_test.py").write_text("x = 1\nimport no_such_thing_at_all\n")
    yield tmp_path
    for name in ("mine_for_this_test", "half_for_this_test"):
        sys.modules.pop(name, None)


MINE = "mine_for_this_test"


def test_a_recipe_names_them_and_the_door_names_what_is_wrong(own):
    session = RunSession(resolve(recipe_of([], tools=["python", f"{MINE}:find"], reward=f"{MINE}:score")), Reporter())
    assert session.reward("text", "truth") == 0.5
    assert RunSession(resolve(recipe_of([])), Reporter()).reward is reward
    wrong = {
        f"{MINE}:fimd": "has no fimd; did you mean find",
        "no_such_module_here:f": "no module no_such_module_here",
        "half_for_this_test:x": "half_for_this_test.py:2: ModuleNotFoundError",
        f"{MINE}:bare": "no docstring",
        f"{MINE}:untyped": "missing a type hint",
        f"{MINE}:many": "parameter items",
        f"{MINE}:number": "is a int; expected a function or a class",
    }
    for name, message in wrong.items():
        with pytest.raises(UserError, match=f"rl.tools: {name}:? .*{message}"):
            RunSession(resolve(recipe_of([], tools=[name])), Reporter())
    with pytest.raises(UserError, match=f"rl.reward: {MINE}:number is a int; expected a function"):
        RunSession(resolve(recipe_of([], reward=f"{MINE}:number")), Reporter())
    with pytest.raises(UserError, match="two tools are called find"):
        make_tools([f"{MINE}:find", f"{MINE}:find"], None)


def test_a_reward_that_fails_stops_the_run_with_its_name(own):
    for name, message in (("nothing", "TypeError"), ("broken", "ZeroDivisionError")):
        with pytest.raises(UserError, match=f"rl.reward: {MINE}:{name} failed: {message}"):
            make_reward(f"{MINE}:{name}")("text", "truth")


async def test_such_an_error_is_the_runs_and_no_group_of_errors(own):
    tokenizer = train_tokenizer(["text"], 300)
    engine = ScriptedEngine(tokenizer, lambda prompt, turn: "</reason><answer>5</answer>")
    tasks = [RolloutTask(problem(f"p{i}", 1.0), f"t{i}", "g", i, i) for i in range(5)]
    with pytest.raises(UserError, match="broken failed: ZeroDivisionError"):
        context = RolloutContext(
            Codec(tokenizer, {}), {}, make_reward(f"{MINE}:broken"), LimitsSection(max_response_tokens=2000)
        )
        await run_rollouts(tasks, context, slots=scheduled({"e": engine}).slot)


def test_a_module_written_a_moment_ago_is_found(own):
    (own / "younger_for_this_test.py").write_text("x = 2\n")
    assert load_named("younger_for_this_test:x", "rl.tools") == 2
    sys.modules.pop("younger_for_this_test")
