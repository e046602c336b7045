"""Reward shaping, off by default."""


def overlong_penalty(
    response_tokens: int, max_response_tokens: int, buffer_tokens: int, *, factor: float = 1.0
) -> float:
    """Return the value to add to a reward: 0 up to `buffer_tokens` before the limit, then falling linearly to -factor at
    the limit.

    Source: DAPO (arXiv 2503.14476), equation 13, soft overlong punishment.
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"buffer_tokens must lie in 1..{max_response_tokens} (max_response_tokens), got {buffer_tokens}"
        )
    past = response_tokens - (max_response_tokens - buffer_tokens)
    return -factor * min(max(past / buffer_tokens, 0.0), 1.0)
