"""Import rollouts of other frameworks: verl dumps, TRL completions, OpenAI-style messages, inspect_ai logs.

Each function writes a run of kind `import` and returns its folder. Values that the source does not contain are null, and
metrics that need them are NaN.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError, install_hint
from rstar_lab.common.outcomes import Outcome
from rstar_lab.exchange.import_rows import (
    Row,
    json_lines,
    number_in_name,
    number_of,
    number_or_none,
    step_number,
    write_run,
)
from rstar_lab.exchange.rollout_rows import COLUMNS, converted, first, openai_messages, without_lists
from rstar_lab.untrusted.files import check_zip, reading
from rstar_lab.untrusted.parquet import read_parquet


def import_verl(source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None) -> Path:
    """Import verl's `trainer.rollout_data_dir`: a folder of {step}.jsonl files, or one file.

    The text is split into turns and tool calls at `<tool_call>` and `<tool_response>`. The outcomes of calls are null:
    verl does not record them. Problems are identified by their text, and groups by `uid` where it is stored.
    Numeric fields that verl adds from the reward function (such as `acc`) are kept as reward columns (`Runs.rewards`).
    Raises UserError that names the file and line of a row that cannot be read.
    """

    def rollouts(file: Path) -> Iterator[Row]:
        for place, row in json_lines(file):
            for name in ("input", "output"):
                if not isinstance(row.get(name), str):
                    raise UserError(f"{place}: field {name!r} is missing or not text")
            step = step_number(row.get("step", number_in_name(file)), place, "step")
            for rollout in converted(row, place, step):
                yield rollout | {"traj_id": None}

    return _imported(rollouts, source, ".jsonl", "verl's rollout_data_dir", runs_dir, run_id, "verl")


def import_trl(
    source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None, reward: str | None = None
) -> Path:
    """Import TRL's completions: a folder of `completions_*.parquet` files, or one file.

    reward: the column that becomes the reward, or `sum` for the sum of all. Required if the file has several reward columns, because
    TRL logs one per reward function. All of them are kept as reward columns (`Runs.rewards`).
    """

    def rollouts(file: Path) -> Iterator[Row]:
        table = read_parquet(file)
        if missing := {"step", "prompt", "completion"} - set(table.column_names):
            raise UserError(f"{file} has no column {sorted(missing)[0]!r}; expected a TRL completions file")
        rows = [(f"{file}, row {n}", one) for n, row in enumerate(table.to_pylist()) for one in without_lists(row)]
        floats = {name for _, row in rows for name, value in row.items() if isinstance(value, float)}
        columns = [name for name in table.column_names if name in floats - {"step", "advantage"}]
        names = columns if reward is None else table.column_names
        chosen = columns if reward == "sum" and "sum" not in names else [_chosen(file, names, reward, "reward")]
        for place, row in rows:
            known = [value for name in chosen if (value := number_or_none(row[name], place, name)) is not None]
            truth, known_row = first(row, ("solution", *COLUMNS["truth"])), {"completion": None} | _without_nulls(row)
            (rollout,) = converted(known_row, place, step_number(row["step"], place, "step"))
            yield rollout | {
                "traj_id": None, "reward": sum(known) if known else None, "rewards": {name: row[name] for name in columns}, "truth": truth,
            }  # fmt: skip

    return _imported(rollouts, source, ".parquet", "completions of TRL", runs_dir, run_id, "trl")


def _without_nulls(value: Any) -> Any:
    """Return a value of a Parquet file without nulls: every call has the arguments of all calls, null where it has none."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def import_messages(source: str | Path, runs_dir: str | Path = "runs", *, run_id: str | None = None) -> Path:
    """Import JSON lines of OpenAI-style conversations: {"messages": [...]} per line.

    Optional fields: id, problem_id, step, reward (or score), answer, truth. Tool calls are kept in the text and counted.
    The outcomes of the calls are null unless every tool message has a field `outcome` of `rstar_lab.common.outcomes.Outcome`.
    """

    def rollouts(file: Path) -> Iterator[Row]:
        for place, row in json_lines(file):
            step = step_number(first(row, "step") or 0, place, "step")
            for rollout in converted({"messages": None} | row, place, step):
                yield rollout | {"traj_id": row.get("id")}

    return _imported(rollouts, source, ".jsonl", "messages", runs_dir, run_id, "messages")


