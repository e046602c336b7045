"""Import rollouts of other frameworks: verl dumps, TRL completions, OpenAI-style messages, inspect_ai logs.

Each function writes a run of kind `import` and returns its folder. Values that the source does not contain are null, and
metrics that need them are NaN.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError, install_hint
from rstar_lab.common.outcomes import Outcome
from rstar_lab.exchange.import_rows import (
    TRUTHS,
    Row,
    content_text,
    conversation_counts,
    conversation_messages,
    json_lines,
    number_in_name,
    number_of,
    number_or_none,
    reasoning_text,
    required_text,
    step_number,
    write_run,
)
from rstar_lab.runs.messages import OTHER, ROLES, own_texts
from rstar_lab.untrusted.files import DataError, check_zip, parse_json
from rstar_lab.untrusted.parquet import read_parquet

# --- verl ------------------------------------------------------------------------------------------------------------

_VERL_FIELDS = {"input", "output", "gts", "score", "step", "pred", "request_id", "uid"}


def import_verl(
    source: str | Path,
    runs_dir: str | Path = "runs",
    *,
    run_id: str | None = None,
    tokenizer: str | Path | None = None,
) -> Path:
    """Import verl's `trainer.rollout_data_dir`: a folder of {step}.jsonl files, or one file.

    The text is split into turns and tool calls at `<tool_call>` and `<tool_response>`. The outcomes of calls are null:
    verl does not record them. Problems are identified by their text, and groups by `uid` where it is stored.
    Numeric fields that verl adds from the reward function (such as `acc`) are kept as reward columns (`Runs.rewards`).
    tokenizer: tokenizer.json or its folder, to count response_tokens and model_tokens; None: both are null.
    Raises UserError that names the file and line of a row that cannot be read.
    """
    path = Path(source)
    files = _source_files(path, "*.jsonl", "no .jsonl files of verl's rollout_data_dir")
    count_tokens = _token_counter(tokenizer)

    def rollouts() -> Iterator[Row]:
        for file in files:
            for place, row in json_lines(file):
                question, output = required_text(row, "input", place), required_text(row, "output", place)
                messages = conversation_messages(output)
                numbers = {name: number_of(value) for name, value in row.items() if name not in _VERL_FIELDS}
                extra = {name: value for name, value in numbers.items() if value is not None}
                if reserved := extra.keys() & {"traj_id", "run_id"}:
                    raise UserError(f"{place}: a reward cannot be called {min(reserved)!r}; rename the field")
                yield {
                    "step": step_number(row.get("step", number_in_name(file)), place, "step"),
                    "question": question,
                    "group": row.get("uid"),
                    "messages": [{"role": "user", "content": question}, *messages],
                    "reward": number_or_none(row.get("score"), place, "score"),
                    "rewards": extra,
                    "truth": row.get("gts"),
                    "answer": row.get("pred"),
                    "kept": True,
                    "response_tokens": count_tokens(output),
                    "model_tokens": count_tokens("".join(own_texts(messages))),
                }

    return write_run(rollouts(), path, runs_dir, run_id, "verl")


def _token_counter(tokenizer: str | Path | None) -> Callable[[str], int | None]:
    if tokenizer is None:
        return lambda text: None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("tokenizer= requires the package tokenizers: pip install tokenizers") from None
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise UserError(f"{path} does not exist; tokenizer= expects a tokenizer.json or its folder")
    loaded = Tokenizer.from_file(str(path))
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


# --- TRL -------------------------------------------------------------------------------------------------------------


def import_trl(
    source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None, reward: str | None = None
) -> Path:
    """Import TRL's completions: a folder of `completions_*.parquet` files, or one file.

    reward: the column that becomes the reward, or `sum` for the sum of all. Required if the file has several reward columns, because
    TRL logs one per reward function. All of them are kept as reward columns (`Runs.rewards`).
    """
    path = Path(source)
    files = _source_files(path, "*.parquet", "no completions parquet files of TRL")

    def rollouts() -> Iterator[Row]:
        for file in files:
            table = read_parquet(file)
            if missing := {"step", "prompt", "completion"} - set(table.column_names):
                raise UserError(f"{file} has no column {sorted(missing)[0]!r}; expected a TRL completions file")
            columns = _reward_columns(table)
            column = "" if reward == "sum" and "sum" not in columns else _chosen_reward(file, table, columns, reward)
            for number, row in enumerate(table.to_pylist()):
                place = f"{file}, row {number}"
                prompt, completion = (
                    _messages(row["prompt"], "user", place),
                    _messages(row["completion"], "assistant", place),
                )
                questions = [message["content"] for message in prompt if message["role"] == "user"]
                yield {
                    "step": step_number(row["step"], place, "step"),
                    "question": questions[-1] if questions else None,
                    "messages": prompt + completion,
                    "reward": number_or_none(row[column], place, column)
                    if column
                    else _sum(row[name] for name in columns),
                    "rewards": {name: row[name] for name in columns},
                    "advantage": number_or_none(row.get("advantage"), place, "advantage"),
                    "truth": next((row[name] for name in ("solution", *TRUTHS) if row.get(name) is not None), None),
                    "kept": True,
                }

    return write_run(rollouts(), path, runs_dir, run_id, "trl")


def _sum(rewards: Iterable[float | None]) -> float | None:
    known = [value for value in rewards if value is not None and not math.isnan(value)]
    return sum(known) if known else None


def _reward_columns(table: Any) -> list[str]:
    import pyarrow as pa

    other = {"step", "prompt", "completion", "advantage"}
    return [field.name for field in table.schema if field.name not in other and pa.types.is_floating(field.type)]


def _chosen_reward(file: Path, table: Any, columns: list[str], reward: str | None) -> str:
    if reward is None:
        if len(columns) != 1:
            raise UserError(f"{file} has the reward columns {', '.join(columns) or 'none'}: choose one with reward=")
        return columns[0]
    if reward not in table.column_names:
        raise UserError(f"{file} has no column {reward!r}; it has {', '.join(table.column_names)}")
    return reward


def _messages(value: Any, role: str, place: str) -> list[Row]:
    """Return the messages of a TRL prompt or completion, which is text or a list of messages."""
    if isinstance(value, str):
        return conversation_messages(value) if role == "assistant" else [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UserError(f"{place}: expected text or a list of messages, not {type(value).__name__}")
    sources = [{"role": role, **item} if isinstance(item, dict) else item for item in value]
    return openai_messages(sources, place, of_parquet=True)


# --- OpenAI-style messages -------------------------------------------------------------------------------------------


def import_messages(source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None) -> Path:
    """Import JSON lines of OpenAI-style conversations: {"messages": [...]} per line.

    Optional fields: id, problem_id, step, reward (or score), answer, truth. Tool calls are kept in the text and counted.
    The outcomes of the calls are null unless every tool message has a field `outcome` of `rstar_lab.common.outcomes.Outcome`.
    """
    path = Path(source)
    files = _source_files(path, "*.jsonl", "no .jsonl files of messages")

    def rollouts() -> Iterator[Row]:
        for file in files:
            for place, row in json_lines(file):
                if not isinstance(row.get("messages"), list):
                    raise UserError(f"{place}: field 'messages' is not a list")
                yield from_messages(row, place) | {"step": step_number(row.get("step", 0), place, "step")}

    return write_run(rollouts(), path, runs_dir, run_id, "messages")


def from_messages(row: Row, place: str) -> Row:
    """Convert one row of OpenAI-style messages to a rollout."""
    messages = openai_messages(row["messages"], place)
    made = conversation_counts(messages)["calls"]
    outcomes = [message["outcome"] for message in messages if message["role"] == "tool"]
    valid = all(isinstance(outcome, str) and outcome in set(Outcome) for outcome in outcomes)
    return {
        "traj_id": row.get("id"),
        "problem_id": row.get("problem_id"),
        "question": next((message["content"] for message in messages if message["role"] == "user"), None),
        "messages": messages,
        "reward": number_or_none(row.get("reward", row.get("score")), place, "reward"),
        "answer": row.get("answer"),
        "truth": row.get("truth"),
        "calls": max(made, len(outcomes)),  # a conversation can end with a call
        "outcomes": outcomes if valid and made <= len(outcomes) else None,
    }


_ROLES = {"developer": "system", "function": "tool", "ipython": "tool", "model": "assistant", "human": "user"}


def openai_messages(sources: list[Any], place: str, *, of_parquet: bool = False) -> list[Row]:
    """Return OpenAI-style messages with reasoning, refusals and tool calls in their text. Raises UserError for a message without role.

    of_parquet: the messages are from a Parquet file, which gives every call the arguments of all calls, null where it has none.
    """
    messages: list[Row] = []
    names: dict[str, str | None] = {}
    if any(not isinstance(source, dict) or not isinstance(source.get("role"), str) for source in sources):
        raise UserError(f"{place}: a message has no role")
    for source in (part for message in sources for part in _without_tool_parts(message)):
        role = _ROLES.get(source["role"], source["role"])
        reasoning = next((text for key in _REASONING if (text := _reasoning(source.get(key)))), None)
        refusal = source["refusal"] if isinstance(source.get("refusal"), str) else ""
        content = reasoning_text(reasoning) + content_text(source.get("content")) + refusal
        calls = source.get("tool_calls") or (
            [{"function": source["function_call"]}] if source.get("function_call") else []
        )
        for call in _json_or_text(calls):
            function = (call.get("function") or call.get("custom") or call) if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise UserError(f"{place}: a tool call is not an object")
            name = None if function.get("name") is None else str(function["name"])
            names[str(call.get("id"))] = name
            content += _call_text(name, _arguments(function, of_parquet))
        message: Row = {"role": role if role in ROLES else OTHER, "content": content.strip("\n")}
        if role == "tool":
            name = source.get("name") or names.get(str(source.get("tool_call_id")))
            message |= {"tool": None if name is None else str(name), "outcome": source.get("outcome")}
        messages.append(message)
    return messages


# Where providers put the reasoning of a message: DeepSeek and vLLM, OpenRouter, Ollama, LiteLLM.
_REASONING = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks")


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
    named: dict[str, list[Row]] = {"tool_use": [], "tool_result": [], "": []}
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        named[kind if kind in ("tool_use", "tool_result") else ""].append(part)
    results = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content")}
        for part in named["tool_result"]
    ]
    uses = [
        {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")} for part in named["tool_use"]
    ]
    calls = {"tool_calls": [*(source.get("tool_calls") or []), *uses]} if uses else {}
    return [*results, source | {"content": named[""]} | calls] if named[""] or not results else results


def _json_or_text(value: Any) -> Any:
    """Return the value that a text holds as JSON, or the value."""
    try:
        return parse_json(value, "text") if isinstance(value, str) else value
    except DataError:
        return value


def _call_text(name: str | None, arguments: Any) -> str:
    return f"\n<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def _arguments(function: Row, of_parquet: bool) -> Any:
    given = function.get("arguments", function.get("input"))  # custom tools have one text as their input
    if of_parquet and isinstance(given, dict):
        return {key: value for key, value in given.items() if value is not None}
    return _json_or_text(given)


# --- inspect_ai ------------------------------------------------------------------------------------------------------

# inspect_ai's error types; every other error is an exception of the model's code.
_INSPECT_ERRORS = {
    "timeout": Outcome.TIMEOUT,
    "parsing": Outcome.MALFORMED_CALL,
    "limit": Outcome.OUTPUT_LIMIT,
    "output_limit": Outcome.OUTPUT_LIMIT,
}


def import_inspect(
    source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None, scorer: str | None = None
) -> Path:
    """Import an inspect_ai log (`.eval` or JSON). Requires the extra `inspect`.

    The output tokens of a sample's model usage become model_tokens.
    scorer: the scorer whose score becomes the reward, or `first`. Required if the log has several scores. All scores that are numbers
    are kept as reward columns (`Runs.rewards`).
    """
    try:
        from inspect_ai.log import read_eval_log
    except ImportError:
        raise UserError(f"reading inspect_ai logs requires inspect_ai: {install_hint('inspect')}") from None
    path = Path(source)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    check_zip(path)
    try:
        log = read_eval_log(str(path))
    except Exception as error:
        raise UserError(f"{path} is not an inspect_ai log: {error}") from error

    chosen = _chosen_score(
        path, list(dict.fromkeys(name for one in log.samples or [] for name in one.scores or {})), scorer
    )

    def rollouts() -> Iterator[Row]:
        for sample in log.samples or []:
            score = (sample.scores or {}).get(chosen)
            messages = [_inspect_message(message) for message in sample.messages]
            outcomes = [message["outcome"] for message in messages if message["role"] == "tool"]
            usage = sample.model_usage or {}
            yield {
                "step": 0,
                "problem_id": str(sample.id),
                "question": _question(sample.input),
                "messages": messages,
                "reward": None if score is None else _score_number(score.value),
                "rewards": {name: _score_number(one.value) for name, one in (sample.scores or {}).items()},
                "answer": None if score is None else score.answer,
                "truth": sample.target,
                "calls": len(outcomes),
                "outcomes": outcomes,
                "truncated": sample.limit is not None,
                "engine": log.eval.model,
                "generate_s": sample.working_time,
                "stop_reason": "error" if sample.error else None,
                # Scorers that call another model have their own entry.
                "model_tokens": usage[log.eval.model].output_tokens if log.eval.model in usage else None,
            }

    return write_run(rollouts(), path, runs_dir, run_id or path.stem, "inspect_ai")


# Texts of inspect_ai's scores, as its `value_to_float` reads them. Other texts, lists and mappings are not a reward.
_SCORES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def _score_number(value: Any) -> float | None:
    """Return a score as a reward, or None if it is not one number."""
    if isinstance(value, str):
        value = _SCORES.get(value, _SCORES.get(value.lower(), value))
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _inspect_text(content: Any) -> str:
    """Return the text of a message of inspect_ai, with its reasoning."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if part.type == "reasoning":
            parts.append(reasoning_text(part.reasoning or getattr(part, "summary", None)))
        else:
            parts.append(getattr(part, "text", f"[{part.type}]"))
    return "".join(parts)


