"""Tasksets of verifiers (v1) as environments: tasks become problems, toolsets become tools, rewards become parts of the reward.

Copy this file beside your tasks, and write a module that a recipe names (docs/environments.md):

    from verifiers_taskset import VerifiersTaskset

    sums = VerifiersTaskset("my_tasks:Sums")

This command writes the problems to a file:

    python verifiers_taskset.py my_tasks:Sums problems.jsonl

Harnesses of verifiers are not used: the model is prompted and sampled by the agent loop. Toolsets run in this process.
"""

import asyncio
import inspect
import json
import re
import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cached_property
from itertools import islice
from threading import Thread
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.environments.base import Environment, ModelMessage, Observation, RewardPart, Scores
from rstar_lab.rl.plugins import load_named
from rstar_lab.rl.problems import Problem, write_problem_file
from rstar_lab.rl.tools.base import ToolResult
from rstar_lab.rl.trajectory import ToolCallRecord, Trajectory
from rstar_lab.tool_calls import parse_stored_turn

TASKS = 10_000  # maximum number of problems that are written
_STATE: ContextVar[Any] = ContextVar("verifiers_state")  # state of the rollout whose tool is called


ANSWER_TAGS = re.compile(r"</?answer>")


def new_trace(task: Any) -> Any:
    """Return a trace with the prompt of a task and a new state."""
    from verifiers.v1 import AgentInfo, SystemMessage, Trace, TraceTask, UserMessage
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.state import state_cls

    data = task.data
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=AgentInfo(config=WireAgentConfig()),
    )
    prompt = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    system = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    for message in (*system, *prompt):
        _add(trace, message, sampled=False)
    return trace


def add_turn(trace: Any, text: str, calls: Sequence[ToolCallRecord]) -> None:
    """Add a turn of the model and the responses to its calls. text: the text that the model generated."""
    from verifiers.v1 import AssistantMessage, ToolCall, ToolMessage

    turn = trace.num_turns
    thought, content = split_reply(text)
    called = [ToolCall(id=f"call_{turn}_{call.index}", name=call.tool, arguments=arguments_of(call)) for call in calls]
    message = AssistantMessage(content=content, reasoning_content=thought or None, tool_calls=called or None)
    _add(trace, message, sampled=True)
    for call, tool_call in zip(calls, called, strict=True):
        _add(trace, ToolMessage(tool_call_id=tool_call.id, content=call.response, name=call.tool), sampled=False)


def arguments_of(call: ToolCallRecord) -> str:
    """Return the arguments of a call as JSON. Code tools store only the code."""
    try:
        return call.code if isinstance(json.loads(call.code), dict) else json.dumps({"code": call.code})
    except ValueError:
        return json.dumps({"code": call.code} if call.code else {})


def split_reply(text: str) -> tuple[str, str]:
    """Return (reasoning, reply) of a turn. The reply has neither tool calls nor the tags of our answer format."""
    turn = parse_stored_turn(text)
    thought = text[slice(*turn.reasoning)]
    reply = parse_stored_turn(text[max(turn.reasoning_end, turn.reasoning[1]) :]).outside
    return thought.strip(), ANSWER_TAGS.sub("", reply).strip()


def _add(trace: Any, message: Any, *, sampled: bool) -> None:
    from verifiers.v1 import MessageNode

    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))