# inspect_ai's error types; every other error is an exception of the model's code.
_INSPECT_ERRORS = {
    "timeout": Outcome.TIMEOUT, "parsing": Outcome.MALFORMED_CALL, "limit": Outcome.OUTPUT_LIMIT, "output_limit": Outcome.OUTPUT_LIMIT,
}  # fmt: skip


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
    check_zip(path)
    with reading(f"{path} is not an inspect_ai log", errors=(Exception,)):
        log = read_eval_log(str(path))
    samples = log.samples or []
    names = list(dict.fromkeys(name for sample in samples for name in sample.scores or {}))
    if (scorer is None and len(names) < 2) or (scorer == "first" and "first" not in names):
        scorer = next(iter(names), "")
    chosen = _chosen(path, names, scorer, "scorer") if names else ""

    def rollouts() -> Iterator[Row]:
        for sample in samples:
            scores, usage = sample.scores or {}, sample.model_usage or {}
            messages = openai_messages([*map(_inspect_message, sample.messages)], f"{path}, sample {sample.id}")
            outcomes = [message["outcome"] for message in messages if message["role"] == "tool"]
            yield {
                "step": 0, "problem_id": str(sample.id), "question": _question(sample.input), "messages": messages,
                "reward": _score_number(scores[chosen].value) if chosen in scores else None,
                "rewards": {name: _score_number(score.value) for name, score in scores.items()},
                "answer": scores[chosen].answer if chosen in scores else None, "truth": sample.target, "calls": len(outcomes),
                "outcomes": outcomes, "truncated": sample.limit is not None, "engine": log.eval.model, "generate_s": sample.working_time,
                "stop_reason": "error" if sample.error else None,
                # Scorers that call another model have their own entry.
                "model_tokens": usage[log.eval.model].output_tokens if log.eval.model in usage else None,
            }  # fmt: skip

    return write_run(rollouts(), path, runs_dir, run_id or path.stem, "inspect_ai")


# Texts of inspect_ai's scores, as its `value_to_float` reads them. Other texts, lists and mappings are not a reward.
_SCORES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def _score_number(value: Any) -> float | None:
    """Return a score as a reward, or None if it is not one number."""
    return number_of(_SCORES.get(value, _SCORES.get(value.lower(), value)) if isinstance(value, str) else value)


def _inspect_message(source: Any) -> Row:
    """Return a message of inspect_ai in OpenAI's form."""
    calls = [{"name": call.function, "arguments": call.arguments} for call in getattr(source, "tool_calls", None) or []]
    message: Row = {"role": source.role, "content": source.model_dump()["content"], "tool_calls": calls}
    if source.role == "tool":
        outcome = _INSPECT_ERRORS.get(source.error.type, Outcome.EXCEPTION) if source.error else Outcome.OK
        message |= {"name": source.function, "outcome": str(outcome)}
    return message


def _question(given: Any) -> str:
    """Return the last message of the user in the input of a sample, else its last message."""
    if isinstance(given, str):
        return given
    asked = [message for message in given if message.role == "user"] or given
    return str(asked[-1].text)


def _chosen(file: Path, names: list[str], given: str | None, argument: str) -> str:
    """Return the name of the score that becomes the reward. names: of all scores of a file. given: value of the argument."""
    if given is None and len(names) != 1:
        raise UserError(f"{file} has the {argument} columns {', '.join(names) or 'none'}: choose one with {argument}=")
    if given is not None and given not in names:
        raise UserError(f"{file} has no {argument} {given!r}; it has {', '.join(names)}")
    return given or names[0]


def _imported(rollouts: Callable[[Path], Iterator[Row]], source: str | Path, end: str, of: str, *where: Any) -> Path:
    """Write the rollouts of a file, or of the files of a folder whose names have this end, packed or not. where: as for `write_run`."""
    path = Path(source)
    found = [*path.glob(f"*{end}"), *path.glob(f"*{end}.gz")] if path.is_dir() else [path]
    files = sorted(found, key=lambda file: (number_in_name(file), file.name))
    if not files or not files[0].exists():
        raise UserError(f"{path}: no {end} files of {of} found")
    return write_run(chain.from_iterable(map(rollouts, files)), path, *where)
