"""A large synthetic run store for `rstar-lab bench store`, laid out like compacted runs, with plausible values."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rstar_lab.runs import RunWriter
from rstar_lab.runs.schema import TRAJECTORIES, TRANSCRIPTS, schema_with_metadata, step_file
from rstar_lab.runs.tables import ROLLUP, rollup_row
from rstar_lab.runs.writer import write_parts, write_rollup

STAGE = "rl"
_VOCABULARY = 1024
_SENTENCES = (
    "We need the remainder of the product, so let me compute it step by step.",
    "for i in range(1, n + 1): total = (total * i) % modulus",
    "print(sum(x for x in range(10, 200) if x % 7 == 3))",
    "Traceback (most recent call last): NameError: name 'modulus' is not defined",
    "Wait, I should double-check the range before I answer.",
    "The result is 1729, which matches the count I expected.",
    "Alternatively we can count the divisors of each number in the range.",
)


@dataclass(frozen=True)
class Size:
    """Size of the store. The first `written_steps` steps of each run have `transcripts` transcripts each."""

    runs: int = 40
    steps: int = 100
    rollouts: int = 2000  # per step
    group: int = 16
    written_steps: int = 25
    transcripts: int = 100
    tokens: int = 1000  # per transcript

    @property
    def all_rollouts(self) -> int:
        return self.runs * self.steps * self.rollouts

    @property
    def all_transcripts(self) -> int:
        return self.runs * self.written_steps * self.transcripts


NEEDLE = "quaternion"  # occurs in one of a thousand transcripts
LONG_TOKENS = 10_000  # length of the first transcript of the first run


def make_store(folder: Path, size: Size, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write the runs to `folder`, one after the other. progress: called with the number of finished runs and their total."""
    for number in range(size.runs):
        rng = np.random.default_rng(number)
        run_id = f"run{number:03d}"
        recipe = {"seed": number % 5, "rl": {"method": {"roc": {"rule": ("paper", "none")[number % 2]}}}}
        with RunWriter.open(folder, run_id, kind="train", recipe=recipe, seed=number) as writer:
            writer.write_vocabulary([f"t{token} " for token in range(_VOCABULARY)])
            steps = list(range(1, size.steps + 1))
            trajectories = _trajectories(run_id, size, rng)
            transcripts = _transcripts(run_id, size, rng, first=number == 0)
            for level, table, held in (
                ("trajectories", trajectories, steps),
                ("transcripts", transcripts, steps[: size.written_steps]),
            ):
                write_parts(step_file(writer.run_dir, level, STAGE, held[0], held[-1]), level, [table], held)
            rows = []
            for step in steps:
                part = trajectories.slice((step - 1) * size.rollouts, size.rollouts)
                counts = {"trajectories": size.rollouts, "calls": 0}
                counts["transcripts"] = size.transcripts if step <= size.written_steps else 0
                rows.append(rollup_row(part, counts, {"run_id": run_id, "stage": STAGE, "step": step, "attempt": 1}))
            write_rollup(writer.run_dir, pa.Table.from_pylist(rows, ROLLUP))
            lines = [json.dumps({"stage": STAGE, "step": step, "loss": 1 / step}) + "\n" for step in steps]
            (writer.run_dir / "metrics.jsonl").write_text("".join(lines))
            writer.finish("finished")
        progress(number + 1, size.runs)


def _trajectories(run_id: str, size: Size, rng: np.random.Generator) -> pa.Table:
    rows = size.steps * size.rollouts
    step = np.repeat(np.arange(1, size.steps + 1, dtype=np.int32), size.rollouts)
    place = np.tile(np.arange(size.rollouts, dtype=np.int32), size.steps)
    group = place // size.group
    progress = step / size.steps
    reward = (rng.random(rows) < 0.3 + 0.5 * progress).astype(np.float32)
    kept = rng.random(rows) < 0.5
    calls = rng.integers(0, 6, rows).astype(np.int16)
    errors = rng.binomial(calls, 0.25 * (1 - progress)).astype(np.int16)
    model_tokens = rng.gamma(4, 250, rows).astype(np.int32) + 20
    answer = pc.cast(pa.array(rng.integers(0, 1000, rows)), pa.string())
    step_text = pc.utf8_lpad(pc.cast(pa.array(step), pa.string()), 6, "0")
    place_text = pc.utf8_lpad(pc.cast(pa.array(place), pa.string()), 5, "0")
    group_text = pc.utf8_lpad(pc.cast(pa.array(group), pa.string()), 4, "0")
    dropped = pa.array(~kept)

    def unless_dropped(values: np.ndarray) -> pa.Array:
        return pa.array(values.astype(np.float32), mask=dropped.to_numpy(zero_copy_only=False))

    def constant(value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), rows)

    columns = {
        "traj_id": pc.binary_join_element_wise(pa.scalar(run_id), step_text, place_text, "/"),
        "run_id": constant(run_id, pa.string()),
        "attempt": constant(1, pa.int16()),
        "policy_version": pa.array(step - 1, pa.int32()),
        "stage": constant(STAGE, pa.string()),
        "step": pa.array(step),
        "group_id": pc.binary_join_element_wise(step_text, group_text, "/"),
        "problem_id": pc.binary_join_element_wise(
            pa.scalar("problem"), pc.cast(pa.array((group + 31 * step) % 4096), pa.string()), "-"
        ),
        "sample": pa.array((place % size.group).astype(np.int16)),
        "reward": pa.array(reward),
        "kept": pa.array(kept),
        "p_err": pa.array(np.where(calls > 0, errors / np.maximum(calls, 1), 0.5).astype(np.float32)),
        "p_format": pa.array((rng.random(rows) < 0.1).astype(np.float32)),
        "advantage": unless_dropped(rng.normal(size=rows)),
        "turns": pa.array(calls + np.int16(1)),
        "calls": pa.array(calls),
        "errors": pa.array(errors),
        "outcomes": _outcomes(calls, errors),
        "response_tokens": pa.array((model_tokens * 1.3).astype(np.int32)),
        "model_tokens": pa.array(model_tokens),
        "truncated": pa.array(rng.random(rows) < 0.05),
        "stop_reason": constant("answer", pa.string()),
        "answer": answer,
        "truth": answer,
        "reflection_tokens": pa.array(rng.poisson(2, rows).astype(np.int32)),
        "entropy": unless_dropped(rng.gamma(4, 0.1, rows)),
        "engine_log_prob": pa.array(-rng.gamma(4, 0.1, rows).astype(np.float32)),
        "trainer_log_prob": unless_dropped(-rng.gamma(4, 0.1, rows)),
        "generate_s": pa.array(rng.gamma(4, 2, rows).astype(np.float32)),
        "tool_s": pa.array((0.3 * calls).astype(np.float32)),
        "queue_s": pa.array((0.05 * calls).astype(np.float32)),
        "engine": pc.cast(pa.array(place % 8), pa.string()),
        "environment": pa.nulls(rows, pa.string()),
        "metrics": pa.nulls(rows, pa.map_(pa.string(), pa.float64())),
    }
    return pa.Table.from_arrays(
        [columns[name] for name in TRAJECTORIES.names], schema=schema_with_metadata("trajectories")
    )


