"""Rows and messages of other tools, converted to rows of `rstar_lab.exchange.import_rows`.

The names of columns are those of verl, verifiers, prime-rl and TRL. Sources: verl/trainer/ppo/ray_trainer.py (`_write_generations`),
verifiers/legacy/utils/save_utils.py (`state_to_output`), verifiers/v1/episode.py and trace.py.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeGuard

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.resources import package_toml
from rstar_lab.exchange.import_rows import (
    Row,
    content_text,
    conversation_counts,
    conversation_messages,
    number_of,
    number_or_none,
    reasoning_text,
    step_number,
)
from rstar_lab.runs.messages import OTHER, ROLES
from rstar_lab.untrusted.files import DataError, parse_json

FOREIGN_NAMES = package_toml(__file__, "foreign_names.toml")
COLUMNS: dict[str, list[str]] = FOREIGN_NAMES["columns"]
USED = {
    *chain.from_iterable(COLUMNS.values()), "messages", "metrics", "timing", "error", "id", "advantage", "generate_s", "traj_id",
    "run_id", "request_id",
}  # fmt: skip
NO_ANSWERS = ("", "none", "null", "n/a", "[invalid]")  # what graders write for a text without an answer
# Reasons of a rollout that was cut off
LIMITS = re.compile(r"\w*length|max_\w*(?:token|turn)s?\w*|\w*(?:token|turn)_limit\w*|truncated")
# The text of a prompt in the ChatML format, decoded with or without its special tokens.
_CHAT = re.compile(
    r"\s*(?:(?:<\|im_start\|>)?system\n(?P<system>.*?)(?:<\|im_end\|>)?\n)?(?:<\|im_start\|>)?user\n(?P<user>.*?)(?:<\|im_end\|>)?\n"
    r"(?:<\|im_start\|>)?assistant\n.*",
    re.DOTALL,
)
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def first(row: Row, names: str | Iterable[str]) -> Any:
    """Return the first value of a row that is not null. names: a key of `COLUMNS`, or names of columns in their order."""
    names = COLUMNS[names] if isinstance(names, str) else names
    return next((row[name] for name in names if row.get(name) is not None), None)


def at(value: Any, *keys: str) -> Any:
    """Return the value below these keys of nested objects; None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number that a float can hold. Booleans are none."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300)


def is_trace(row: Row) -> bool:
    """Return whether a row is an episode or a trace of verifiers."""
    return isinstance(row.get("traces"), list) or (
        isinstance(row.get("nodes"), list) and isinstance(row.get("task"), dict)
    )


def converted(row: Row, place: str, step: int) -> Iterator[Row]:
    """Yield the rollouts of a row: one, or several if it holds the lists of a batch or the traces of an episode.

    Raises UserError for a row that holds no rollout.
    """
    if is_trace(row):
        yield from _traces(row, place, step)
    elif "messages" in row:
        yield _conversation(row, place) | _facts(row) | {"step": step, "traj_id": place, "kept": True}
    else:
        for number, one in enumerate(without_lists(row)):
            yield _rollout(one, place if one is row else f"{place}.{number}", step)


def without_lists(row: Row) -> list[Row]:
    """Split a row with a list of completions into one row for each; lists of the same length are split too. Other rows are unchanged."""
    texts = first(row, "completion")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str | None) for text in texts):
        return [row]
    # A prompt that is a list of messages belongs to all completions.
    lists = {k: v for k, v in row.items() if isinstance(v, list) and len(v) == len(texts) and not at(v[0], "role")}
    return [row | {name: own[number] for name, own in lists.items()} for number in range(len(texts))]


