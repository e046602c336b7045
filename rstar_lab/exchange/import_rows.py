"""Convert rollouts of other frameworks to rows of the run store, and write them as a run of kind `import`.

An importer (`rstar_lab.exchange.importers`) yields one dict per rollout with these keys; missing ones are null in the run:
step, problem_id, group (of the rollouts of one prompt; default: problem_id), question, messages, reward, rewards, kept,
advantage, answer, truth, turns, calls, outcomes, truncated, engine, generate_s, stop_reason, response_tokens, model_tokens,
reflection_tokens, traj_id.
"""

import hashlib
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.runs import RunStoreError, RunWriter
from rstar_lab.runs.files import atomic_write
from rstar_lab.runs.messages import own_texts
from rstar_lab.runs.reflection_words import count_reflection_words
from rstar_lab.runs.schema import REWARDS_FILE, is_valid_name
from rstar_lab.tool_calls import parse_stored_calls
from rstar_lab.untrusted import files

Row = dict[str, Any]
_STAGE = "import"
_NOT_FINITE = ("nan", "inf", "-inf", "infinity", "-infinity")
_COPIED = (
    "reward", "kept", "advantage", "turns", "calls", "truncated", "engine", "generate_s", "stop_reason",
    "response_tokens", "model_tokens",
)  # fmt: skip

# Tool responses in the text of a decoded ChatML conversation, with the role lines around them. Decoding without special
# tokens leaves the bare words `user` and `assistant`.
_TOOL_RESPONSES = re.compile(
    r"(?:(?<!\s)\s*+)?(?:<\|im_end\|>\s*+)?(?:<\|im_start\|>\s*+)?(?:\b(?:user|tool)\s*+)?"
    r"((?:<tool_response>.*?(?:</tool_response>|\Z)\s*)+)"
    r"(?:<\|im_end\|>)?\s*(?:(?:<\|im_start\|>)?assistant\b\n?)?",
    re.DOTALL,
)
_TOOL_RESPONSE = re.compile(r"<tool_response>(.*?)(?:</tool_response>|\Z)", re.DOTALL)


def conversation_messages(response: str) -> list[Row]:
    """Split the text of a multi-turn response into assistant and tool messages.

    response: decoded text with `<tool_call>` and `<tool_response>` tags, with or without ChatML special tokens.
    A tool message has no outcome, because an outcome is never derived from text.
    """
    messages: list[Row] = []
    position = 0
    for match in _TOOL_RESPONSES.finditer(response):
        turn = response[position : match.start()]
        turn = "" if turn.isspace() else turn
        messages.append({"role": "assistant", "content": turn})
        names = [call.name for call in parse_stored_calls(turn)]
        for index, content in enumerate(_TOOL_RESPONSE.findall(match[1])):
            name = names[index] if index < len(names) else None
            messages.append({"role": "tool", "content": content.strip(), "tool": name, "outcome": None})
        position = match.end()
    last = re.sub(r"<\|im_end\|>\s*\Z", "", response[position:])
    if last or not messages:
        messages.append({"role": "assistant", "content": last})
    return messages


def conversation_counts(messages: list[Row]) -> Row:
    """Return turns, calls and reflection_tokens (reflection words in the model's own text) of a conversation."""
    texts = own_texts(messages)
    calls = sum(len(parse_stored_calls(text)) for text in texts)
    return {"turns": len(texts), "calls": calls, "reflection_tokens": sum(map(count_reflection_words, texts))}