def _inspect_message(source: Any) -> Row:
    text = _inspect_text(source.content)
    for call in getattr(source, "tool_calls", None) or []:
        text += _call_text(call.function, call.arguments)
    message: Row = {"role": source.role, "content": text.strip("\n")}
    if source.role == "tool":
        outcome = _INSPECT_ERRORS.get(source.error.type, Outcome.EXCEPTION) if source.error else Outcome.OK
        message |= {"tool": source.function, "outcome": str(outcome)}
    return message


def _question(given: Any) -> str:
    """Return the last message of the user in the input of a sample, else its last message."""
    if isinstance(given, str):
        return given
    asked = [message for message in given if message.role == "user"] or given
    return str(asked[-1].text)


def _chosen_score(path: Path, names: list[str], scorer: str | None) -> str:
    """Return the name of the score that becomes the reward. names: of the scores of all samples."""
    if (scorer is None and len(names) < 2) or (scorer == "first" and "first" not in names):
        return next(iter(names), "")
    if scorer is None:
        raise UserError(f"{path} has the scores {', '.join(names)}: choose one with scorer=")
    if names and scorer not in names:
        raise UserError(f"{path} has no score {scorer!r}; it has {', '.join(names)}")
    return scorer


def _source_files(path: Path, pattern: str, missing: str) -> list[Path]:
    files = sorted(path.glob(pattern), key=lambda file: (number_in_name(file), file.name)) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise UserError(f"{path}: {missing} found")
    return files
