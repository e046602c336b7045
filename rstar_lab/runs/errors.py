"""Errors of the run store. Each message names the file or the run and says what to do."""

from rstar_lab.common.errors import UserError


class RunStoreError(UserError):
    """A run cannot be read or written."""


# What reading a run folder of somebody else can raise. A list of runs shows such a run as unreadable and goes on.
READ_ERRORS = (
    UserError, OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip


class NotStored(RunStoreError):
    """The runs have no table of a level, such as transcripts."""


class RunLocked(RunStoreError):
    """Another process is writing the run."""
