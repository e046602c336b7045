"""Properties of an assistant turn: whether it is void, and how many answers it has."""

import re
from collections.abc import Sequence

from rstar_lab.tool_calls import ToolCall
from rstar_lab.verify import AnswerFormat, extract_answer


def is_void_turn(text: str, calls: Sequence[ToolCall], answer_format: AnswerFormat = "tagged") -> bool:
    """Return whether an assistant turn has neither a well-formed tool call nor a final answer. calls: those in its text.

    Source: SimpleTIR (arXiv 2509.02479), section 3.3.
    """
    return extract_answer(text, answer_format) is None and all(call.error for call in calls)


def count_answers(text: str) -> int:
    """Return the number of `<answer>…</answer>` in the model's text; 0 if opening and closing tags do not match."""
    tags = re.findall(r"</?answer>", text)
    paired = len(tags) % 2 == 0 and all(tag == "<answer>" for tag in tags[::2]) and "<answer>" not in tags[1::2]
    return len(tags) // 2 if paired else 0
