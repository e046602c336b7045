"""Build the trace of verifiers (v1) from a rollout of the agent loop. Rewards and metrics of a task read it."""

import json
import re
from collections.abc import Sequence
from typing import Any

from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.tool_calls import parse_stored_turn

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
