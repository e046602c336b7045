"""User-defined tools: a typed function, or a class with one instance per trajectory.

User tools are trusted: they run in the trainer's process, without a sandbox. A time limit ends the wait for a call, not the
thread it runs in. The schema for the model is generated from the signature and the docstring (Google style).
"""

import asyncio
import inspect
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.plugins import NAME, load_named, start_call
from rstar_lab.rl.tools.base import CURRENT_PROBLEM, RETRIES, ForkFailed, Tool, ToolResult, tool_name

THREADS = 64  # concurrent calls of one tool; time in the queue does not count towards the limit
SUPPLIED = ("seed", "traj_id", "problem")  # keyword-only parameters of these names are filled in by the agent loop

log = logging.getLogger(__name__)


class ToolUnavailable(Exception):
    """Raise this in a tool if a failure is not the fault of the model, such as a service that is down. The call is retried;
    after the last attempt its outcome is `sandbox_error`."""


class UserTool:
    """A tool made from a function, or from a class with one instance per trajectory.

    The method `close` of an instance is called at the end of its trajectory. Functions may be async; others run in a
    daemon thread. Calls of one trajectory to its instance run one after the other. After a time-out the instance is
    dropped and the next call gets a new one.
    """

    def __init__(self, name: str, own: Callable[..., Any], time_limit_s: float):
        """Raises UserError if the signature or the docstring does not describe every argument."""
        self.own, self.time_limit_s, self.stateful = own, time_limit_s, inspect.isclass(own)
        function = own.__call__ if inspect.isclass(own) else own  # type: ignore[operator]
        self.is_async = inspect.iscoroutinefunction(function)
        self.schema, self.arguments, self.supplied = describe(name, function, method=self.stateful)
        constructor = inspect.signature(own).parameters if inspect.isclass(own) else {}
        self.takes_problem = "problem" in constructor
        self._threads = asyncio.Semaphore(THREADS)
        self._instances: dict[str, Any] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        supplied = {"seed": seed, "traj_id": traj_id, "problem": CURRENT_PROBLEM.get()}
        values = {name: value for name, value in supplied.items() if name in self.supplied}
        for name, value in arguments.items():
            try:
                values[name] = self.arguments[name].validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                detail = error.errors()[0]
                field = ".".join(map(str, (name, *detail["loc"])))
                text = f"The arguments are not right: argument '{field}' of {tool_name(self.schema)}: {detail['msg']}."
                return ToolResult(Outcome.INVALID_ARGUMENTS, text)
        if self.stateful:
            async with self._lock(traj_id):
                result = await run_with_retries(lambda: self._run(self._instance(traj_id), values, traj_id))
        else:
            result = await run_with_retries(lambda: self._run(self.own, values))
        return replace(result, code=json.dumps(arguments, sort_keys=True, ensure_ascii=False))

    def state(self, traj_id: str) -> Any:
        """Return the instance of a trajectory; None if it made no call, or if the tool is a function."""
        return self._instances.get(traj_id)

    async def fork(self, traj_id: str, copy: str) -> None:
        """Give the trajectory `copy` a deep copy of an instance. Raises ForkFailed if it cannot be copied."""
        if traj_id not in self._instances:
            return
        try:
            self._instances[copy] = deepcopy(self._instances[traj_id])
        except Exception as error:
            raise ForkFailed(f"{tool_name(self.schema)}: {type(error).__name__}: {error}") from error

    async def close(self, traj_id: str) -> None:
        self._locks.pop(traj_id, None)
        close = getattr(self._instances.pop(traj_id, None), "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(self.time_limit_s):
                await (close() if inspect.iscoroutinefunction(close) else run_in_daemon_thread(close))
        except Exception as error:
            log.warning("closing %s of %s: %s: %s", tool_name(self.schema), traj_id, type(error).__name__, error)

    def _lock(self, traj_id: str) -> asyncio.Lock:
        return self._locks.setdefault(traj_id, asyncio.Lock())

    def _instance(self, traj_id: str) -> Callable[..., Any]:
        """Return a function that calls the instance of a trajectory, which it creates if needed."""
        given = {"problem": CURRENT_PROBLEM.get()} if self.takes_problem else {}

        def call(**values: Any) -> Any:
            instance = self._instances.get(traj_id)
            if instance is None:
                instance = self._instances[traj_id] = self.own(**given)
            return instance(**values)

        return call

    async def _run(self, function: Callable[..., Any], values: Mapping[str, Any], traj_id: str = "") -> ToolResult:
        requested = time.monotonic()
        async with self._threads:
            began = time.monotonic()
            limit = asyncio.timeout(self.time_limit_s)
            try:
                async with limit:
                    value = await (function(**values) if self.is_async else run_in_daemon_thread(function, **values))
                outcome, text = Outcome.OK, as_text(value)
            except ToolUnavailable:
                raise
            except Exception as error:
                outcome, text = Outcome.EXCEPTION, f"{type(error).__name__}: {error}"
                if limit.expired():
                    self._instances.pop(traj_id, None)
                    outcome, text = Outcome.TIMEOUT, "TimeoutError: the tool ran past its time limit."
        return ToolResult(outcome, text, queue_s=began - requested, run_s=time.monotonic() - began)


def load_user_tool(name: str, time_limit_s: float) -> Tool:
    """Return the tool that a recipe names as `module:name`. Raises UserError if it cannot be loaded."""
    if not NAME.fullmatch(name):
        raise UserError(f"rl.tools: {name!r} is neither module:name nor an MCP server (mcp+http://..., mcp+stdio:...)")
    own = load_named(name, "rl.tools")
    if not callable(own):
        raise UserError(f"rl.tools: {name} is a {type(own).__name__}; expected a function or a class")
    return UserTool(name, own, time_limit_s)


def as_text(value: Any) -> str:
    """Return the result of a tool as the model reads it: text as it is, any other value as JSON with all its letters."""
    if isinstance(value, str):
        return value
    return json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)


