"""Choosing victims by a score."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import NO_KEYS, Counts, Keys
from greenroom.policies.base.events import VictimRequest
from greenroom.policies.base.expert_keys import Catalogue

Worth = NDArray[np.number[Any]]


def lowest(catalogue: Catalogue, request: VictimRequest, worth: Worth, tie: Worth | None = None) -> Keys:
    """The evictable experts of the least ``worth[N]``, just enough of them for ``bytes_needed``.

    They come in ascending worth, ties by the least ``tie[N]``, then by the lower key. Empty where all of them together
    do not free enough, or where nothing is needed. Where sizes differ, an expert is spared if the others free enough
    without it, the worthiest first.
    """
    if request.bytes_needed <= 0:
        return NO_KEYS
    candidates = request.evictable.nonzero()[0]
    size = catalogue.record_bytes or _size_of_each(catalogue.bytes_of[candidates])
    if size is None:
        return just_enough(catalogue.bytes_of, request.bytes_needed, _ranked(candidates, worth, tie))
    count = -(-request.bytes_needed // size)
    if count > len(candidates):
        return NO_KEYS
    of_candidates = worth[candidates]
    if count == 1:
        if tie is not None:
            candidates = candidates[of_candidates == of_candidates.min()]
            of_candidates = tie[candidates]
        first = int(of_candidates.argmin())
        return candidates[first : first + 1]
    if count < len(candidates):
        # An expert worth more than the count-th least is no victim. So only the others are sorted.
        bound = np.partition(of_candidates, count - 1)[count - 1]
        candidates = candidates[of_candidates <= bound]
    return _ranked(candidates, worth, tie)[:count]


def _size_of_each(sizes: Counts) -> int | None:
    """None where they differ, and where there are none."""
    return int(sizes[0]) if len(sizes) and bool((sizes == sizes[0]).all()) else None


def _ranked(candidates: Keys, worth: Worth, tie: Worth | None) -> Keys:
    if tie is None:
        return candidates[np.argsort(worth[candidates], kind="stable")]
    return candidates[np.lexsort((tie[candidates], worth[candidates]))]


def just_enough(bytes_of: Counts, bytes_needed: int, ranked: Keys) -> Keys:
    """The first of ``ranked`` that free ``bytes_needed``, without those that the others do not need, the last first.
    Empty where all together do not free enough.
    """
    freed = np.cumsum(bytes_of[ranked])
    count = int(np.searchsorted(freed, bytes_needed)) + 1
    if count > len(ranked):
        return NO_KEYS
    chosen = ranked[:count]
    spare = int(freed[count - 1]) - bytes_needed
    keep = np.ones(count, dtype=np.bool_)
    for position in range(count - 1, -1, -1):
        size = int(bytes_of[chosen[position]])
        if size <= spare:
            keep[position] = False
            spare -= size
    return chosen[keep]