def _conversation(row: Row, place: str) -> Row:
    given = _json_or_text(row["messages"])
    if not isinstance(given, list) or any(isinstance(message, list) for message in given):
        raise UserError(f"{place}: field 'messages' is not a list of messages, one conversation a row")
    messages = openai_messages(given, place)
    made = conversation_counts(messages)["calls"]
    outcomes = [message["outcome"] for message in messages if message["role"] == "tool"]
    valid = all(isinstance(outcome, str) and outcome in set(Outcome) for outcome in outcomes)
    return {
        "problem_id": row.get("problem_id"),
        "question": next((message["content"] for message in messages if message["role"] == "user"), None),
        "messages": messages, "reward": number_or_none(first(row, ("reward", "score")), place, "reward"),
        "answer": row.get("answer"), "truth": first(row, ("truth", *(name for name in COLUMNS["truth"] if name != "answer"))),
        "calls": max(made, len(outcomes)),  # a conversation can end with a call
        "outcomes": outcomes if valid and made <= len(outcomes) else None,
    }  # fmt: skip


def _rollout(row: Row, place: str, step: int) -> Row:
    prompt = _chat(_parsed_chat(first(row, "prompt")), "user", place)
    completion = _parsed_chat(first(row, "completion"))
    if completion is None and not set(COLUMNS["completion"]) & set(row):
        raise UserError(f"{place}: no completion")
    is_text = isinstance(completion, str)
    messages = conversation_messages(completion) if is_text else _chat(completion, "assistant", place)
    questions = [message["content"] for message in prompt if message["role"] == "user"]
    answer, problem, environment = first(row, "answer"), first(row, "problem"), first(row, "environment")
    if problem is not None:
        problem = f"{environment}/{problem}" if isinstance(environment, str) else str(problem)
    parts = {**row, **row["metrics"]} if isinstance(row.get("metrics"), dict) else row
    return {
        "traj_id": place, "step": step, "question": questions[-1] if questions else None, "messages": [*prompt, *messages],
        "problem_id": problem, "group": first(row, "group"), "row_id": row.get("id"),
        "reward": number_or_none(first(row, "reward"), place, "reward"),
        "rewards": {name: number for name, value in parts.items() if name not in USED and (number := number_of(value)) is not None},
        "truth": first(row, "truth"), "answer": None if str(answer).strip().lower() in NO_ANSWERS else answer, "kept": True, **_facts(row),
    }  # fmt: skip


def _parsed_chat(value: Any) -> Any:
    """Return the messages that a text holds as JSON, or the value."""
    chat = _json_or_text(value) if isinstance(value, str) and value.startswith('[{"') else None
    return chat if isinstance(chat, list) and all(isinstance(at(message, "role"), str) for message in chat) else value


def _facts(row: Row) -> Row:
    """Return what a row says about its end, length, time, engine and advantage, without what it does not say."""
    reason, truncated, engine = first(row, "reason"), first(row, "truncated"), first(row, "engine")
    usage = first(row, "usage")
    used = first(usage, ("output_tokens", "completion_tokens")) if isinstance(usage, dict) else None
    tokens = _count(first(row, "length") or used)
    seconds, milliseconds = row.get("generate_s"), at(row, "timing", "generation_ms")
    if seconds is None and is_number(milliseconds):
        seconds = milliseconds / 1000
    facts = {
        "stop_reason": "error" if row.get("error") else reason if isinstance(reason, str) else None,
        "truncated": _at_limit(reason) if (flag := _flag(truncated)) is None else flag,
        "engine": str(engine) if isinstance(engine, str | int) else None, "response_tokens": tokens, "model_tokens": tokens,
        "generate_s": seconds if is_number(seconds) else None,
        "advantage": row["advantage"] if is_number(row.get("advantage")) else None,
    }  # fmt: skip
    return {name: value for name, value in facts.items() if value is not None}


def _count(value: Any) -> int | None:
    return int(value) if is_number(value) and 0 <= value < 2**40 else None


def _last(value: Any) -> Any:
    """Return the value, or the last one of a list of turns."""
    return value[-1] if isinstance(value, list) and value else value


