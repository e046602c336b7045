"""Execution of the tool calls of a turn."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rstar_lab.outcomes import Outcome
from rstar_lab.rl.renderers import released
from rstar_lab.rl.renderers.formats import PromptFormat
from rstar_lab.rl.tools.base import Tool, ToolResult, argument_error
from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.tool_calls import ToolCall


def check_call(call: ToolCall, tools: Mapping[str, Tool], prompt_format: PromptFormat = "paper") -> ToolResult | None:
    """Return the error result of a call that cannot be executed; None for a valid call."""
    if prompt_format == "released":
        return _check_released(call, tools)
    if call.error is not None or call.name is None or call.arguments is None:
        return ToolResult(Outcome.MALFORMED_CALL, f"The tool call could not be parsed: {call.error}")
    if call.name not in tools:
        return ToolResult(Outcome.UNKNOWN_TOOL, f"There is no tool '{call.name}'. Tools: {', '.join(tools)}.")
    if problem := argument_error(tools[call.name].schema, call.arguments):
        return ToolResult(Outcome.INVALID_ARGUMENTS, f"The arguments are not right: {problem}.")
    return None


def too_many_calls(limit: int) -> ToolResult:
    """Return the error result of a call beyond the limit of calls per turn."""
    return ToolResult(Outcome.MALFORMED_CALL, f"A turn may contain at most {limit} tool calls; this one was not run.")


async def execute_call(
    call: ToolCall,
    tools: Mapping[str, Tool],
    *,
    seed: int,
    traj_id: str,
    max_chars: int,
    prompt_format: PromptFormat = "paper",
    truncate_side: released.TruncateSide = "middle",
) -> ToolResult:
    """Execute one call and return its result, or the error result of an invalid call.

    max_chars: longest response. A longer one loses its middle, because the start of an output and the end of a
    traceback matter most. prompt_format: the format `released` uses the error texts and the truncation of
    microsoft/rStar.
    truncate_side: see `released.truncate`; used by the format `released` only.
    """
    error = check_call(call, tools, prompt_format)
    if error and prompt_format != "released":
        return error
    if error:
        result = error
    else:
        assert call.name is not None and call.arguments is not None
        tool, arguments = tools[call.name], call.arguments
        if prompt_format == "released":
            arguments = _released_arguments(tool.schema, arguments)
        result = await tool(arguments, seed=seed, traj_id=traj_id)
    if prompt_format == "released":
        return replace(result, text=released.truncate(result.text, max_chars, truncate_side))
    if len(result.text) <= max_chars:
        return result
    half = max_chars // 2
    omitted = len(result.text) - 2 * half
    text = f"{result.text[:half]}\n[{omitted} characters left out]\n{result.text[len(result.text) - half :]}"
    return replace(result, text=text)


def _check_released(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult | None:
    """Return the error result of a call that cannot be executed, with the texts of the release; None for a valid call."""
    if call.error is not None or call.name is None or call.arguments is None:
        return ToolResult(Outcome.MALFORMED_CALL, released.decode_error(call.raw, call.error or ""))
    if call.name not in tools:
        return ToolResult(Outcome.UNKNOWN_TOOL, released.unknown_tool_error(call.name))
    schema = tools[call.name].schema
    if problem := argument_error(schema, _released_arguments(schema, call.arguments)):
        return ToolResult(Outcome.INVALID_ARGUMENTS, f"Error when executing tool: {problem}")
    return None


def _released_arguments(schema: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the release passes them to a tool: missing ones are empty, unknown ones are left out."""
    parameters = schema["function"]["parameters"]
    known = {name: value for name, value in arguments.items() if name in parameters["properties"]}
    return {name: "" for name in parameters.get("required", [])} | known


def make_call_record(call: ToolCall, result: ToolResult, *, turn: int, index: int, position: int) -> ToolCallRecord:
    """Return the record of a call. position: index in the response at which the tool responses of the turn start."""
    return ToolCallRecord(
        turn=turn,
        index=index,
        tool=call.name or "",
        code=result.code,
        outcome=result.outcome,
        response=result.text,
        queue_s=result.queue_s,
        run_s=result.run_s,
        position=position,
    )
