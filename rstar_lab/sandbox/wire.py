"""JSON format of calls and results between client, server, Redis and workers.

JSON is written in ASCII, so that lone surrogates (from bytes that are not UTF-8) survive the transport.
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter
from pydantic_core import from_json

from rstar_lab.sandbox.call import FORBID, Call, CallResult, Output, first_session

MAX_BATCH = 4096  # calls in one request
# A model's response contains tags of the chat format; an answer alone does not.
RESPONSE_TAGS = re.compile(r"</?(answer|reason|tool_call)>")


@dataclass(frozen=True, slots=True)
class Verification:
    """A request to check whether the answer in `response_text` (the last boxed one in the last <answer>) equals `answer`."""

    response_text: str
    answer: str
    kind: Literal["math"] = "math"
    __pydantic_config__: ClassVar = FORBID

    @classmethod
    def of(cls, solution: str, answer: str | None, kind: str | None = None) -> Self:
        """Return the verification of a solution. kind: `response`, `answer`, or None to decide by the tags.

        Raises ValueError if `answer` is None or `kind` is unknown.
        """
        if answer is None:
            raise ValueError("expected_output: a math submission requires the correct answer")
        if kind not in (None, "response", "answer"):
            raise ValueError(f'options: "as" is {kind!r}; use "response" or "answer"')
        if kind == "response" or (kind is None and RESPONSE_TAGS.search(solution)):
            return cls(solution, answer)
        boxed = solution if "\\boxed" in solution else f"\\boxed{{{solution}}}"
        return cls(f"<answer>{boxed}</answer>", answer)


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """Request to end the interpreter of a session."""

    session: str
    kind: Literal["end"] = "end"
    __pydantic_config__: ClassVar = FORBID


@dataclass(frozen=True, slots=True)
class SessionFork:
    """Request to fork the interpreter of a session `n` times. The value of the result is a JSON list of the copies' names."""

    session: str
    n: Annotated[int, Field(ge=1, le=MAX_BATCH, description="copies")]
    kind: Literal["fork"] = "fork"
    __pydantic_config__: ClassVar = FORBID


def _kind_of(work: Any) -> str:
    """Return the kind of work that is not validated yet; default: code."""
    return str(work.get("kind", "code") if isinstance(work, dict) else getattr(work, "kind", ""))


Work = Annotated[
    Annotated[Call, Tag("code")]
    | Annotated[Verification, Tag("math")]
    | Annotated[SessionEnd, Tag("end")]
    | Annotated[SessionFork, Tag("fork")],
    Discriminator(_kind_of),
]
_WORK: TypeAdapter[Work] = TypeAdapter(Work)
_RESULT = TypeAdapter(CallResult)
_OUTPUT = TypeAdapter(Output)


def session_of(work: Work) -> str | None:
    """Return the session that decides where this work runs; None for work without a session.

    Work of a session must run on the session's worker, and must not run twice. For a copy of a session this is the first
    session, because all copies are on its worker.
    """
    return None if isinstance(work, Verification) or work.session is None else first_session(work.session)


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def work_to_dict(work: Work) -> dict[str, Any]:
    return {name: value for name, value in asdict(work).items() if value is not None}


def work_from_json(body: bytes) -> Work:
    """Parse work. Raises ValueError or RecursionError for invalid input."""
    return _WORK.validate_python(json.loads(body))


def result_from_json(body: bytes) -> CallResult:
    """Parse a result. Raises ValueError for anything else."""
    return _RESULT.validate_python(from_json(body, allow_inf_nan=False))


def line_from_json(line: str, calls: int) -> tuple[int, CallResult | Output]:
    """Parse a line of the response to a request with this number of calls: the call's index, and its result or new output.

    Raises ValueError for anything else.
    """
    data = from_json(line, allow_inf_nan=False)
    index = data.get("index") if isinstance(data, dict) else None
    if not isinstance(index, int) or not 0 <= index < calls:
        raise ValueError("no index of a call")
    return index, (_OUTPUT if "stream" in data else _RESULT).validate_python(data)