def _flag(value: Any) -> bool | None:
    """Return a truth value: of a Boolean, a number, a text, or the last one of a list of turns; None for anything else."""
    value = _last(value)
    if isinstance(value, str):
        return _FLAGS.get(value.strip().lower())
    return bool(value) if isinstance(value, bool) or (is_number(value) and not math.isnan(value)) else None


def _at_limit(reason: Any) -> bool | None:
    reason = _last(reason)
    return LIMITS.fullmatch(reason.strip().lower()) is not None if isinstance(reason, str) else None


def _chat(value: Any, role: str, place: str) -> list[Row]:
    """Return a prompt or a completion as messages."""
    if isinstance(value, list):
        return openai_messages([{"role": role, **item} if isinstance(item, dict) else item for item in value], place)
    if value is None:
        return []
    text = str(value)
    found = _CHAT.fullmatch(text) if role == "user" and text.count("user\n") == 1 else None
    if found is None:
        return [{"role": role, "content": text}]
    system = [{"role": "system", "content": found["system"]}] if found["system"] else []
    return [*system, {"role": "user", "content": found["user"]}]


# --- traces of verifiers, which prime-rl writes, too


def _traces(episode: Row, place: str, step: int) -> Iterator[Row]:
    """Yield the traces of an episode that train the policy. An episode that failed before its first trace is a failed rollout."""
    traces = episode.get("traces", [episode])
    trained = [each for each in traces if isinstance(each, dict) and at(each, "agent", "trainable") is not False]
    given = at(episode, "run", "work", "step")
    step = step if given is None else step_number(given, place, "step")
    environment = at(episode, "env", "name") or at(episode, "env", "id") or ""
    for number, trace in enumerate(trained if traces else [{"ok": False}]):
        task = next((own for own in (trace.get("task"), episode.get("task")) if own and isinstance(own, dict)), {})
        key = first(task, ("key", "hash")) or at(task, "data", "idx")
        messages, prompt = openai_messages(_branch(trace), place), _chat(at(task, "data", "prompt"), "user", place)
        asked = [message["content"] for message in messages if message["role"] == "user"]
        rewards = trace["rewards"] if isinstance(trace.get("rewards"), dict) else {}
        known = {name: value for name, own in rewards.items() if (value := _weighted(own)) is not None}
        calls = [call for call in _list(trace, "calls") if isinstance(call, dict)]
        tokens = [_count(at(call, "usage", "completion_tokens")) for call in calls]
        times = [(at(call, "time", "start"), at(call, "time", "end")) for call in calls]
        credits = (own[0] for node in _list(trace, "nodes") if (own := _list(node, "advantages")))
        data, reason = at(task, "data"), trace.get("stop_condition")
        last = next((call.get("finish_reason") for call in reversed(calls) if not call.get("error")), None)
        failed = trace.get("ok") is False or (not known and bool(trace.get("errors")))
        yield {
            "traj_id": place if len(trained) < 2 else f"{place}.{number}", "step": step, "messages": messages or prompt,
            "question": next(iter([*asked, *(message["content"] for message in prompt)]), None),
            "problem_id": None if key is None else f"{environment}/{key}", "rewards": known,
            "reward": sum(known.values()) if known else None,
            "truth": first(data, "truth") if isinstance(data, dict) else None, "answer": None, "kept": True,
            "advantage": next((float(own) for own in credits if is_number(own)), None),
            "truncated": None if failed else bool(_at_limit(reason) or last == "length"),
            "stop_reason": "error" if failed else reason,
            "response_tokens": sum(filter(None, tokens)) if tokens and None not in tokens else None,
            "generate_s": sum(end - start for start, end in times if is_number(start) and is_number(end)) or None,
        }  # fmt: skip


