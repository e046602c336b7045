"""What can go wrong with a run store: every message names the file or the run, and the way out."""

from rstar_lab.errors import UserError


class RunStoreError(UserError):
    """A run cannot be read or written as it is."""


class RunLocked(RunStoreError):
    """Another process writes this run."""
