"""How many requests of one expert an executor computes at once: CoServe's request splitting. Pure.

CoServe (ASPLOS 2025, doi 10.1145/3676641.3715986), section 4.2.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from fractions import Fraction

from greenroom.core.errors import InvalidConfig


def batch_size(waiting: int, free_bytes: int, bytes_by_batch: Mapping[int, int], most: int) -> int:
    """The smaller of what free intermediate memory holds and the profiled maximum, and no more than wait.

    ``bytes_by_batch``: as measured, of at least one batch size. ``most``: from where on larger batches are no faster a
    request. 0: not even one fits into ``free_bytes``. Raises InvalidConfig without a measurement.
    """
    low, high = 0, max(min(waiting, most), 0)
    while low < high:  # the bytes never shrink with the batch, so the largest that fits is found by halving
        middle = (low + high + 1) // 2
        if bytes_of_batch(bytes_by_batch, middle) <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def bytes_of_batch(bytes_by_batch: Mapping[int, int], batch: int) -> int:
    """Bytes of the intermediates of a batch: between two measured sizes on the line between them, rounded up.

    Memory is the most of several lines, one an operation, so that is never too little. Beyond the largest size on the
    line through the two last ones, or through nothing if there is one alone. Below the
    smallest as much as that. It never shrinks with ``batch``. Raises InvalidConfig without a measurement.
    """
    if not bytes_by_batch:
        raise InvalidConfig("bytes_by_batch", "nothing", "at least one measured batch size")
    sizes = sorted(bytes_by_batch)
    measured: list[int] = []
    for size in sizes:  # one that needs less than a smaller one was measured wrong
        measured.append(max(bytes_by_batch[size], measured[-1] if measured else 0))
    if batch <= sizes[0]:
        return measured[0]
    if len(sizes) == 1:
        return -(-measured[0] * batch // sizes[0])
    right = min(bisect.bisect_left(sizes, batch), len(sizes) - 1)
    left = right - 1
    slope = Fraction(measured[right] - measured[left], sizes[right] - sizes[left])
    return -int((-(measured[left] + slope * (batch - sizes[left]))) // 1)
