"""The phases of a rehearsal and their results."""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rstar_lab.errors import UserError


@dataclass(frozen=True)
class Phase:
    """Result of one phase. status: passed, failed, or "not covered"; `detail` then has the reason."""

    name: str
    status: str
    seconds: float
    detail: str


@dataclass
class RehearsalReport:
    """The result of a rehearsal, and its JSON form."""

    phases: list[Phase] = field(default_factory=list)
    covered: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(phase.status == "failed" for phase in self.phases)

    def as_json(self) -> dict[str, Any]:
        """Return {"phases": [...], "covered": [...], "not_covered": [...]}."""
        return asdict(self)

    def skip(self, name: str, reason: str) -> None:
        """Add a phase that was not run."""
        self.phases.append(Phase(name, "not covered", 0.0, reason))

    def run(self, name: str, action: Callable[[], str], on_phase: Callable[[Phase], None]) -> bool:
        """Run one phase and return whether it passed. Its detail is the text that `action` returns, or the error.

        If an earlier phase failed, the phase is skipped.
        """
        if self.failed:
            self.skip(name, "an earlier phase failed")
            return False
        started = time.monotonic()
        try:
            detail, status = action(), "passed"
        except UserError as error:
            detail, status = str(error), "failed"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            detail, status = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})", "failed"
        phase = Phase(name, status, round(time.monotonic() - started, 1), detail)
        self.phases.append(phase)
        on_phase(phase)
        return status == "passed"
