"""What one rollout leaves behind. Frozen: the loop makes it, everyone else reads it."""

from dataclasses import dataclass
from enum import StrEnum

from rstar_lab.outcomes import Outcome, count_errors


class StopReason(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"  # the model ended a turn without a call
    MAX_TURNS = "max_turns"
    LENGTH = "length"  # max_response_tokens
    TIME_LIMIT = "time_limit"  # its own, or that of its step
    UNFINISHED = "unfinished"  # the step's time was over; it goes on in the next step
    ENGINE_ERROR = "engine_error"  # ours: such a rollout is kept out of training


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: tokens [start, end) of the response are its own.

    generate_s: seconds from asking the engine to its answer; tool_s: until the last call of the turn had ended.
    versions: (policy version, tokens) of the stretches it was written in, in order; () where nobody noted them.
    """

    start: int
    end: int
    text: str
    generate_s: float
    tool_s: float
    queue_s: float
    versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """One tool call. position: index into the response where the answers to this turn's calls begin."""

    turn: int
    index: int
    tool: str
    code: str
    outcome: Outcome
    response: str
    queue_s: float
    run_s: float
    position: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of one problem.

    response_ids, loss_mask, log_probs: (response length,); the mask is True exactly on the model's own tokens; log_probs are
    the engine's, 0.0 where the mask is False. text: what the model itself wrote, all turns. policy_version: of its last tokens.
    """

    traj_id: str
    problem_id: str
    group_id: str
    sample: int
    question: str
    truth: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[bool]
    log_probs: list[float]
    turns: tuple[Turn, ...]
    calls: tuple[ToolCallRecord, ...]
    stop_reason: StopReason
    text: str
    answer: str | None
    reward: float
    p_err: float
    p_format: float
    engine: str
    policy_version: int

    @property
    def model_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def token_versions(self) -> list[int]:
        """The policy version of each response token; a tool's have that of the turn before them."""
        versions: list[int] = []
        for turn in self.turns:
            versions += [versions[-1] if versions else self.policy_version] * (turn.start - len(versions))
            for version, tokens in turn.versions or ((self.policy_version, turn.end - turn.start),):
                versions += [version] * tokens
        return versions + [self.policy_version] * (len(self.response_ids) - len(versions))

    @property
    def truncated(self) -> bool:
        return self.stop_reason in (StopReason.LENGTH, StopReason.TIME_LIMIT)

    @property
    def usable(self) -> bool:
        """Whether training may see it: not when we, not the model, ended it."""
        return self.stop_reason is not StopReason.ENGINE_ERROR

    @property
    def errors_and_calls(self) -> tuple[int, int]:
        return count_errors([call.outcome for call in self.calls])
