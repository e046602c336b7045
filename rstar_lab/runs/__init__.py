"""The run store: schema, writer and reader. Training writes it and analysis reads it."""
# ruff: noqa: F401  the names are the exports

from typing import TYPE_CHECKING

from rstar_lab.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from rstar_lab.runs.errors import RunLocked, RunStoreError
    from rstar_lab.runs.reader import RunReader, find_runs_dir
    from rstar_lab.runs.schema import CALLS, SCHEMA_VERSION, TRAJECTORIES, TRANSCRIPTS
    from rstar_lab.runs.writer import RunWriter

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
