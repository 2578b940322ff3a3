"""Choosing victims from a score, shared by the policies that rank experts by one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.arrays import NO_KEYS, Keys
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import VictimRequest

_LAST = np.iinfo(np.int64).max


def lowest(catalogue: Catalogue, request: VictimRequest, worth: NDArray[np.int64]) -> Keys:
    """The evictable experts of the least ``worth[N]``, just enough of them for ``bytes_needed``.

    In ascending worth, ties by the lower key; empty where all of them together do not free enough, or nothing is
    needed. Where sizes differ, those whose bytes the others make up for are spared, the worthiest first.
    ``worth`` must lie under the largest int64.
    """
    needed = request.bytes_needed
    if needed <= 0:
        return NO_KEYS
    size = catalogue.record_bytes
    if size is None:
        return _lowest_by_bytes(catalogue.bytes_of, request, worth)
    count = -(-needed // size)
    masked = np.where(request.evictable, worth, _LAST)
    if count == 1:
        victim = int(masked.argmin())
        return np.array([victim], dtype=np.int64) if request.evictable[victim] else NO_KEYS
    if count > int(np.count_nonzero(request.evictable)):
        return NO_KEYS
    if 4 * count < len(masked):
        # Only what is at or under the count-th least worth needs sorting.
        bound = np.partition(masked, count - 1)[count - 1]
        candidates = np.flatnonzero((masked <= bound) & request.evictable)
    else:
        candidates = np.flatnonzero(request.evictable)
    return candidates[np.argsort(masked[candidates], kind="stable")[:count]]


def _lowest_by_bytes(bytes_of: NDArray[np.int64], request: VictimRequest, worth: NDArray[np.int64]) -> Keys:
    candidates = np.flatnonzero(request.evictable)
    ranked = candidates[np.argsort(worth[candidates], kind="stable")]
    freed = np.cumsum(bytes_of[ranked])
    count = int(np.searchsorted(freed, request.bytes_needed)) + 1
    if count > len(ranked):
        return NO_KEYS
    chosen = ranked[:count]
    spare = int(freed[count - 1]) - request.bytes_needed
    keep = np.ones(count, dtype=np.bool_)
    for position in range(count - 1, -1, -1):
        size = int(bytes_of[chosen[position]])
        if size <= spare:
            keep[position] = False
            spare -= size
    return chosen[keep]
