"""A call and its result: the data that cross the sandbox's border."""

from dataclasses import dataclass

from rstar_lab.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Call:
    """One piece of code to run. `None` for a limit means the sandbox's default.

    seed: makes the call reproducible; None draws fresh randomness.
    session: name of a live interpreter whose state is kept between calls; None runs in a fresh process.
    """

    code: str
    stdin: str = ""
    seed: int | None = None
    timeout_s: float | None = None
    memory_mb: int | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """What came of one call.

    value: repr of the last expression (as a notebook echoes it), None where there is none.
    duration_s: seconds the code ran; queue_s: seconds it waited before that.
    """

    outcome: Outcome
    stdout: str
    stderr: str
    value: str | None
    duration_s: float
    queue_s: float = 0.0