def _outcomes(calls: np.ndarray, errors: np.ndarray) -> pa.Array:
    """Return the outcomes of the calls of each trajectory, errors first."""
    offsets = np.concatenate([[0], np.cumsum(calls)]).astype(np.int32)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], calls)
    wrong = place < np.repeat(errors, calls)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.where(wrong, "exception", "ok")).cast(pa.string()))


def _transcripts(run_id: str, size: Size, rng: np.random.Generator, *, first: bool) -> pa.Table:
    """Return the transcripts of a run. All texts differ, because Parquet stores equal texts only once."""
    rows = size.written_steps * size.transcripts
    lengths = np.full(rows, size.tokens)
    texts = [_messages(size.tokens, rng) for _ in range(rows)]
    for row in {rows // 2, *np.flatnonzero(rng.random(rows) < 0.001)}:
        texts[row] = texts[row].replace("1729", NEEDLE, 1)
    if first:
        lengths[0], texts[0] = LONG_TOKENS, _messages(LONG_TOKENS, rng)
    total = int(lengths.sum())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    step = np.repeat(np.arange(1, size.written_steps + 1, dtype=np.int32), size.transcripts)
    place = np.tile(np.arange(size.transcripts), size.written_steps)
    arrays = {
        "response_ids": rng.integers(0, _VOCABULARY, total).astype(np.int32),
        "loss_mask": np.arange(total) % 50 < 45,
        "engine_log_probs": -rng.gamma(1, 0.4, total).astype(np.float16),
        "trainer_log_probs": -rng.gamma(1, 0.4, total).astype(np.float16),
        "entropy": rng.gamma(1, 0.3, total).astype(np.float16),
    }
    columns: dict[str, Any] = {
        "traj_id": [f"{run_id}/{number:06d}/{at:05d}" for number, at in zip(step, place, strict=True)],
        "run_id": [run_id] * rows,
        "stage": [STAGE] * rows,
        "step": step,
        "question": ["What is the remainder?"] * rows,
        "truth": ["1729"] * rows,
        "messages": texts,
        "prompt_ids": pa.ListArray.from_arrays(
            pa.array(np.arange(0, 40 * rows + 1, 40, dtype=np.int32)),
            pa.array(np.tile(np.arange(40, dtype=np.int32), rows)),
        ),
    }
    for name, flat in arrays.items():
        kind = TRANSCRIPTS.field(name).type
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(flat, kind.value_type), type=kind)
    made = [
        column if isinstance(column := columns[field.name], pa.Array) else pa.array(column, field.type)
        for field in TRANSCRIPTS
    ]
    return pa.Table.from_arrays(made, schema=schema_with_metadata("transcripts"))


def _messages(tokens: int, rng: np.random.Generator) -> str:
    """Return messages of about four characters per token, as JSON."""
    sentences = [_SENTENCES[number] for number in rng.integers(0, len(_SENTENCES), tokens // 15)]
    numbers = rng.integers(0, 10**6, len(sentences))
    lines = [f"{sentence} {number}" for sentence, number in zip(sentences, numbers, strict=True)]
    half = len(lines) // 2
    messages = [
        {"role": "user", "content": "What is the remainder?"},
        {"role": "assistant", "content": "\n".join(lines[:half])},
        {"role": "tool", "content": "1729", "tool": "execute_python_code_with_standard_io", "outcome": "ok"},
        {"role": "assistant", "content": "\n".join(lines[half:])},
    ]
    return json.dumps(messages)
