"""The run store: schema, writer and reader. Training writes it and analysis reads it."""

from rstar_lab.runs.errors import RunLocked, RunStoreError
from rstar_lab.runs.reader import RunReader, find_runs_dir, list_runs
from rstar_lab.runs.schema import CALLS, SCHEMA_VERSION, TRAJECTORIES, TRANSCRIPTS
from rstar_lab.runs.writer import RunWriter

__all__ = [
    "CALLS", "SCHEMA_VERSION", "TRAJECTORIES", "TRANSCRIPTS", "RunLocked", "RunReader", "RunStoreError", "RunWriter",
    "find_runs_dir", "list_runs",
]  # fmt: skip
