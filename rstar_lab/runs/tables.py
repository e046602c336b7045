"""Convert rows (dicts) to Arrow tables, and compute the rollup of a step."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, MODEL_ERRORS, Outcome
from rstar_lab.runs.schema import DERIVED_COLUMNS, LEVELS, TRAJECTORIES, schema_with_metadata

_SORT = {
    "trajectories": ("group_id", "sample", "traj_id"),
    "calls": ("traj_id", "turn", "index"),
    "transcripts": ("traj_id",),
}
_DTYPES = {pa.int32(): np.int32, pa.float16(): np.float16, pa.bool_(): np.bool_}
_OUTCOMES = frozenset(str(outcome) for outcome in Outcome)
_JUDGED = frozenset(Outcome) - INFRASTRUCTURE_FAILURES
UNUSABLE = ("engine_error", "environment_error", "undecided")  # stop reasons of rollouts without a valid reward
_NUMBERS = [
    field.name
    for field in TRAJECTORIES
    if field.name not in ("attempt", "step", "sample")
    and (pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_boolean(field.type))
]
# Derived numbers from which metrics that are ratios can be computed (a sum is n * mean).
_DERIVED = (
    "correct",  # reward > 0; null if the rollout failed through no fault of the model
    "our_failures",  # calls that ended with an infrastructure failure
    "tool_tokens",  # response tokens that the model did not generate
    "duplicate_answer",  # more than one answer tag
    "entropy_sum",  # nats over the model tokens
    "entropy_tokens",  # model tokens with an entropy
    "gap_sum",  # engine minus trainer log-prob, over the model tokens
    "gap_tokens",
)
# Columns with separate statistics over the trajectories with reward > 0, which RoC resamples.
_OF_CORRECT = ("errors", "calls", "turns", "response_tokens", "model_tokens", "reflection_tokens", "duplicate_answer")

ROLLUP = pa.schema(
    [("run_id", pa.string()), ("stage", pa.string()), ("step", pa.int32()), ("attempt", pa.int16())]
    + [(f"rows_{level}", pa.int64()) for level in LEVELS]
    + [
        (f"{name}_{statistic}", kind)
        for name in [*_NUMBERS, *_DERIVED, *(f"correct_{name}" for name in _OF_CORRECT)]
        for statistic, kind in (("n", pa.int64()), ("mean", pa.float64()), ("sd", pa.float64()))
    ]
)


def table_of(level: str, rows: Sequence[dict[str, Any]], fill: dict[str, Any]) -> pa.Table:
    """Return the sorted Arrow table of a level from dicts. Missing columns are null.

    fill: values of columns of all rows (run, attempt, stage, step). Token arrays may be lists or numpy
    arrays. NaN in a number column becomes null. Raises ValueError for an unknown column or outcome and a missing traj_id.
    """
    schema = schema_with_metadata(level)
    for number, row in enumerate(rows):
        if unknown := row.keys() - set(schema.names) - DERIVED_COLUMNS:
            raise ValueError(
                f"{level} row {number}: unknown column {sorted(unknown)[0]!r}; the schema has {', '.join(schema.names)}"
            )
        if not row.get("traj_id"):
            raise ValueError(f"{level} row {number}: traj_id is missing")
        for outcome in row.get("outcomes") or filter(None, [row.get("outcome")]):
            if outcome not in _OUTCOMES:
                raise ValueError(
                    f"{level} row {number}: unknown outcome {outcome!r}; expected one of {', '.join(sorted(_OUTCOMES))}"
                )
    full = [row | fill for row in rows]
    for name in _SORT[level][::-1]:  # stable sorts, from the last key to the first
        full.sort(
            key=lambda row: (
                row.get(name) is not None,
                row.get(name) or (0 if name in ("sample", "turn", "index") else ""),
            )
        )
    columns = [_column([row.get(field.name) for row in full], field) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    try:
        if pa.types.is_list(field.type) and field.type.value_type in _DTYPES:
            return _number_lists(values, field.type)
        if pa.types.is_map(field.type):
            values = [None if value is None else list(dict(value).items()) for value in values]
        elif pa.types.is_floating(field.type):
            values = [None if value is None or math.isnan(value) else float(value) for value in values]
        elif pa.types.is_integer(field.type):
            values = [None if value is None else int(value) for value in values]
        elif pa.types.is_boolean(field.type):
            values = [None if value is None else bool(value) for value in values]
        elif pa.types.is_string(field.type):
            # A lone surrogate (a model can produce one with JSON escapes) cannot be encoded as UTF-8.
            values = [None if value is None else str(value).encode("utf-8", "replace").decode() for value in values]
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {field.name!r} must be {field.type}: {error}") from error


def _number_lists(values: list[Any], kind: pa.ListType) -> pa.Array:
    # One flat numpy array: a step of 16K rollouts has 10^8 tokens, too many for a list of Python objects.
    dtype = _DTYPES[kind.value_type]
    with np.errstate(over="ignore"):  # a log-prob beyond float16 becomes -inf
        parts: list[np.ndarray] = [np.asarray([] if value is None else value, dtype=dtype) for value in values]
    offsets = np.fromiter(itertools.accumulate((len(part) for part in parts), initial=0), np.int32, len(parts) + 1)
    flat = pa.array(np.concatenate(parts) if parts else np.empty(0, dtype), kind.value_type)
    return pa.ListArray.from_arrays(
        pa.array(offsets), flat, type=kind, mask=pa.array([value is None for value in values], pa.bool_())
    )


def rollup_row(trajectories: pa.Table, counts: dict[str, int], where: dict[str, Any]) -> dict[str, Any]:
    """Return n, mean and sd (sample, n - 1) of each number column of a step. n counts the values that are not null.

    Errors and calls are counted from the outcomes if a row has them, without infrastructure failures.
    """
    import pyarrow.compute as pc

    data = {name: numbers(trajectories[name]) for name in _NUMBERS}
    kinds = trajectories["outcomes"].combine_chunks()
    has_outcomes = kinds.is_valid().to_numpy(zero_copy_only=False)
    parents, flat = pc.list_parent_indices(kinds).to_numpy(), pc.list_flatten(kinds)

    def counted(outcomes: frozenset[Outcome], otherwise: np.ndarray) -> np.ndarray:
        hits = pc.is_in(flat, pa.array([str(kind) for kind in outcomes])).to_numpy(zero_copy_only=False)
        return np.where(has_outcomes, np.bincount(parents[hits], minlength=len(kinds)), otherwise)

    unknown = np.full(len(kinds), np.nan)
    data["errors"], data["calls"] = counted(MODEL_ERRORS, data["errors"]), counted(_JUDGED, data["calls"])
    data["our_failures"] = counted(INFRASTRUCTURE_FAILURES, unknown)
    tokens, entropy = data["model_tokens"], data["entropy"]
    gap = data["engine_log_prob"] - data["trainer_log_prob"]
    # A rollout that a failure of the infrastructure ended is neither correct nor wrong.
    failed = pc.is_in(trajectories["stop_reason"], pa.array(UNUSABLE)).to_numpy(zero_copy_only=False)
    data["correct"] = np.where(np.isnan(data["reward"]) | failed, np.nan, data["reward"] > 0)
    data["tool_tokens"] = data["response_tokens"] - tokens
    answered = trajectories["answer"].is_valid().to_numpy(zero_copy_only=False)
    p_format = data["p_format"]
    data["duplicate_answer"] = np.where(np.isnan(p_format), np.nan, (p_format > 0) & ((p_format < 1) | answered))
    data["entropy_sum"], data["entropy_tokens"] = entropy * tokens, np.where(np.isnan(entropy), np.nan, tokens)
    data["gap_sum"], data["gap_tokens"] = gap * tokens, np.where(np.isnan(gap), np.nan, tokens)
    correct = data["reward"] > 0
    row: dict[str, Any] = where | {f"rows_{level}": count for level, count in counts.items()}
    for name, values in data.items():
        row |= _statistics(name, values)
    for name in _OF_CORRECT:
        row |= _statistics(f"correct_{name}", data[name][correct])
    return row


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Return a numeric or boolean column as float64, with NaN for null."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return column.cast(pa.float64()).to_numpy(zero_copy_only=False)


def _statistics(name: str, values: np.ndarray) -> dict[str, Any]:
    defined = values[~np.isnan(values)]
    n = len(defined)
    mean = float(defined.mean()) if n else None
    return {f"{name}_n": n, f"{name}_mean": mean, f"{name}_sd": float(defined.std(ddof=1)) if n > 1 else None}
