"""Outcomes of tool calls, used by all packages. An outcome is observed when the call runs, never derived from text."""

from enum import StrEnum


class Outcome(StrEnum):
    """How one tool call ended."""

    OK = "ok"
    # Caused by the model's code.
    SYNTAX_ERROR = "syntax_error"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    # Caused by the model, before any code ran.
    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    # Infrastructure failures: never counted against the model, retried, reported separately.
    SANDBOX_ERROR = "sandbox_error"
    QUEUE_TIMEOUT = "queue_timeout"


INFRASTRUCTURE_FAILURES = frozenset({Outcome.SANDBOX_ERROR, Outcome.QUEUE_TIMEOUT})
MODEL_ERRORS = frozenset(Outcome) - INFRASTRUCTURE_FAILURES - {Outcome.OK}


def count_errors(outcomes: "list[Outcome] | list[str]") -> tuple[int, int]:
    """Return (errors, calls) for the tool-error penalty, both without infrastructure failures."""
    kinds = [Outcome(outcome) for outcome in outcomes]
    return sum(kind in MODEL_ERRORS for kind in kinds), sum(kind not in INFRASTRUCTURE_FAILURES for kind in kinds)
