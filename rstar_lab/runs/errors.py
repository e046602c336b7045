"""Errors of the run store. Each message names the file or the run and says what to do."""

from rstar_lab.errors import UserError


class RunStoreError(UserError):
    """A run cannot be read or written."""


class TranscriptsElsewhere(RunStoreError):
    """The run is a copy, and its transcripts are on another host."""


class RunLocked(RunStoreError):
    """Another process is writing the run."""
