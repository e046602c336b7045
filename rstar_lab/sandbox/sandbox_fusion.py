"""SandboxFusion's POST /run_code for python and cpp without files, as used by verl's tools and rewards."""

from typing import Literal

from pydantic import BaseModel, Field

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.cpp import commands, cpp_call, cpp_outcome

# Exit statuses as SandboxFusion defines them; of other outcomes: -9.
RETURN_CODES = {Outcome.OK: 0, Outcome.EXCEPTION: 1, Outcome.SYNTAX_ERROR: 1, Outcome.TIMEOUT: None}


class RunCodeRequest(BaseModel):
    compile_timeout: float = Field(10, gt=0, description="seconds; cpp only")
    run_timeout: float = Field(10, gt=0, description="seconds, at most the service's maximum")
    memory_limit_MB: int = Field(-1, description="-1: the service's default")
    code: str
    stdin: str | None = None
    language: Literal["python", "cpp"]
    files: dict[str, str | None] = Field({}, max_length=0, description="not supported: must be empty")
    fetch_files: list[str] = Field([], max_length=0, description="not supported: must be empty")


class CommandRunResult(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = Field(None, description="0 or 1 for python; -9 if the program was killed")
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}
    outcome: Outcome
    value: str | None = None


def to_call(request: RunCodeRequest, max_timeout_s: float) -> Call:
    """Return the call for a request. Raises ValueError for a limit out of its range."""
    memory_mb = request.memory_limit_MB if request.memory_limit_MB > 0 else None
    timeout_s = min(request.run_timeout, max_timeout_s)
    if request.language == "python":
        return Call(request.code, request.stdin or "", timeout_s=timeout_s, memory_mb=memory_mb)
    return cpp_call(
        request.code,
        request.stdin or "",
        run_timeout_s=timeout_s,
        compile_timeout_s=min(request.compile_timeout, max_timeout_s),
        memory_mb=memory_mb,
    )


def to_response(request: RunCodeRequest, result: CallResult) -> RunCodeResponse:
    compiled = None
    if request.language == "cpp" and result.outcome is not Outcome.INVALID_ARGUMENTS:
        built, _ = commands(result)
        result = cpp_outcome(result)
        compiled = command_result(built.return_code, built.seconds, "", built.stderr) if built else None
    if result.outcome in (*INFRASTRUCTURE_FAILURES, Outcome.INVALID_ARGUMENTS):
        return RunCodeResponse(status="SandboxError", message=result.stderr or result.outcome, outcome=result.outcome)
    ran = None
    if compiled is None or compiled.return_code == 0:
        code = RETURN_CODES.get(result.outcome, -9)
        ran = command_result(code, result.duration_s, result.stdout, result.stderr)
    return RunCodeResponse(
        status="Success" if result.outcome is Outcome.OK else "Failed",
        compile_result=compiled,
        run_result=ran,
        outcome=result.outcome,
        value=result.value,
    )


def command_result(code: int | None, seconds: float, stdout: str, stderr: str) -> CommandRunResult:
    """Return how a command ended. code: None for a timeout."""
    status = "TimeLimitExceeded" if code is None else "Finished"
    return CommandRunResult(status=status, execution_time=seconds, return_code=code, stdout=stdout, stderr=stderr)
