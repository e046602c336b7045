"""Seeds derived from the purpose of a draw, so that no draw depends on another."""

import hashlib


def derive_seed(*parts: object) -> int:
    """Return a 31-bit seed from the parts that identify a draw (run seed, step, trajectory, turn...)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def group_seed(seed: int, group_id: str) -> int:
    """Return the seed with which rollouts of a group are selected. seed: of the step."""
    return derive_seed(seed, "roc", group_id)


def step_seed(seed: int, step: int) -> int:
    """Return the seed from which every draw of a step is derived."""
    return derive_seed(seed, "step", step)
