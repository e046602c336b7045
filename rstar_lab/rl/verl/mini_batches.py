"""Order the rows of a batch so that verl's mini-batches contain the same rollouts as the local trainer's, for any number of ranks."""

from collections.abc import Sequence

import numpy as np


def order_rows(mini_batch_of: Sequence[int | None], ranks: int, mini_batches: int) -> list[int]:
    """Return an order of the rows in which mini-batch `m`, over all ranks together, holds the rows assigned to `m`.

    verl gives each rank a contiguous slice of the batch and cuts each slice into `mini_batches` equal parts. The real rows
    of a mini-batch are spread evenly over the ranks, in their order; padding fills each part up.

    Args:
        mini_batch_of: (rows,) the mini-batch of each real row, None for padding. The number of rows is a multiple of
            ranks * mini_batches, and no mini-batch has more than rows / mini_batches real rows.
    """
    size = len(mini_batch_of) // ranks // mini_batches
    padding = iter([row for row, number in enumerate(mini_batch_of) if number is None])
    shares = [
        np.array_split([row for row, number in enumerate(mini_batch_of) if number == wanted], ranks)
        for wanted in range(mini_batches)
    ]
    order: list[int] = []
    for rank in range(ranks):
        for share in shares:
            real = [int(row) for row in share[rank]]
            order += real + [next(padding) for _ in range(size - len(real))]
    return order


def rows_of_mini_batches(rows: int, ranks: int, mini_batches: int) -> list[list[int]]:
    """Return the positions, in the ordered batch, of the rows of each mini-batch over all ranks."""
    size = rows // ranks // mini_batches
    return [
        [rank * size * mini_batches + part * size + i for rank in range(ranks) for i in range(size)]
        for part in range(mini_batches)
    ]


def assign(count: int, mini_batches: int) -> list[int]:
    """Return the mini-batch of each of `count` kept rollouts, cut as `Learner.update` cuts them: in order, in equal parts."""
    bounds = np.linspace(0, count, min(mini_batches, count) + 1).astype(int)
    return [int(number) for number in np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))]
