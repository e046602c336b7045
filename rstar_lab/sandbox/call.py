"""A call to the sandbox and its result."""

from dataclasses import dataclass

from rstar_lab.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Call:
    """Code to run. A limit of None means the sandbox's default.

    stdin: text on the standard input. seed: seeds the random generators; None draws fresh randomness.
    timeout_s: seconds on a CPU or asleep (`Limits`). memory_mb: MiB of all processes of the call.
    session: name of an interpreter that keeps its state between calls, started by its first call; None runs the code in a
    new process.
    """

    code: str
    stdin: str = ""
    seed: int | None = None
    timeout_s: float | None = None
    memory_mb: int | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call.

    outcome: how the call ended (`rstar_lab.outcomes`). stdout, stderr: output; invalid UTF-8 bytes become `\\xNN`.
    value: repr of the last expression, as a notebook shows it; None if there is none.
    duration_s: seconds the code ran. queue_s: seconds the call waited before it started.
    """

    outcome: Outcome
    stdout: str
    stderr: str
    value: str | None
    duration_s: float
    queue_s: float = 0.0


# The name of a copy of a session: the name of the first session, this separator, a random text.
COPY_SEPARATOR = "~"


class ForkError(RuntimeError):
    """The interpreter of a session cannot be forked."""


def first_session(name: str) -> str:
    """Return the name of the session from which this one was forked, directly or not. Both are on the same machine."""
    return name.partition(COPY_SEPARATOR)[0]
