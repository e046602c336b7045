"""One answer to check: what a `math` call asks for, and the processes that check it."""

import re
from dataclasses import dataclass
from typing import Self

# A model's response carries the tags of the chat format; an answer alone carries none.
RESPONSE_TAGS = re.compile(r"</?(answer|reason|tool_call)>")


@dataclass(frozen=True, slots=True)
class Verification:
    """Is the answer in `response_text` (the boxed one inside the last <answer>) equal to `answer`?"""

    response_text: str
    answer: str

    @classmethod
    def of(cls, solution: str, answer: str | None, kind: str | None = None) -> Self:
        """kind: `response`, `answer`, or None to tell by the tags.

        Raises ValueError where `answer` is missing or `kind` unknown.
        """
        if answer is None:
            raise ValueError("a math submission needs expected_output, the right answer")
        if kind not in (None, "response", "answer"):
            raise ValueError(f'options: "as" is {kind!r}; use "response" or "answer"')
        if kind == "response" or (kind is None and RESPONSE_TAGS.search(solution)):
            return cls(solution, answer)
        boxed = solution if "\\boxed" in solution else f"\\boxed{{{solution}}}"
        return cls(f"<answer>{boxed}</answer>", answer)
