"""The request of a `math` call: an answer to verify."""

import re
from dataclasses import dataclass
from typing import Self

# A model's response contains tags of the chat format; an answer alone does not.
RESPONSE_TAGS = re.compile(r"</?(answer|reason|tool_call)>")


@dataclass(frozen=True, slots=True)
class Verification:
    """A request to check whether the answer in `response_text` (the last boxed one in the last <answer>) equals `answer`."""

    response_text: str
    answer: str

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