def _branch(trace: Row) -> list[Any]:
    """Return the messages of the last branch of a graph of messages."""
    nodes, messages = _list(trace, "nodes"), []
    place, left = len(nodes) - 1, len(nodes)
    while isinstance(place, int) and 0 <= place < len(nodes) and left > 0:
        messages.append(at(nodes[place], "message"))
        place, left = nodes[place].get("parent", -1) if isinstance(nodes[place], dict) else -1, left - 1
    return messages[::-1]


def _weighted(reward: Any) -> float | None:
    score, weight = (reward.get("score"), reward.get("weight", 1.0)) if isinstance(reward, dict) else (reward, 1.0)
    return float(score) * float(weight) if is_number(score) and is_number(weight) else None


def _list(row: Any, name: str) -> list[Any]:
    value = at(row, name)
    return value if isinstance(value, list) else []


# --- OpenAI-style messages, and those of other providers

_ROLES = {"developer": "system", "function": "tool", "ipython": "tool", "model": "assistant", "human": "user"}
# Where providers put the reasoning of a message: DeepSeek and vLLM, OpenRouter, Ollama, LiteLLM.
_REASONING = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks")


def openai_messages(sources: list[Any], place: str) -> list[Row]:
    """Return OpenAI-style messages with reasoning, refusals and tool calls in their text. Raises UserError for a message without role."""
    messages: list[Row] = []
    names: dict[str, str | None] = {}
    if any(not isinstance(at(source, "role"), str) for source in sources):
        raise UserError(f"{place}: a message has no role")
    for source in (part for message in sources for part in _without_tool_parts(message)):
        role = _ROLES.get(source["role"].lower(), source["role"].lower())
        reasoning = next((text for key in _REASONING if (text := _reasoning(source.get(key)))), None)
        refusal = source["refusal"] if isinstance(source.get("refusal"), str) else ""
        content = reasoning_text(reasoning) + content_text(source.get("content")) + refusal
        single = [{"function": source["function_call"]}] if source.get("function_call") else []
        calls = _json_or_text(source.get("tool_calls") or single)
        for call in calls if isinstance(calls, list) else [calls]:
            function = (call.get("function") or call.get("custom") or call) if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise UserError(f"{place}: a tool call is not an object")
            name = None if function.get("name") is None else str(function["name"])
            names[str(call.get("id"))] = name
            # Custom tools have one text as their input.
            content += call_text(name, _json_or_text(function.get("arguments", function.get("input"))))
        message: Row = {"role": role if role in ROLES else OTHER, "content": content.strip("\n")}
        if role == "tool":
            name = source.get("name") or names.get(str(source.get("tool_call_id")))
            message |= {"tool": None if name is None else str(name), "outcome": source.get("outcome")}
        messages.append(message)
    return messages


def call_text(name: str | None, arguments: Any) -> str:
    """Return a tool call as the text of a message holds it."""
    return f"\n<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def _reasoning(value: Any) -> str:
    """Return reasoning that is a text, or a list of parts with a text or a summary."""
    if isinstance(value, str):
        return value
    parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    texts = [next((part[key] for key in ("text", "thinking", "summary") if part.get(key)), "") for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _without_tool_parts(source: Row) -> list[Row]:
    """Return a message with Anthropic's parts `tool_use` and `tool_result` as OpenAI-style calls and messages of tools."""
    parts = source.get("content")
    if not isinstance(parts, list):
        return [source]
    uses = [part for part in parts if at(part, "type") == "tool_use"]
    results = [part for part in parts if at(part, "type") == "tool_result"]
    others = [part for part in parts if at(part, "type") not in ("tool_use", "tool_result")]
    tools = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content")} for part in results
    ]
    if not others and tools:
        return tools
    calls = [{"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")} for part in uses]
    more = {"tool_calls": [*(source.get("tool_calls") or []), *calls]} if calls else {}
    return [*tools, source | {"content": others} | more]


def _json_or_text(value: Any) -> Any:
    """Return the value that a text holds as JSON, or the value."""
    try:
        return parse_json(value, "text") if isinstance(value, str) else value
    except DataError:
        return value
