"""The run store's tables, names and version: the one contract between what trains and what reads."""

import re
from pathlib import Path

import pyarrow as pa

SCHEMA_VERSION = 1
VERSION_KEY, LEVEL_KEY = "rstar_lab.schema_version", "rstar_lab.level"

TRAJECTORIES = pa.schema(
    [
        ("traj_id", pa.string()),  # unique over all runs
        ("run_id", pa.string()),
        ("attempt", pa.int16()),  # how often the run had been started when this was written, from 1
        ("policy_version", pa.int32()),  # of its last tokens; where older ones wrote some, the messages say which
        ("stage", pa.string()),
        ("step", pa.int32()),  # grows over all stages of a run
        ("group_id", pa.string()),  # the rollouts of one problem in one step
        ("problem_id", pa.string()),
        ("sample", pa.int16()),  # place in its group
        ("reward", pa.float32()),
        ("kept", pa.bool_()),  # by resampling and the rejection of equal-reward groups
        ("p_err", pa.float32()),
        ("p_format", pa.float32()),
        ("advantage", pa.float32()),  # null when dropped
        ("turns", pa.int16()),
        ("calls", pa.int16()),
        ("errors", pa.int16()),
        ("outcomes", pa.list_(pa.string())),  # of every call, in order
        ("response_tokens", pa.int32()),  # the model's and the tool's
        ("model_tokens", pa.int32()),  # the model's own
        ("truncated", pa.bool_()),
        ("stop_reason", pa.string()),
        ("answer", pa.string()),
        ("truth", pa.string()),
        ("reflection_tokens", pa.int32()),
        ("entropy", pa.float32()),  # nats, mean over model tokens; null when dropped
        ("engine_log_prob", pa.float32()),  # mean over model tokens
        ("trainer_log_prob", pa.float32()),  # mean over model tokens; null when dropped
        ("generate_s", pa.float32()),
        ("tool_s", pa.float32()),
        ("queue_s", pa.float32()),
        ("engine", pa.string()),
    ]
)

CALLS = pa.schema(
    [
        ("traj_id", pa.string()),
        ("run_id", pa.string()),
        ("attempt", pa.int16()),
        ("stage", pa.string()),
        ("step", pa.int32()),
        ("turn", pa.int16()),
        ("index", pa.int16()),  # place in its turn
        ("tool", pa.string()),
        ("outcome", pa.string()),
        ("code_hash", pa.string()),
        ("queue_s", pa.float32()),
        ("run_s", pa.float32()),
        ("position", pa.int32()),  # index into the response tokens where this call's tool response begins
    ]
)

TRANSCRIPTS = pa.schema(
    [
        ("traj_id", pa.string()),
        ("run_id", pa.string()),
        ("stage", pa.string()),
        ("step", pa.int32()),
        ("question", pa.string()),
        ("truth", pa.string()),
        # JSON list of {role, content[, tool, outcome][, generate_s, policy_versions: [[version, tokens], ...]]}
        ("messages", pa.string()),
        # Null where the recipe's `token_arrays` leaves them out; the trainer's are null for dropped rollouts.
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("engine_log_probs", pa.list_(pa.float16())),
        ("trainer_log_probs", pa.list_(pa.float16())),
        ("entropy", pa.list_(pa.float16())),
    ]
)

# Columns that readers derive from stored ones (rstar_lab.analysis). The writer ignores them in rows that were read.
DERIVED_COLUMNS = frozenset({"rewarded", "verified", "correct"})

LEVELS = {"trajectories": TRAJECTORIES, "calls": CALLS, "transcripts": TRANSCRIPTS}

_STAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE = re.compile(r"steps?=(\d+)(?:-(\d+))?\.parquet")


def schema_with_metadata(level: str) -> pa.Schema:
    """The level's schema with the marks every file of it carries."""
    return LEVELS[level].with_metadata({VERSION_KEY: str(SCHEMA_VERSION), LEVEL_KEY: level})


def is_valid_name(text: str) -> bool:
    """May `text` name a run or a stage? It becomes a folder."""
    return _STAGE.fullmatch(text) is not None


def step_file(run_dir: Path, level: str, stage: str, first: int, last: int | None = None) -> Path:
    """Where one step's rows of a level lie, or those of the steps first..last once they have been merged."""
    name = f"step={first:06d}.parquet" if last is None else f"steps={first:06d}-{last:06d}.parquet"
    return run_dir / level / f"stage={stage}" / name


def step_range_of(path: Path) -> tuple[int, int] | None:
    """First and last step a file's name speaks of; None for a file that is not the store's (temporary ones)."""
    match = _FILE.fullmatch(path.name)
    return (int(match[1]), int(match[2] or match[1])) if match else None
