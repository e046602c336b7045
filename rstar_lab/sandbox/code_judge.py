"""code-judge's HTTP API, compatible with its clients.

A result has two additional fields: `outcome` (see rstar_lab.common.outcomes) and `value` (repr of the last expression, which is
not printed).
"""

import base64
import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.cpp import cpp_call, cpp_outcome
from rstar_lab.sandbox.wire import MAX_BATCH, Verification
from rstar_lab.verify.released import with_grader

SubmissionId = Annotated[str, BeforeValidator(lambda given: given or str(uuid.uuid4())), Field(validate_default=True)]


class Submission(BaseModel):
    """A program to run, or (type math) an answer to verify.

    math: `solution` is a model's response or an answer alone; `expected_output` is the correct answer. A response is
    recognised by its tags. With options {"as": "response"}, `solution` is a response even without tags; use it in rewards.
    """

    sub_id: SubmissionId = Field("", description="returned with the result; default: a random id")
    type: Literal["python", "cpp", "math"]
    options: dict[str, str] | None = Field(None, description='math only: {"as": "response" | "answer"}')
    solution: str = Field(description="the program")
    input: str | None = Field(None, description="its standard input")
    expected_output: str | None = Field(
        None, description="compared with standard output, without white space at both ends"
    )


class BatchSubmission(BaseModel):
    sub_id: SubmissionId = ""
    type: Literal["batch"] = "batch"
    submissions: list[Submission] = Field(min_length=1, max_length=MAX_BATCH)


Reason = Literal["", "internal_error", "worker_timeout", "queue_timeout", "invalid_input"]
REASONS: dict[Outcome, Reason] = {
    Outcome.TIMEOUT: "worker_timeout",
    Outcome.QUEUE_TIMEOUT: "queue_timeout",
    Outcome.SANDBOX_ERROR: "internal_error",
    Outcome.INVALID_ARGUMENTS: "invalid_input",
}


class SubmissionResult(BaseModel):
    """Whether the program ran and whether its output is as expected. /judge returns no stdout and stderr."""

    sub_id: str
    success: bool = Field(description="run_success, and the output equals expected_output if that is set")
    run_success: bool = Field(description="the program ended without error")
    cost: float = Field(description="seconds")
    reason: Reason = ""
    outcome: Outcome
    value: str | None = None
    stdout: str | None = None
    stderr: str | None = None


class BatchResult(BaseModel):
    sub_id: str
    results: list[SubmissionResult]


class Status(BaseModel):
    queue: int = Field(description="queued calls")
    num_workers: int = Field(description="calls that use CPU time at once, over all nodes")


def base64_pieces(name: str) -> list[str]:
    """Return the parts of a name's base64 text that do not depend on its context, for the three possible alignments."""
    pieces = []
    for shift, skip in ((0, 0), (1, 2), (2, 3)):
        text = base64.b64encode(b"\0" * shift + name.encode()).decode()
        pieces.append(text[skip : (8 * (shift + len(name))) // 6])
    return pieces


HIDDEN = {name: base64_pieces(name) for name in ("scipy", "sympy", "numpy")}


def with_imports_shown(code: str) -> str:
    """Append a comment that names the library which a base64-encoded program imports, so that its zygote is chosen.

    The client of the rStar release sends programs in base64.
    """
    for name, pieces in HIDDEN.items():
        if name not in code and any(piece in code for piece in pieces):
            return f"{code}\n# {name}"
    return code


def to_work(submission: Submission, time_limit_s: float) -> Call | Verification:
    """Return the work for a submission. Raises ValueError if a math submission lacks expected_output or has a wrong option."""
    if submission.type == "math":
        return Verification.of(submission.solution, submission.expected_output, (submission.options or {}).get("as"))
    if submission.type == "cpp":
        return cpp_call(submission.solution, submission.input or "", run_timeout_s=time_limit_s)
    return Call(with_grader(with_imports_shown(submission.solution)), submission.input or "")


def to_result(submission: Submission, result: CallResult) -> SubmissionResult:
    """Convert a result to code-judge's format."""
    if submission.type == "cpp":
        result = cpp_outcome(result)
    ran = result.outcome is Outcome.OK
    if submission.type == "math":
        right = result.value == "True"
    else:
        expected = submission.expected_output
        right = expected is None or result.stdout.strip() == expected.strip()
    return SubmissionResult(
        sub_id=submission.sub_id,
        success=ran and right,
        run_success=ran,
        cost=result.duration_s,
        reason=REASONS.get(result.outcome, ""),
        outcome=result.outcome,
        value=result.value,
        stdout=result.stdout,
        stderr=result.stderr,
    )
