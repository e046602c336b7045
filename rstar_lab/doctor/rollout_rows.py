"""Rows of rollout files of other tools, converted to rows of `rstar_lab.exchange.import_rows`.

The names of columns are those of verl, verifiers, prime-rl and TRL. Sources: verl/trainer/ppo/ray_trainer.py (`_write_generations`),
verifiers/legacy/utils/save_utils.py (`state_to_output`), verifiers/v1/episode.py and trace.py.
"""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeGuard

from rstar_lab.common.errors import UserError
from rstar_lab.exchange import importers
from rstar_lab.exchange.import_rows import TRUTHS, Row, conversation_messages, number_or_none, step_number

STEPS = ("step", "global_step", "_step", "training_step", "iteration")
PROMPTS = ("prompt", "prompts", "input", "question", "query", "problem")
COMPLETIONS = ("completion", "completions", "response", "responses", "output", "generation")
REWARDS = ("reward", "rewards", "score", "scores")
ANSWERS = ("pred", "prediction", "extracted_answer", "parsed_answer")
NO_ANSWERS = ("", "none", "null", "n/a", "[invalid]")  # what graders write for a text without an answer
GROUPS = ("uid", "group_id", "group")  # of the rollouts of one prompt
PROBLEMS = ("example_id", "problem_id", "prompt_id")
ENVIRONMENTS = ("env_name", "env_id", "task")  # example ids of prime-rl count within an environment
TRUNCATED = ("truncated", "is_truncated")
REASONS = ("stop_reason", "finish_reason", "stop_condition")
LENGTHS = ("response_tokens", "completion_tokens", "response_length", "completion_length")
ENGINES = ("engine", "worker")
USAGES = ("token_usage", "usage")
LIMITS = re.compile(
    r"\w*length|max_\w*(?:token|turn)s?\w*|\w*(?:token|turn)_limit\w*|truncated"
)  # reasons of a cut rollout
USED = {
    *STEPS, *PROMPTS, *COMPLETIONS, *REWARDS, *TRUTHS, *ANSWERS, *PROBLEMS, *ENVIRONMENTS, *TRUNCATED, *REASONS, *LENGTHS, *ENGINES,
    *USAGES, *GROUPS, "messages", "metrics", "timing", "error", "id", "advantage", "generate_s", "traj_id", "run_id",
}  # fmt: skip

# The text of a prompt in the ChatML format, decoded with or without its special tokens.
_CHAT = re.compile(
    r"\s*(?:(?:<\|im_start\|>)?system\n(?P<system>.*?)(?:<\|im_end\|>)?\n)?(?:<\|im_start\|>)?user\n(?P<user>.*?)(?:<\|im_end\|>)?\n"
    r"(?:<\|im_start\|>)?assistant\n.*",
    re.DOTALL,
)


def first(row: Row, names: Iterable[str]) -> Any:
    """Return the first value of a row that is not null, by the order of the names."""
    return next((row[name] for name in names if row.get(name) is not None), None)


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
        return
    row = row | {name: number for name in REWARDS if (number := _number(row.get(name))) is not None}
    if "messages" in row:
        if not isinstance(row["messages"], list):
            raise UserError(f"{place}: field 'messages' is not a list")
        made = importers.from_messages(row, place)
        truth = made["truth"] if made["truth"] is not None else first(row, set(TRUTHS) - {"answer"})
        yield made | _facts(row) | {"step": step, "kept": True, "traj_id": place, "truth": truth}
        return
    completion = first(row, COMPLETIONS)
    if isinstance(completion, list) and completion and all(isinstance(text, str) for text in completion):
        columns = {
            name: value for name, value in row.items() if isinstance(value, list) and len(value) == len(completion)
        }
        for number in range(len(completion)):
            one = row | {name: values[number] for name, values in columns.items()}
            yield _rollout(one, f"{place}.{number}", step)
        return
    yield _rollout(row, place, step)


def _rollout(row: Row, place: str, step: int) -> Row:
    prompt = _chat(first(row, PROMPTS), "user", place)
    completion = first(row, COMPLETIONS)
    if completion is None and not set(COMPLETIONS) & set(row):
        raise UserError(f"{place}: no completion")
    messages = (
        conversation_messages(completion) if isinstance(completion, str) else _chat(completion, "assistant", place)
    )
    questions = [message["content"] for message in prompt if message["role"] == "user"]
    answer = first(row, ANSWERS)
    parts = {**row, **row["metrics"]} if isinstance(row.get("metrics"), dict) else row
    return {
        "traj_id": place, "step": step, "question": questions[-1] if questions else None, "messages": [*prompt, *messages],
        "problem_id": _problem(row), "group": first(row, GROUPS), "row_id": row.get("id"),
        "reward": number_or_none(first(row, REWARDS), place, "reward"),
        "rewards": {name: number for name, value in parts.items() if name not in USED and (number := _number(value)) is not None},
        "truth": first(row, TRUTHS), "answer": None if str(answer).strip().lower() in NO_ANSWERS else answer, "kept": True, **_facts(row),
    }  # fmt: skip


def _problem(row: Row) -> str | None:
    problem, environment = first(row, PROBLEMS), first(row, ENVIRONMENTS)
    if problem is None:
        return None
    return f"{environment}/{problem}" if isinstance(environment, str) else str(problem)


