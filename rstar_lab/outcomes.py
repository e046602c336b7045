"""What happened to a tool call: one taxonomy, imported by every floor. An outcome is observed, never derived from text."""

from enum import StrEnum


class Outcome(StrEnum):
    """How one tool call ended."""

    OK = "ok"
    # The model's doing, seen by running the code.
    SYNTAX_ERROR = "syntax_error"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    # The model's doing, before any code ran.
    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    # Ours: never counted against the model, retried, reported apart.
    SANDBOX_ERROR = "sandbox_error"
    QUEUE_TIMEOUT = "queue_timeout"


INFRASTRUCTURE_FAILURES = frozenset({Outcome.SANDBOX_ERROR, Outcome.QUEUE_TIMEOUT})
MODEL_ERRORS = frozenset(Outcome) - INFRASTRUCTURE_FAILURES - {Outcome.OK}


def count_errors(outcomes: "list[Outcome] | list[str]") -> tuple[int, int]:
    """Count what the tool-error penalty is made of.

    Returns (errors, calls): the model's errors, and all calls but those whose failure was ours.
    """
    kinds = [Outcome(outcome) for outcome in outcomes]
    return sum(kind in MODEL_ERRORS for kind in kinds), sum(kind not in INFRASTRUCTURE_FAILURES for kind in kinds)
