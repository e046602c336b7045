"""The tool protocol: JSON arguments in; an outcome and the text for the model out."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.problems import Problem

RETRIES = 2  # further attempts after an infrastructure failure
# The problem of the rollout that runs in this asyncio task, set by the agent loop. None in a chat through chat
# completions.
CURRENT_PROBLEM: ContextVar[Problem | None] = ContextVar("current_problem", default=None)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. text: response for the model. code: the code, or the arguments as JSON. queue_s, run_s: seconds."""

    outcome: Outcome
    text: str
    code: str = ""
    queue_s: float = 0.0
    run_s: float = 0.0


class ForkFailed(Exception):
    """The state of a tool could not be copied."""


class Tool(Protocol):
    """A tool of the model. Tools whose state can be copied also have `fork` (see ForkableTool)."""

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema in OpenAI's form: name, description and parameters."""
        ...

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult: ...

    async def close(self, traj_id: str) -> None:
        """Free the state of a trajectory that has ended."""


@runtime_checkable
class ForkableTool(Protocol):
    """A tool without state, or whose state can be copied for a branch of a rollout (method `branching`)."""

    async def fork(self, traj_id: str, copy: str) -> None:
        """Give the trajectory `copy` a copy of the state of `traj_id`. Raises ForkFailed."""
        ...


def tool_name(schema: dict[str, Any]) -> str:
    return schema["function"]["name"]


# Keywords that describe an argument without `type`; the tool checks it.
_OTHER_KINDS = {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"}


def argument_error(schema: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """Return an error message for the model if the arguments do not match the function schema, else None."""
    function = schema["function"]
    properties, required = function["parameters"]["properties"], function["parameters"].get("required", [])
    for name in required:
        if name not in arguments:
            return f"missing argument '{name}' of {function['name']}"
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument '{name}' of {function['name']}; it takes {', '.join(properties)}"
        kind = properties[name].get("type", None if _OTHER_KINDS & properties[name].keys() else "string")
        if not isinstance(kind, str) or (value is None and properties[name].get("nullable")):
            continue  # several types are allowed: the tool checks them
        if not isinstance(value, kinds.get(kind, object)) or (
            isinstance(value, bool) and kind in ("integer", "number")
        ):
            return f"argument '{name}' of {function['name']} must be a {kind}"
    return None