def _facts(row: Row) -> Row:
    """Return what a row says about its end, length, time, engine and advantage, without what it does not say."""
    reason, truncated, engine = first(row, REASONS), first(row, TRUNCATED), first(row, ENGINES)
    usage = first(row, USAGES)
    usage = usage if isinstance(usage, dict) else {}
    tokens = _count(first(row, LENGTHS) or first(usage, ("output_tokens", "completion_tokens")))
    timing = row["timing"] if isinstance(row.get("timing"), dict) else {}
    seconds = row.get("generate_s")
    if seconds is None and is_number(timing.get("generation_ms")):
        seconds = timing["generation_ms"] / 1000
    facts = {
        "stop_reason": "error" if row.get("error") else reason if isinstance(reason, str) else None,
        "truncated": _at_limit(reason) if (flag := _flag(truncated)) is None else flag,
        "engine": str(engine) if isinstance(engine, str | int) else None,
        "response_tokens": tokens, "model_tokens": tokens, "generate_s": seconds, "advantage": row.get("advantage"),
    }  # fmt: skip
    numbers = ("generate_s", "advantage")
    return {
        name: value for name, value in facts.items() if value is not None and (name not in numbers or is_number(value))
    }


def _count(value: Any) -> int | None:
    return int(value) if is_number(value) and 0 <= value < 2**40 else None


def _number(value: Any) -> float | None:
    """Return a number, also one that is written as text; None for anything else."""
    if isinstance(value, str) and len(value) < 40:
        with suppress(ValueError):
            return float(value)
    return float(value) if is_number(value) or isinstance(value, bool) else None


def _flag(value: Any) -> bool | None:
    """Return a truth value: of a Boolean, a number, a text, or the last one of a list of turns; None for anything else."""
    value = value[-1] if isinstance(value, list) and value else value
    if isinstance(value, str):
        return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(
            value.strip().lower()
        )
    return bool(value) if isinstance(value, bool) or (is_number(value) and not math.isnan(value)) else None


def _at_limit(reason: Any) -> bool | None:
    reason = reason[-1] if isinstance(reason, list) and reason else reason
    return LIMITS.fullmatch(reason.strip().lower()) is not None if isinstance(reason, str) else None


def _chat(value: Any, role: str, place: str) -> list[Row]:
    """Return a prompt or a completion as messages."""
    if isinstance(value, list):
        return importers.openai_messages(value, place)
    if value is None:
        return []
    text = str(value)
    found = _CHAT.fullmatch(text) if role == "user" and text.count("user\n") == 1 else None
    if found is None:
        return [{"role": role, "content": text}]
    system = [{"role": "system", "content": found["system"]}] if found["system"] else []
    return [*system, {"role": "user", "content": found["user"]}]


# Traces of verifiers, which prime-rl writes, too


def _traces(episode: Row, place: str, step: int) -> Iterator[Row]:
    """Yield the traces of an episode that train the policy. An episode that failed before its first trace is a failed rollout."""
    traces = episode.get("traces", [episode])
    trained = [
        trace for trace in traces if isinstance(trace, dict) and _dict(trace.get("agent")).get("trainable") is not False
    ]
    work = _dict(_dict(episode.get("run")).get("work"))
    step = step if work.get("step") is None else step_number(work["step"], place, "step")
    environment = str(_dict(episode.get("env")).get("name") or _dict(episode.get("env")).get("id") or "")
    for number, trace in enumerate(trained if traces else [{"ok": False}]):
        task = _dict(trace.get("task")) or _dict(episode.get("task"))
        data = _dict(task.get("data"))
        key = first(task, ("key", "hash")) or data.get("idx")
        messages = importers.openai_messages(_branch(trace), place)
        asked = [message["content"] for message in messages if message["role"] == "user"]
        prompt = _chat(data.get("prompt"), "user", place)
        question = next(iter(asked), None) or next((message["content"] for message in prompt), None)
        rewards = {name: _reward(value) for name, value in _dict(trace.get("rewards")).items()}
        known = {name: value for name, value in rewards.items() if value is not None}
        calls = [call for call in _list(trace.get("calls")) if isinstance(call, dict)]
        tokens = [_count(_dict(call.get("usage")).get("completion_tokens")) for call in calls]
        times = [(_dict(call.get("time")).get("start"), _dict(call.get("time")).get("end")) for call in calls]
        reason = trace.get("stop_condition")
        last = next((call.get("finish_reason") for call in reversed(calls) if not call.get("error")), None)
        failed = trace.get("ok") is False or (not known and bool(trace.get("errors")))
        yield {
            "traj_id": place if len(trained) < 2 else f"{place}.{number}", "step": step, "question": question,
            "messages": messages or prompt,
            "problem_id": None if key is None else f"{environment}/{key}", "rewards": known,
            "reward": sum(known.values()) if known else None,
            "truth": first(data, TRUTHS), "answer": None, "kept": True, "advantage": _advantage(trace),
            "truncated": None if failed else bool(_at_limit(reason) or last == "length"),
            "stop_reason": "error" if failed else reason,
            "response_tokens": sum(filter(None, tokens)) if tokens and None not in tokens else None,
            "generate_s": sum(end - start for start, end in times if is_number(start) and is_number(end)) or None,
        }  # fmt: skip


def _branch(trace: Row) -> list[Any]:
    """Return the messages of the last branch of a graph of messages."""
    nodes, messages = _list(trace.get("nodes")), []
    place, left = len(nodes) - 1, len(nodes)
    while isinstance(place, int) and 0 <= place < len(nodes) and left > 0:
        node, left = _dict(nodes[place]), left - 1
        messages.append(node.get("message"))
        place = node.get("parent", -1)
    return messages[::-1]


def _reward(value: Any) -> float | None:
    score, weight = _dict(value).get("score", value), _dict(value).get("weight", 1.0)
    return float(score) * float(weight) if is_number(score) and is_number(weight) else None


def _advantage(trace: Row) -> float | None:
    credits = (_list(_dict(node).get("advantages")) for node in _list(trace.get("nodes")))
    return next((float(values[0]) for values in credits if values and is_number(values[0])), None)


def _dict(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
