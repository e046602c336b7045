"""Writes failures of the infrastructure into the log, with the id of the call."""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.sandbox.call import CallResult

log = logging.getLogger(__name__)

_CALL_ID: ContextVar[str] = ContextVar("call_id", default="-")


@contextmanager
def call_id(name: str | None = None) -> Iterator[str]:
    """Add this id to all log messages of the block; without a name, a random id. Yields the id."""
    name = name or secrets.token_hex(4)
    token = _CALL_ID.set(name)
    try:
        yield name
    finally:
        _CALL_ID.reset(token)


def log_event(event: str, detail: str = "") -> None:
    """Log a failure of the sandbox's own processes during the current call."""
    log.warning("call %s: %s%s", _CALL_ID.get(), event, f": {detail}" if detail else "")


def log_failure(result: CallResult) -> None:
    """Log a result that is a failure of the infrastructure."""
    if result.outcome in INFRASTRUCTURE_FAILURES:
        reason = result.stderr.strip().splitlines()
        times = f"queued {result.queue_s:.2f} s, ran {result.duration_s:.2f} s"
        log.warning(
            "call %s: %s (%s)%s", _CALL_ID.get(), result.outcome, times, f": {reason[-1][:200]}" if reason else ""
        )
