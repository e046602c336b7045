"""Execution of the tool calls of a turn."""

from collections.abc import Mapping
from dataclasses import replace

from rstar_lab.outcomes import Outcome
from rstar_lab.rl.renderers.base import Renderer, TruncateSide
from rstar_lab.rl.renderers.paper import PaperRenderer
from rstar_lab.rl.tools.base import Tool, ToolResult, argument_error
from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.tool_calls import ToolCall


def check_call(
    call: ToolCall, tools: Mapping[str, Tool], renderer: type[Renderer] = PaperRenderer
) -> ToolResult | None:
    """Return the error result of a call that cannot be executed; None for a valid call. renderer: whose texts to use."""
    if call.error is not None or call.name is None or call.arguments is None:
        return ToolResult(Outcome.MALFORMED_CALL, renderer.malformed_call_text(call))
    if call.name not in tools:
        return ToolResult(Outcome.UNKNOWN_TOOL, renderer.unknown_tool_text(call.name, list(tools)))
    schema = tools[call.name].schema
    if problem := argument_error(schema, renderer.arguments(schema, call.arguments)):
        return ToolResult(Outcome.INVALID_ARGUMENTS, renderer.invalid_arguments_text(problem))
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
    renderer: type[Renderer] = PaperRenderer,
    truncate_side: TruncateSide = "middle",
) -> ToolResult:
    """Execute one call and return its result, or the error result of an invalid call.

    max_chars: longest response; a longer one is truncated. renderer: the prompt format, which decides about the texts of
    errors and the truncation. truncate_side: see `released.truncate`; used by the format `released` only.
    """
    result = check_call(call, tools, renderer)
    if result is None:
        assert call.name is not None and call.arguments is not None
        tool = tools[call.name]
        result = await tool(renderer.arguments(tool.schema, call.arguments), seed=seed, traj_id=traj_id)
    return replace(result, text=renderer.truncate(result.text, max_chars, truncate_side))


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
