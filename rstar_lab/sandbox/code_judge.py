"""code-judge's HTTP API, field by field, so that its clients work against this service unchanged.

Two fields are added to a result: `outcome` (the taxonomy of rstar_lab.outcomes) and `value` (repr of the last
expression, which is not printed).
"""

import base64
import uuid
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, Field

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.cpp import cpp_call, cpp_outcome
from rstar_lab.sandbox.verification import Verification
from rstar_lab.sandbox.wire import MAX_BATCH


class Submission(BaseModel):
    """One program to run, or (type math) one answer to check.

    math: `solution` is a model's response, or an answer alone; `expected_output` is the right answer. A response is
    told by its tags; options {"as": "response"} treats `solution` as one even without them, as a reward should.
    """

    sub_id: str | None = Field(None, description="echoed in the result; made up where missing")
    type: Literal["python", "cpp", "math"]
    options: dict[str, str] | None = Field(None, description='math only: {"as": "response" | "answer"}')
    solution: str = Field(description="the program")
    input: str | None = Field(None, description="its standard input")
    expected_output: str | None = Field(
        None, description="compared with standard output, white space at both ends aside"
    )

    def model_post_init(self, _context: object) -> None:
        self.sub_id = self.sub_id or str(uuid.uuid4())


class BatchSubmission(BaseModel):
    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: list[Submission] = Field(min_length=1, max_length=MAX_BATCH)

    def model_post_init(self, _context: object) -> None:
        self.sub_id = self.sub_id or str(uuid.uuid4())


class ResultReason(StrEnum):
    UNSPECIFIED = ""
    INTERNAL_ERROR = "internal_error"
    WORKER_TIMEOUT = "worker_timeout"
    QUEUE_TIMEOUT = "queue_timeout"
    INVALID_INPUT = "invalid_input"


REASONS = {
    Outcome.TIMEOUT: ResultReason.WORKER_TIMEOUT,
    Outcome.QUEUE_TIMEOUT: ResultReason.QUEUE_TIMEOUT,
    Outcome.SANDBOX_ERROR: ResultReason.INTERNAL_ERROR,
    Outcome.INVALID_ARGUMENTS: ResultReason.INVALID_INPUT,
}


class JudgeResult(BaseModel):
    """What /judge tells: whether it ran, and whether the output was the expected one."""

    sub_id: str
    success: bool = Field(description="it ran to its end without error and the output, where one is expected, is right")
    run_success: bool = Field(description="it ran to its end without error")
    cost: float = Field(description="seconds")
    reason: ResultReason = ResultReason.UNSPECIFIED
    outcome: Outcome
    value: str | None = None


class SubmissionResult(JudgeResult):
    """What /run tells: the same, and what the program wrote."""

    stdout: str | None = None
    stderr: str | None = None


class BatchJudgeResult(BaseModel):
    sub_id: str
    results: list[JudgeResult]


class BatchSubmissionResult(BaseModel):
    sub_id: str
    results: list[SubmissionResult]


class Status(BaseModel):
    queue: int = Field(description="calls waiting")
    num_workers: int = Field(description="calls that run at full priority at once, over all nodes")


def base64_pieces(name: str) -> list[str]:
    """What is certain of a name's base64 text, for each of its three places relative to the groups of three bytes."""
    pieces = []
    for shift, skip in ((0, 0), (1, 2), (2, 3)):
        text = base64.b64encode(b"\0" * shift + name.encode()).decode()
        pieces.append(text[skip : (8 * (shift + len(name))) // 6])
    return pieces


HIDDEN = {name: base64_pieces(name) for name in ("scipy", "sympy", "numpy")}


def with_imports_shown(code: str) -> str:
    """The release's client sends programs in base64; a comment after the last line tells which warm zygote they need."""
    for name, pieces in HIDDEN.items():
        if name not in code and any(piece in code for piece in pieces):
            return f"{code}\n# {name}"
    return code


def to_work(submission: Submission, time_limit_s: float) -> Call | Verification:
    """What the backend is asked to do.

    Raises ValueError where a math submission has no expected_output or an unknown option.
    """
    if submission.type == "math":
        return Verification.of(submission.solution, submission.expected_output, (submission.options or {}).get("as"))
    if submission.type == "cpp":
        return cpp_call(submission.solution, submission.input or "", run_timeout_s=time_limit_s)
    return Call(with_imports_shown(submission.solution), submission.input or "")


def to_result(submission: Submission, result: CallResult) -> SubmissionResult:
    """The result in code-judge's words."""
    if submission.type == "cpp":
        result = cpp_outcome(result)
    ran = result.outcome is Outcome.OK
    if submission.type == "math":
        right = result.value == "True"
    else:
        expected = submission.expected_output
        right = expected is None or result.stdout.strip() == expected.strip()
    return SubmissionResult(
        sub_id=submission.sub_id or "",
        success=ran and right,
        run_success=ran,
        cost=result.duration_s,
        reason=REASONS.get(result.outcome, ResultReason.UNSPECIFIED),
        outcome=result.outcome,
        value=result.value,
        stdout=result.stdout,
        stderr=result.stderr,
    )
