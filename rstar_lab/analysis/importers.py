"""Others' rollouts as runs: verl's dumps, TRL's completions, OpenAI-style messages, inspect_ai logs.

What a source does not say is missing in the run (null), never invented: a metric that needs it is NaN. An imported run
reads like any other.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.outcomes import Outcome
from rstar_lab.runs import RunStoreError, RunWriter

Row = dict[str, Any]
_STAGE = "import"


def import_verl(source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None) -> Path:
    """verl's `trainer.rollout_data_dir`: a folder of {step}.jsonl, or one such file. Returns the run's folder.

    verl keeps the rollouts it trained on, without tool outcomes, lengths or ids: problems are told apart by their text.
    Raises UserError naming file and line of a row that cannot be read.
    """
    path = Path(source)
    files = sorted(path.glob("*.jsonl"), key=_number) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise UserError(f"{path}: no .jsonl files of verl's rollout_data_dir here")

    def rollouts() -> Iterator[Row]:
        for file in files:
            for place, row in _json_lines(file):
                step = row.get("step", _number(file))
                yield {
                    "step": _whole(step, place, "step"),
                    "question": _text(row, "input", place),
                    "messages": [
                        {"role": "user", "content": _text(row, "input", place)},
                        {"role": "assistant", "content": _text(row, "output", place)},
                    ],
                    "reward": _real(row.get("score"), place, "score"),
                    "truth": row.get("gts"),
                    "answer": row.get("pred"),
                    "kept": True,
                }

    return _write(rollouts(), path, runs_dir, run_id, "verl")


def import_trl(
    source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None, reward: str | None = None
) -> Path:
    """TRL's completions parquet (`completions_*.parquet`, a folder of them or one). Returns the run's folder.

    reward: the column to take, needed where a file has several reward columns (TRL logs each function's own).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(source)
    files = sorted(path.glob("*.parquet"), key=_number) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise UserError(f"{path}: no completions parquet files of TRL here")

    def rollouts() -> Iterator[Row]:
        for file in files:
            try:
                table = pq.ParquetFile(file).read()
            except (OSError, pa.ArrowInvalid) as error:
                raise UserError(f"{file} is no whole Parquet file: {str(error).splitlines()[0]}") from error
            if missing := {"step", "prompt", "completion"} - set(table.column_names):
                raise UserError(f"{file} has no column {sorted(missing)[0]!r}: is it TRL's completions?")
            column = reward or _reward_column(file, table)
            if column not in table.column_names:
                raise UserError(f"{file} has no column {column!r}; it has {', '.join(table.column_names)}")
            for number, row in enumerate(table.to_pylist()):
                place = f"{file}, row {number}"
                prompt, completion = _conversation(row["prompt"], "user"), _conversation(row["completion"], "assistant")
                yield {
                    "step": _whole(row["step"], place, "step"),
                    "question": next((said["content"] for said in reversed(prompt) if said["role"] == "user"), None),
                    "messages": prompt + completion,
                    "reward": _real(row[column], place, column),
                    "advantage": _real(row.get("advantage"), place, "advantage"),
                    "truth": row.get("solution", row.get("answer")),
                    "kept": True,
                }

    return _write(rollouts(), path, runs_dir, run_id, "trl")


def import_messages(source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None) -> Path:
    """OpenAI-style JSONL: {"messages": [...]} a line, with optional id, problem_id, step, reward (or score), answer, truth.

    Tool calls are kept in the text and counted; their outcomes are unknown unless a tool message has one of ours.
    """
    path = Path(source)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise UserError(f"{path}: no .jsonl files of messages here")

    def rollouts() -> Iterator[Row]:
        for file in files:
            for place, row in _json_lines(file):
                if not isinstance(row.get("messages"), list):
                    raise UserError(f"{place}: field 'messages' is no list")
                yield from_messages(row, place) | {"step": _whole(row.get("step", 0), place, "step")}

    return _write(rollouts(), path, runs_dir, run_id, "messages")


def from_messages(row: Row, place: str) -> Row:
    """One rollout from a row of OpenAI-style messages."""
    messages, calls, names = [], [], {}
    for said in row["messages"]:
        if not isinstance(said, dict) or not isinstance(said.get("role"), str):
            raise UserError(f"{place}: a message has no role")
        content = _content(said.get("content"))
        for call in said.get("tool_calls") or []:
            function = call.get("function") or {}
            names[call.get("id")] = function.get("name")
            content += f"\n<tool_call>{json.dumps({'name': function.get('name'), 'arguments': _arguments(function)})}</tool_call>"
        message: Row = {"role": said["role"], "content": content.strip("\n")}
        if said["role"] == "tool":
            outcome = said.get("outcome")
            message |= {"tool": said.get("name") or names.get(said.get("tool_call_id")), "outcome": outcome}
            calls.append(message)
        messages.append(message)
    turns = sum(message["role"] == "assistant" for message in messages)
    outcomes = [call["outcome"] for call in calls]
    known = all(outcome in set(Outcome) for outcome in outcomes)
    return {
        "traj_id": row.get("id"),
        "problem_id": row.get("problem_id"),
        "question": next((said["content"] for said in messages if said["role"] == "user"), None),
        "messages": messages,
        "reward": _real(row.get("reward", row.get("score")), place, "reward"),
        "answer": row.get("answer"),
        "truth": row.get("truth"),
        "turns": turns,
        "calls": len(calls),
        "outcomes": outcomes if known else None,
    }


# inspect_ai's own words for what went wrong in a tool; what is not here is an exception of the model's code.
_INSPECT_ERRORS = {
    "timeout": Outcome.TIMEOUT,
    "parsing": Outcome.MALFORMED_CALL,
    "limit": Outcome.OUTPUT_LIMIT,
    "output_limit": Outcome.OUTPUT_LIMIT,
}


def import_inspect(
    source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None, scorer: str | None = None
) -> Path:
    """An inspect_ai log (`.eval` or its JSON). Needs the extra `inspect`. Returns the run's folder.

    scorer: whose score is the reward, needed where the log has several.
    """
    try:
        from inspect_ai.log import read_eval_log
        from inspect_ai.scorer import value_to_float
    except ImportError:
        raise UserError("reading inspect_ai logs needs inspect_ai: pip install 'rstar_lab[inspect]'") from None
    path = Path(source)
    if not path.exists():
        raise UserError(f"{path}: no such log")
    try:
        log = read_eval_log(str(path))
    except Exception as error:
        raise UserError(f"{path} is no inspect_ai log: {error}") from error
    number = value_to_float()

    def rollouts() -> Iterator[Row]:
        for sample in log.samples or []:
            score = _score(path, sample.scores or {}, scorer)
            messages, outcomes = [], []
            for said in sample.messages:
                text = said.text
                for call in getattr(said, "tool_calls", None) or []:
                    text += (
                        f"\n<tool_call>{json.dumps({'name': call.function, 'arguments': call.arguments})}</tool_call>"
                    )
                message: Row = {"role": said.role, "content": text.strip("\n")}
                if said.role == "tool":
                    outcome = _INSPECT_ERRORS.get(said.error.type, Outcome.EXCEPTION) if said.error else Outcome.OK
                    message |= {"tool": said.function, "outcome": str(outcome)}
                    outcomes.append(str(outcome))
                messages.append(message)
            yield {
                "step": 0,
                "problem_id": str(sample.id),
                "question": sample.input if isinstance(sample.input, str) else sample.input[-1].text,
                "messages": messages,
                "reward": None if score is None else number(score.value),
                "answer": None if score is None else score.answer,
                "truth": sample.target,
                "turns": sum(said.role == "assistant" for said in sample.messages),
                "calls": len(outcomes),
                "outcomes": outcomes,
                "truncated": sample.limit is not None,
                "engine": log.eval.model,
                "generate_s": sample.working_time,
                "stop_reason": "error" if sample.error else None,
            }

    return _write(rollouts(), path, runs_dir, run_id or path.stem, "inspect_ai")


def _score(path: Path, scores: dict[str, Any], scorer: str | None) -> Any:
    if scorer is None and len(scores) > 1:
        raise UserError(f"{path} has several scores ({', '.join(scores)}): choose one by scorer=")
    if scorer is not None and scores and scorer not in scores:
        raise UserError(f"{path} has no score {scorer!r}; it has {', '.join(scores)}")
    return scores.get(scorer or next(iter(scores), ""))


def _write(rollouts: Iterable[Row], source: Path, runs_dir: str | Path, run_id: str | None, kind: str) -> Path:
    """Rollouts to a run, a step after the other."""
    run_id = run_id or re.sub(r"[^A-Za-z0-9._-]+", "-", source.resolve().stem).strip("-.") or kind
    run_dir = Path(runs_dir) / run_id
    if (run_dir / "run.json").exists():
        raise RunStoreError(f"run {run_dir} is there already: choose another run_id, or remove it")
    by_step: dict[int, list[Row]] = defaultdict(list)
    for rollout in rollouts:
        by_step[rollout["step"]].append(rollout)
    if not by_step:
        raise UserError(f"{source} holds no rollouts")
    recipe = {"source": kind, "path": str(source)}
    with RunWriter.open(runs_dir, run_id, kind="import", recipe=recipe, seed=0) as writer:
        for step, rows in sorted(by_step.items()):
            writer.write_step(_STAGE, step, **_rows(run_id, step, rows), metrics={})
        writer.finish("finished")
    return run_dir


def _rows(run_id: str, step: int, rollouts: list[Row]) -> dict[str, list[Row]]:
    trajectories, calls, transcripts = [], [], []
    samples: dict[str, int] = defaultdict(int)
    for number, rollout in enumerate(rollouts):
        question = rollout["question"]
        problem = rollout.get("problem_id") or _digest(question if question is not None else str(number))
        # An id of the source need not be unique over runs; ours must be.
        traj_id = f"{run_id}/{step:06d}/{rollout.get('traj_id') or number}"
        outcomes = rollout.get("outcomes")
        truth = _text_or_none(rollout.get("truth"))
        trajectories.append(
            {
                name: rollout.get(name)
                for name in ("reward", "kept", "advantage", "turns", "truncated", "engine", "generate_s", "stop_reason")
            }
            | {
                "traj_id": traj_id,
                "group_id": f"{step}/{problem}",
                "problem_id": problem,
                "sample": samples[problem],
                "calls": rollout.get("calls"),
                "errors": None if outcomes is None else sum(outcome != Outcome.OK for outcome in outcomes),
                "outcomes": outcomes,
                "answer": _text_or_none(rollout.get("answer")),
                "truth": truth,
            }
        )
        samples[problem] += 1
        messages = rollout["messages"]
        transcripts.append({"traj_id": traj_id, "question": question, "truth": truth, "messages": json.dumps(messages)})
        turn = -1
        places: dict[int, int] = defaultdict(int)
        for message in messages:
            turn += message["role"] == "assistant"
            if message["role"] == "tool" and outcomes is not None:
                place = {
                    "turn": max(turn, 0),
                    "index": places[turn],
                    "tool": message["tool"],
                    "outcome": message["outcome"],
                }
                calls.append({"traj_id": traj_id} | place)
                places[turn] += 1
    return {"trajectories": trajectories, "calls": calls, "transcripts": transcripts}


def _json_lines(file: Path) -> Iterator[tuple[str, Row]]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{place} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{place} is no JSON object")
            yield place, row


def _reward_column(file: Path, table: Any) -> str:
    import pyarrow as pa

    other = {"step", "prompt", "completion", "advantage"}
    columns = [field.name for field in table.schema if field.name not in other and pa.types.is_floating(field.type)]
    if len(columns) != 1:
        found = ", ".join(columns) or "none"
        raise UserError(f"{file} has reward columns {found}: name the one to take by reward=")
    return columns[0]


def _conversation(value: Any, role: str) -> list[Row]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [{"role": said.get("role", role), "content": _content(said.get("content"))} for said in value]


def _content(value: Any) -> str:
    """Text of a message's content, which may be a list of parts; parts that are no text are named."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    parts = [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in value]
    return "".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in parts)


def _arguments(function: Row) -> Any:
    arguments = function.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _text(row: Row, name: str, place: str) -> str:
    if not isinstance(row.get(name), str):
        raise UserError(f"{place}: field {name!r} is missing or no text")
    return row[name]


def _text_or_none(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _real(value: Any, place: str, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return float(value)
    raise UserError(f"{place}: field {name!r} is no number: {value!r}")


def _whole(value: Any, place: str, name: str) -> int:
    if isinstance(value, int | float) and value == int(value) and value >= 0:
        return int(value)
    raise UserError(f"{place}: field {name!r} is no step number: {value!r}")


def _number(path: Path) -> int:
    digits = re.findall(r"\d+", path.stem)
    return int(digits[-1]) if digits else 0


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