async def run_with_retries(run: Callable[[], Any]) -> ToolResult:
    """Run a call. Infrastructure failures are retried before the model sees them."""
    for attempt in range(1 + RETRIES):
        try:
            return await run()
        except ToolUnavailable as error:
            log.warning("a tool is unavailable: %s", error)
            if attempt < RETRIES:
                await asyncio.sleep(0.05 * 2**attempt)
    return ToolResult(Outcome.SANDBOX_ERROR, "The tool could not be run. This is no fault of the call.")


_SECTION = re.compile(r"[ \t]*(?:Args|Arguments|Parameters|Params)[ \t]*:?[ \t]*")
_ARGUMENT = re.compile(r"([ \t]+)(\w+)[ \t]*(?:\((?:[^()]|\([^()]*\))*\))?[ \t]*:[ \t]*(\S.*)")
_CHOICES = re.compile(r"\(choices:[ \t]*\[?([^\[\]()]*)\]?[ \t]*\)[ \t.]*$", re.IGNORECASE)


def google_style(docstring: str) -> str:
    """Return a docstring in the form that transformers reads: `Args:`, arguments without types, choices as a JSON list."""
    lines, inside = [], False
    for line in docstring.splitlines():
        if _SECTION.fullmatch(line):
            inside, line = True, "Args:"
        elif inside and line[:1].strip():
            inside = False  # the next section
        elif inside and (match := _ARGUMENT.fullmatch(line)):
            line = f"{match[1]}{match[2]}: {_CHOICES.sub(_choices, match[3])}"
        elif inside:
            line = _CHOICES.sub(_choices, line)
        lines.append(line)
    return "\n".join(lines)


def _choices(match: re.Match[str]) -> str:
    items = [item.strip() for item in match[1].split(",") if item.strip()]
    values = [
        item if _JSON_ITEM.fullmatch(item) else json.dumps(item.strip("'\""), ensure_ascii=False) for item in items
    ]
    return f"(choices: [{', '.join(values)}])"


_JSON_ITEM = re.compile(r'"[^"\\]*"|-?\d+(?:\.\d+)?|true|false|null')


def describe(
    name: str, function: Callable[..., Any], *, method: bool = False
) -> tuple[dict[str, Any], dict[str, TypeAdapter[Any]], set[str]]:
    """Return (schema for the model, type of each argument, parameters that the agent loop fills in).

    name: `module:function`; the model sees the part after the colon. Raises UserError for an incomplete description.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[method:]
    supplied = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in SUPPLIED}
    visible = [p for p in parameters if p.name not in supplied]
    if bad := next((p for p in visible if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)), None):
        raise UserError(
            f"rl.tools: {name}: parameter {bad.name}: *, ** and positional-only parameters are not supported"
        )

    def described() -> None: ...  # a copy without the supplied parameters

    try:
        hints = get_type_hints(function)
        described.__name__, described.__doc__ = name.rpartition(":")[2], google_style(inspect.getdoc(function) or "")
        described.__annotations__ = {p.name: hints[p.name] for p in visible if p.name in hints}
        described.__signature__ = inspect.Signature(visible)  # type: ignore[attr-defined]
        schema = get_json_schema(described)
        arguments: dict[str, TypeAdapter[Any]] = {p.name: TypeAdapter(hints[p.name]) for p in visible}
    except (
        DocstringParsingException,
        TypeHintParsingException,
        PydanticUserError,
        NameError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(f"rl.tools: {name}: {' '.join(str(error).split())}") from None
    schema["function"].pop("return", None)
    return schema, arguments, supplied


async def run_in_daemon_thread(function: Callable[..., Any], **values: Any) -> Any:
    """Call the function in a new daemon thread; the exit of the process does not wait for it."""
    return await asyncio.wrap_future(start_call(function, **values))
