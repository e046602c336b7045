"""Published additions to reward and filter, each off by default."""

from collections.abc import Iterable

from rstar_lab.rl.chat_format.parser import parse_tool_calls
from rstar_lab.verify import extract_answer


def overlong_penalty(
    response_tokens: int, max_response_tokens: int, buffer_tokens: int, *, factor: float = 1.0
) -> float:
    """What to add to a reward: 0 up to `buffer_tokens` before the limit, then falling in a line to -factor at the
    limit.

    Source: DAPO (2503.14476), equation 13, soft overlong punishment.
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"buffer_tokens must lie in 1..max_response_tokens, not {buffer_tokens} of {max_response_tokens}"
        )
    past = response_tokens - (max_response_tokens - buffer_tokens)
    return -factor * min(max(past / buffer_tokens, 0.0), 1.0)


def has_void_turn(turns: Iterable[str]) -> bool:
    """Whether an assistant turn has neither a well-formed tool call nor a final answer: such a trajectory is left out
    of the loss.

    turns: the model's own text of each turn. Source: SimpleTIR (2509.02479), section 3.3.
    """
    return any(extract_answer(turn) is None and all(call.error for call in parse_tool_calls(turn)) for turn in turns)
