"""Reward shaping, off by default."""


def overlong_penalty(response_tokens: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """Return the value to add to a reward: 0 up to `buffer_tokens` before the limit, then falling linearly to -1 at the
    limit.

    Source: DAPO (arXiv 2503.14476), equation 13, soft overlong punishment. Raises ValueError if buffer_tokens is not in
    1..max_response_tokens.
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"buffer_tokens must lie in 1..{max_response_tokens} (max_response_tokens), got {buffer_tokens}"
        )
    past = response_tokens - (max_response_tokens - buffer_tokens)
    return -min(max(past / buffer_tokens, 0.0), 1.0)