class VerifiersTaskset:
    """A taskset, loaded once. Calling it creates the environment of one rollout. Tasks are read when a rollout needs them.

    name: `module:name` of a class, or of an instance with its configuration. timeout_s: time limit of each tool call in
    seconds. Raises UserError if tasks need a container or use `@intercept`, or if the package of the taskset has its own `Env`.
    """

    def __init__(self, name: str, timeout_s: float = 30.0):
        self.name, self.timeout_s = name, timeout_s
        given = load_named(name, "taskset")
        self.taskset = given(_config_of(given)) if isinstance(given, type) else given
        self.task_type = type(self.taskset).task_type()
        self._check()
        self._tasks = enumerate(self.taskset)
        self._read: dict[str, Any] = {}
        self._shared = [(toolset, _server(toolset)) for toolset in type(self.taskset).toolsets(self.taskset.config)]
        self._setting_up, self._ready = asyncio.Lock(), False

    def __call__(self) -> "VerifiersEnvironment":
        return VerifiersEnvironment(self)

    def problems(self, limit: int = TASKS) -> list[Problem]:
        """Return one problem per task. Its `info` names the task. limit: maximum number, because a taskset can be infinite."""
        numbered = islice(enumerate(self.taskset), limit)
        name = self.name.partition(":")[2]
        return [
            Problem(
                problem_id=f"{name}-{key}",
                question=question_of(task.data),
                answer=_answer(task.data),
                info={"task": key},
            )
            for key, task in ((str(number), task) for number, task in numbered)
        ]

    def task(self, problem: Problem) -> Any:
        """Return the task of a problem. Raises UserError if the taskset has none with its number."""
        key = problem.info.get("task")
        while key not in self._read:
            numbered_task = next(self._tasks, None)
            if numbered_task is None:
                raise UserError(f"problem {problem.problem_id}: taskset {self.name} has no task {key!r}")
            number, task = numbered_task
            if task.data.image:
                raise UserError(
                    f"taskset {self.name}: task {number} runs in the container {task.data.image}; not supported"
                )
            self._read[str(number)] = task
        return self._read[key]

    async def shared_toolsets(self) -> list[tuple[Any, Any]]:
        """Return the toolsets that all rollouts share, with their MCP servers. The first call sets them up."""
        async with self._setting_up:
            if not self._ready:
                for toolset, _ in self._shared:
                    await toolset.setup()
                self._ready = True
        return self._shared

    def own_toolsets(self, config: Any) -> list[tuple[Any, Any]]:
        """Return new toolsets for one rollout, with their MCP servers. config: configuration of the rollout's task."""
        return [(toolset, _server(toolset)) for toolset in self.task_type.toolsets(config)]

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of all tools. The tools of a rollout do not depend on its task."""
        config = getattr(self.taskset.config, "task", None) or self.task_type.config_type()()
        return [schema for _, server in (*self._shared, *self.own_toolsets(config)) for schema in _schemas(server)]

    def _check(self) -> None:
        """Raise UserError if the taskset needs a feature that is not supported."""
        from verifiers.v1 import Env, SingleAgentEnv
        from verifiers.v1.utils.decorators import discover_decorated

        module = type(self.taskset).__module__  # verifiers looks for the Env in the package that exports the taskset
        places = [vars(sys.modules[name]) for name in {module, module.rpartition(".")[0] or module}]
        classes = [value for place in places for value in place.values() if isinstance(value, type)]
        own = [cls.__name__ for cls in classes if issubclass(cls, Env) and cls not in (Env, SingleAgentEnv)]
        if own:
            raise UserError(f"taskset {self.name} is run by its own {own[0]}, which is not supported")
        if self.task_type.NEEDS_CONTAINER:
            raise UserError(f"taskset {self.name}: its tasks run in containers, which is not supported")
        if discover_decorated(self.task_type.__new__(self.task_type), "intercept"):
            raise UserError(f"taskset {self.name}: @intercept is not supported")


class VerifiersEnvironment(Environment):
    """One task. Parts of the reward: the rewards of the task with its weights, and its metrics with weight 0."""

    def __init__(self, taskset: VerifiersTaskset):
        self.taskset = taskset
        self.trace: Any = None
        self.runtime: Any = None
        self.servers: dict[str, Any] = {}
        self.lock = asyncio.Lock()
        self.offered = [ToolsetTool(self, schema) for schema in taskset.schemas]

    @property
    def tools(self) -> Sequence[Any]:
        return self.offered

    async def reset(self, problem: Problem, seed: int) -> str:
        from verifiers.v1.runtimes import SubprocessConfig, make_runtime

        self.task = self.taskset.task(problem)
        self.trace = new_trace(self.task)
        self.stops = self.task.hooks("stop")
        if needs_runtime(self.task):
            self.runtime = make_runtime(SubprocessConfig())
            await self.runtime.start()
        await self.task.setup(self.trace, self.runtime)
        own = self.taskset.own_toolsets(self.task.config)
        for toolset, _ in own:
            await toolset.setup()
            await toolset.setup_task(self.task.data)
        for _, server in (*await self.taskset.shared_toolsets(), *own):
            self.servers |= dict.fromkeys((schema["function"]["name"] for schema in await _schemas_of(server)), server)
        return question_of(self.task.data)

    async def step(self, message: ModelMessage) -> Observation | None:
        from verifiers.v1 import Trace
        from verifiers.v1.utils.decorators import invoke

        add_turn(self.trace, message.text, message.calls)
        for hook in self.stops:
            result = invoke(hook, {Trace: self.trace, "trace": self.trace, "task": self.task.data})
            if await result if inspect.isawaitable(result) else result:
                self.trace.stop(hook.__name__)
                return Observation(done=True)
        return None

    async def score(self, trajectory: Trajectory) -> Scores:
        if self.trace.num_turns < len(trajectory.turns):  # the last turn was cut off and not passed to `step`
            add_turn(self.trace, trajectory.turns[-1].text, ())
        self.trace.ok = True
        self.trace.stop("max_total_tokens" if trajectory.truncated else "agent_completed")
        await self.task.finalize(self.trace, self.runtime)
        await self.task.score(self.trace, self.runtime)
        rewards = {name: RewardPart(r.score, r.weight) for name, r in self.trace.rewards.items() if r is not None}
        metrics = {name: RewardPart(value, 0.0) for name, value in self.trace.metrics.items() if value is not None}
        return metrics | rewards

    async def close(self) -> None:
        if self.runtime is not None:
            await self.runtime.stop()


class ToolsetTool:
    """A tool of a toolset, for one environment. Calls of one rollout run one after the other."""

    def __init__(self, environment: VerifiersEnvironment, schema: dict[str, Any]):
        self.environment, self.schema = environment, schema

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        from mcp.server.mcpserver.exceptions import ToolError
        from pydantic import ValidationError
        from verifiers.v1 import ProviderError, SandboxError

        name, began, code = self.schema["function"]["name"], time.monotonic(), json.dumps(arguments, sort_keys=True)
        server = self.environment.servers[name]
        try:
            async with self.environment.lock, asyncio.timeout(self.environment.taskset.timeout_s):
                _STATE.set(self.environment.trace.state)
                result = await server.call_tool(server.own_names[name], arguments)
            outcome, text = Outcome.OK, "\n".join(getattr(block, "text", str(block)) for block in result.content)
        except TimeoutError:
            outcome, text = Outcome.TIMEOUT, "TimeoutError: the tool ran past its time limit."
        except ToolError as error:
            cause, text = error.__cause__, str(error)
            invalid, ours = isinstance(cause, ValidationError), isinstance(cause, SandboxError | ProviderError)
            outcome = Outcome.INVALID_ARGUMENTS if invalid else Outcome.SANDBOX_ERROR if ours else Outcome.EXCEPTION
        return ToolResult(outcome, text, code, run_s=time.monotonic() - began)

    async def close(self, traj_id: str) -> None:
        """Do nothing: the environment closes its toolsets."""


def needs_runtime(task: Any) -> bool:
    """Return whether a task has hooks or scores that use a runtime. The runtime is a process on this machine."""
    from verifiers.v1 import Task

    hooks = any(getattr(type(task), name) is not getattr(Task, name) for name in ("setup", "finalize"))
    scores = (*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges()))
    return hooks or any("runtime" in inspect.signature(function).parameters for function in scores)


def question_of(data: Any) -> str:
    """Return the system prompt and the prompt of a task, joined to one text."""
    text = "\n\n".join(filter(None, (data.system_prompt, data.prompt_text)))
    if not text:
        raise UserError(
            f"task {data.name or data.idx} has no prompt; tasks that a simulated user starts are not supported"
        )
    return text


def _answer(data: Any) -> str:
    """Return the field `answer` of a task as text, or an empty text. It is only stored; the rewards of verifiers do not read it."""
    answer = getattr(data, "answer", "")
    return str(answer) if isinstance(answer, str | int | float) else ""


def _config_of(taskset: type) -> Any:
    from verifiers.v1 import TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    return (concrete_type(taskset, TasksetConfig) or TasksetConfig)()


def _server(toolset: Any) -> Any:
    """Return an MCP server with the tools of a toolset. A tool sees the state of the rollout that calls it."""
    from mcp.server.mcpserver import MCPServer

    async def state() -> Any:
        return _STATE.get()

    toolset._pull_state = state
    server: Any = MCPServer(toolset.server_name or type(toolset).__name__)
    toolset.register(server)
    server.prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    return server


async def _schemas_of(server: Any) -> list[dict[str, Any]]:
    """Return the schemas of the tools of a server under the names that verifiers gives them: `<toolset>_<tool>`."""
    tools = await server.list_tools()
    server.own_names = {f"{server.prefix}{tool.name}": tool.name for tool in tools}
    return [
        {
            "type": "function",
            "function": {
                "name": f"{server.prefix}{tool.name}", "description": tool.description or "", "parameters": tool.input_schema,
            },
        }
        for tool in tools
    ]  # fmt: skip


def _schemas(server: Any) -> list[dict[str, Any]]:
    """Return `_schemas_of(server)`. Runs in a thread, because the caller's thread may already run an event loop."""
    results: list[list[dict[str, Any]]] = []
    thread = Thread(target=lambda: results.append(asyncio.run(_schemas_of(server))))
    thread.start()
    thread.join()
    return results[0]


if __name__ == "__main__":
    write_problem_file("verifiers_taskset", lambda target: VerifiersTaskset(target).problems())
