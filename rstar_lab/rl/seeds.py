"""Seeds derived from what a draw is for, so that no draw depends on another."""

import hashlib


def derive_seed(*parts: object) -> int:
    """A 31-bit seed from what names the draw (run seed, step, trajectory, turn...): the same parts, the same seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def step_seed(seed: int, step: int) -> int:
    """The seed that every draw of a step is derived from."""
    return derive_seed(seed, "step", step)
