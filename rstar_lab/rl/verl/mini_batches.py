"""Which rows verl trains on together, and in which order they must stand so that every mini-batch has its share."""

import itertools
from collections.abc import Sequence

import numpy as np


def spread(padding: Sequence[bool], ranks: int, parts: int) -> list[int]:
    """An order of the rows in which each of a rank's `parts` mini-batches has an even share of its real rows, in their order.

    padding: whether a row is one, (rows,); rows are a multiple of ranks x parts. verl puts padding last, so that the last
    mini-batch would train on less than the others, or on nothing but the optimizer's momentum.
    """
    rows = len(padding) // ranks
    order: list[int] = []
    for rank in range(ranks):
        own = range(rank * rows, (rank + 1) * rows)
        real, empty = [i for i in own if not padding[i]], iter([i for i in own if padding[i]])
        bounds = np.linspace(0, len(real), parts + 1).astype(int)
        for start, end in itertools.pairwise(bounds):
            order += [*real[start:end], *itertools.islice(empty, rows // parts - (end - start))]
    return order


def members(rows: int, ranks: int, parts: int) -> list[list[int]]:
    """The rows of each mini-batch: verl gives every rank a slice of the batch, and cuts each slice into `parts`."""
    size = rows // ranks // parts
    return [
        [rank * size * parts + part * size + i for rank in range(ranks) for i in range(size)] for part in range(parts)
    ]