def default_run_id(source: Path, kind: str) -> str:
    """Return the id of the run of a source: the name of its file or folder, with letters that a folder's name can have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", source.resolve().stem).strip("-.") or kind


def write_run(rollouts: Iterable[Row], source: Path, runs_dir: str | Path, run_id: str | None, kind: str) -> Path:
    """Write the rollouts as a run, grouped by step, and return the run's folder. kind: name of the source's format.

    Raises RunStoreError if the run exists, UserError if there are no rollouts.
    """
    run_id = run_id or default_run_id(source, kind)
    if not is_valid_name(run_id):
        raise UserError(f"run id {run_id!r} is not a valid folder's name: use letters, digits, '.', '_' and '-'")
    run_dir = Path(runs_dir) / run_id
    if (run_dir / "run.json").exists():
        raise RunStoreError(f"{run_dir} exists already: choose another run_id or remove the run")
    by_step: dict[int, list[Row]] = defaultdict(list)
    with files.reading(source, errors=(pa.ArrowException,)):
        for rollout in rollouts:
            by_step[step_number(rollout["step"], str(source), "step")].append(rollout)
    if not by_step:
        raise UserError(f"{source} contains no rollouts")
    created = not run_dir.exists()
    try:
        with files.reading(f"{source}: a value cannot be stored", errors=(pa.ArrowException,)):
            _write(by_step, run_dir, {"source": kind, "path": str(source)})
    except UserError:
        if created:  # otherwise the next attempt would find half a run
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return run_dir


def _write(by_step: dict[int, list[Row]], run_dir: Path, recipe: Row) -> None:
    rewards: list[Row] = []
    with RunWriter.open(run_dir.parent, run_dir.name, kind="import", recipe=recipe, seed=0) as writer:
        for step, rollouts_of_step in sorted(by_step.items()):
            rows = _level_rows(run_dir.name, step, rollouts_of_step)
            for row, rollout in zip(rows["trajectories"], rollouts_of_step, strict=True):
                if rollout.get("rewards"):
                    rewards.append({"traj_id": row["traj_id"], **rollout["rewards"]})
            writer.write_step(_STAGE, step, **rows, metrics=_step_metrics(rows["trajectories"]))
        if rewards:
            names = sorted({name for row in rewards for name in row} - {"traj_id"})
            schema = pa.schema([("traj_id", pa.string()), *((name, pa.float64()) for name in names)])
            with atomic_write(run_dir / REWARDS_FILE) as file:
                pq.write_table(pa.Table.from_pylist(rewards, schema), file)
        writer.finish("finished")


def _step_metrics(trajectories: Sequence[Row]) -> Row:
    """Return the metrics of a step that follow from its rollouts, under the names that a training run uses."""
    metrics: Row = {"rollouts": len(trajectories), "groups": len({row["group_id"] for row in trajectories})}
    for name in ("reward", "turns", "calls", "response_tokens", "truncated"):
        values = [float(row[name]) for row in trajectories if row.get(name) is not None]
        if values:
            metrics[name] = sum(values) / len(values)
    return metrics


def _level_rows(run_id: str, step: int, rollouts: list[Row]) -> dict[str, list[Row]]:
    levels: dict[str, list[Row]] = {"trajectories": [], "calls": [], "transcripts": []}
    ids: dict[str, int] = defaultdict(int)
    samples: dict[str, int] = defaultdict(int)
    for number, rollout in enumerate(rollouts):
        messages = rollout["messages"]
        # Ids in the store must be unique over all runs, but another run can contain the source's id.
        traj_id = f"{run_id}/{step:06d}/{number if (given := rollout.get('traj_id')) is None else given}"
        ids[traj_id] += 1
        if ids[traj_id] > 1:  # the source's id is that of the problem, for example
            traj_id += f"~{number}"
        truth = text_or_none(rollout.get("truth"))
        trajectory, calls = _trajectory(rollout, step, number, truth), _calls(messages, rollout.get("outcomes"))
        trajectory["sample"] = samples[trajectory["group_id"]]
        samples[trajectory["group_id"]] += 1
        levels["trajectories"].append(trajectory | {"traj_id": traj_id})
        levels["calls"] += [call | {"traj_id": traj_id} for call in calls]
        text = json.dumps(messages, ensure_ascii=False)
        transcript = {"traj_id": traj_id, "question": rollout["question"], "truth": truth, "messages": text}
        levels["transcripts"].append(transcript)
    return levels


def _trajectory(rollout: Row, step: int, number: int, truth: str | None) -> Row:
    question, outcomes = rollout["question"], rollout.get("outcomes")
    problem = rollout.get("problem_id") or digest(question if question is not None else str(number))
    return {
        **conversation_counts(rollout["messages"]),
        **{name: rollout[name] for name in _COPIED if rollout.get(name) is not None},
        "group_id": f"{step}/{problem if rollout.get('group') is None else rollout['group']}", "problem_id": problem,
        "errors": None if outcomes is None else sum(outcome != Outcome.OK for outcome in outcomes), "outcomes": outcomes,
        "answer": text_or_none(rollout.get("answer")), "truth": truth,
    }  # fmt: skip


def _calls(messages: list[Row], outcomes: list[Any] | None) -> Iterator[Row]:
    turn, index = -1, 0
    for message in messages:
        if message["role"] == "assistant":
            turn, index = turn + 1, 0
        elif message["role"] == "tool":
            outcome = None if outcomes is None else message["outcome"]
            yield {"turn": max(turn, 0), "index": index, "tool": message["tool"], "outcome": outcome}
            index += 1


# --- reading source rows; errors name the file and the row ------------------------------------------------------------


def json_lines(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) for each object of a JSON-lines file. Raises UserError for a line that is not an object."""
    for number, row in files.json_lines(file):
        place = f"{file}, line {number}"
        yield place, files.check_type(row, dict, place)


def content_text(value: Any) -> str:
    """Return the text of a message's content. Parts without text appear as `[type]`."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in value]
    return "".join(map(_part_text, parts))


def _part_text(part: Row) -> str:
    if (kind := part.get("type")) in ("reasoning", "thinking"):  # OpenAI's and Anthropic's names
        texts = [part.get(name) for name in (kind, "text", "summary")]
        return reasoning_text(next((text for text in texts if isinstance(text, str) and text), None))
    texts = [part.get(name) for name in ("text", "refusal")]
    own = next((text for text in texts if text is not None), "" if kind == "text" else f"[{kind or 'part'}]")
    return str(own.get("value", "") if isinstance(own, dict) else own)  # an object: Assistants API


def reasoning_text(text: str | None) -> str:
    """Return the reasoning of a message in the tags with which models write it; "" without reasoning."""
    return f"<think>\n{text.strip()}\n</think>\n\n" if text and text.strip() else ""


def text_or_none(value: Any) -> str | None:
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def number_or_none(value: Any, place: str, name: str) -> float | None:
    """Return a number; None for null and for numbers that are not finite. Raises UserError for anything else."""
    is_number = value is None or isinstance(value, int) or str(value).strip().lower() in _NOT_FINITE
    if (number := number_of(value)) is None and not is_number:
        raise UserError(f"{place}: field {name!r} is not a number: {str(value)[:80]!r}")
    return number


def number_of(value: Any) -> float | None:
    """Return a finite number, also one that is written as text, as a float; None for anything else."""
    if not isinstance(value, bool | int | float | str):
        return None
    with suppress(ValueError, OverflowError):
        return number if math.isfinite(number := float(value)) else None
    return None


def step_number(value: Any, place: str, name: str) -> int:
    if (number := number_of(value)) is not None and 0 <= number < 2**31 and number == int(number):
        return int(number)
    raise UserError(f"{place}: field {name!r} is not a step number: {str(value)[:80]!r}")


def number_in_name(path: Path) -> int:
    digits = re.findall(r"\d+", path.stem)
    return int(digits[-1]) if digits else 0


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
