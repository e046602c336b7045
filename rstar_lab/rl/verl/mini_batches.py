"""Order the rows of a batch so that verl's mini-batches contain the same rollouts as the local trainer's, for any number of ranks."""

from collections.abc import Sequence

import numpy as np


def order_rows(
    mini_batch_of: Sequence[int | None], ranks: int, mini_batches: int, workloads: Sequence[float] | None = None
) -> list[int]:
    """Return an order of the rows in which mini-batch `m`, over all ranks together, holds the rows assigned to `m`.

    verl gives each rank a contiguous slice of the batch and cuts each slice into `mini_batches` equal parts. All ranks
    wait for the slowest, so the rows of a mini-batch are dealt to the ranks by their work (Karmarkar-Karp, as in verl).
    Padding fills each part up.

    Args:
        mini_batch_of: (rows,) the mini-batch of each real row, None for padding. The number of rows is a multiple of
            ranks * mini_batches, and no mini-batch has more than rows / mini_batches real rows.
        ranks: number of ranks.
        mini_batches: number of mini-batches.
        workloads: (rows,) work of each row, in any unit. Default: the same for all real rows.
    """
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    size = len(mini_batch_of) // mini_batches
    if workloads is None:
        workloads = [float(number is not None) for number in mini_batch_of]
    padding = iter([row for row, number in enumerate(mini_batch_of) if number is None])
    parts: list[list[list[int]]] = []  # by mini-batch and rank
    for wanted in range(mini_batches):
        rows = [row for row, number in enumerate(mini_batch_of) if number == wanted]
        rows += [next(padding) for _ in range(size - len(rows))]
        shares = get_seqlen_balanced_partitions([workloads[row] for row in rows], ranks, equal_size=True)
        parts.append([[rows[i] for i in share] for share in shares])
    return [row for rank in range(ranks) for part in parts for row in part[rank]]


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
