"""The tool protocol: JSON arguments in, an outcome and the text that the model sees out."""

from dataclasses import dataclass
from typing import Any, Protocol

from rstar_lab.outcomes import Outcome

RETRIES = 2  # of a call whose failure is ours


@dataclass(frozen=True, slots=True)
class ToolResult:
    outcome: Outcome
    text: str
    code: str = ""
    queue_s: float = 0.0
    run_s: float = 0.0


class Tool(Protocol):
    @property
    def schema(self) -> dict[str, Any]:
        """Name, description and parameters, as OpenAI's function schema."""
        ...

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult: ...

    async def close(self, traj_id: str) -> None:
        """Forget the state kept for a trajectory that has ended."""


def tool_name(schema: dict[str, Any]) -> str:
    return schema["function"]["name"]


def argument_error(schema: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong with a call's arguments, in words for the model; None where they fit the schema."""
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
        kind = properties[name].get("type", "string")
        if not isinstance(kind, str) or (value is None and properties[name].get("nullable")):
            continue  # one of several types: for the tool itself to say
        if not isinstance(value, kinds.get(kind, object)) or (
            isinstance(value, bool) and kind in ("integer", "number")
        ):
            return f"argument '{name}' of {function['name']} must be a {kind}"
    return None
