"""Execution of the tool calls of a turn."""

from collections.abc import Mapping
from dataclasses import replace

from rstar_lab.outcomes import Outcome
from rstar_lab.rl.chat_format.parser import ToolCall
from rstar_lab.rl.tools.base import Tool, ToolResult, argument_error
from rstar_lab.rl.trajectory import ToolCallRecord


def check_call(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult | None:
    """Return the error result of a call that cannot be executed; None for a valid call."""
    if call.error is not None or call.name is None or call.arguments is None:
        return ToolResult(Outcome.MALFORMED_CALL, f"The tool call could not be parsed: {call.error}")
    if call.name not in tools:
        return ToolResult(Outcome.UNKNOWN_TOOL, f"There is no tool '{call.name}'. Tools: {', '.join(tools)}.")
    if problem := argument_error(tools[call.name].schema, call.arguments):
        return ToolResult(Outcome.INVALID_ARGUMENTS, f"The arguments are not right: {problem}.")
    return None


def too_many_calls(limit: int) -> ToolResult:
    """Return the error result of a call past the limit of calls per turn."""
    return ToolResult(Outcome.MALFORMED_CALL, f"A turn may contain at most {limit} tool calls; this one was not run.")


async def execute_call(
    call: ToolCall, tools: Mapping[str, Tool], *, seed: int, traj_id: str, max_chars: int
) -> ToolResult:
    """Execute one call and return its result, or the error result of an invalid call.

    max_chars: a longer response loses its middle: the end of a traceback and the start of an output matter most.
    """
    if error := check_call(call, tools):
        return error
    assert call.name is not None and call.arguments is not None
    result = await tools[call.name](call.arguments, seed=seed, traj_id=traj_id)
    if len(result.text) <= max_chars:
        return result
    half = max_chars // 2
    omitted = len(result.text) - 2 * half
    text = f"{result.text[:half]}\n[{omitted} characters left out]\n{result.text[-half:]}"
    return replace(result, text=text)


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
