"""Which rows run together: groups of rows whose routing paths share experts (ExpertFlow, sections 3.3.2 and 3.3.3).

A path is a row's chance to pick each (layer, expert) of the model: ``[N]``, 0 or 1 where it is known. What a group
needs is the union of its rows' paths. The paper prints Eq. 4 with AND; its section 5.2 has OR, and an AND would reward
rows that share nothing. Pure functions: equal arguments give equal groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Ids, Mask, Scores

THRESHOLD = 0.5
"""From which chance on an expert counts as picked, where paths are taken to be binary."""

_SURE = np.float32(1 - 1e-6)
"""A chance of 1 is taken for this, so that the chance that a row does not pick an expert can be divided out again."""
_GAIN = 1e-3
"""Experts that a swap saves at least. It is above rounding, so swaps come to an end."""
_WORK = 8.0e7
"""Rows² × experts that looking for swaps may take. It bounds the time of a decision."""
_MOST_LOOKS = 12
_SWAPS_A_LOOK = 12
_MOST_ROUNDS = 16


def expected_union(paths: Scores) -> NDArray[np.float32]:
    """Eq. 4 read as OR: ``[N]``, the chance 1 − Π(1 − p) that a group with these paths ``[R, N]`` needs each expert."""
    union: NDArray[np.float32] = 1 - np.prod(1 - paths, axis=0, dtype=np.float32)
    return union


def active_experts(paths: Scores, groups: Sequence[Ids]) -> float:
    """Eq. 5: how many (layer, expert) the groups need, each counted for itself. Expected ones where paths are chances.

    ``groups``: of each the rows of ``paths[R, N]``.
    """
    return float(sum(expected_union(paths[group]).sum(dtype=np.float64) for group in groups))


def similarity(paths: Scores) -> NDArray[np.float32]:
    """Eq. 6: ``[R, R]``, 1 − Hamming distance ÷ (layers · experts). Where paths are chances, the expected distance."""
    own = paths.sum(axis=1)
    distance = own[:, None] + own[None, :] - 2 * (paths @ paths.T)
    alike: NDArray[np.float32] = 1 - distance / np.float32(max(1, paths.shape[1]))
    return alike


def balanced_medoids(alike: NDArray[np.float32], size: int, *, seed: int = 0, unlike: bool = False) -> Mask:
    """Two groups of ``size`` and R − ``size`` rows by similarity ``alike[R, R]``: who is in the first one, ``[R]``.

    As the paper has it: two random rows are medoids. Each row goes to the more similar one. What exceeds a group's size
    goes to the other, those first that lose least. Then the row of the highest mean similarity within its group is the
    group's medoid. Ends when the groups stand, or after a bounded number of rounds. ``unlike``: not the paper's: the
    second medoid to start from is the row least like the first, so that they never start from two of one kind.
    """
    rows = len(alike)
    first: Mask = np.zeros(rows, dtype=np.bool_)
    if not 0 < size < rows:
        first[:size] = True
        return first
    medoids = np.random.default_rng(seed).choice(rows, size=2, replace=False)
    if unlike:
        medoids[1] = alike[medoids[0]].argmin()
    for turn in range(_MOST_ROUNDS):
        leaning = alike[:, medoids[0]] - alike[:, medoids[1]]
        chosen = np.zeros(rows, dtype=np.bool_)
        chosen[np.argsort(-leaning, kind="stable")[:size]] = True
        if turn and np.array_equal(chosen, first):
            break
        first = chosen
        for place, group in enumerate((np.flatnonzero(first), np.flatnonzero(~first))):
            medoids[place] = group[alike[np.ix_(group, group)].sum(axis=1).argmax()]
    return first


def swapped(paths: Scores, first: Mask) -> Mask:
    """The same two groups after swaps of one row for another, each of which lowers the expected union of both. Ours.

    The number of swaps is bounded, by the size of ``paths[R, N]`` alone.
    """
    rows = len(paths)
    one, other = np.flatnonzero(first), np.flatnonzero(~first)
    if not len(one) or not len(other):
        return first
    looks = int(min(_MOST_LOOKS, max(1, _WORK // (rows * rows * max(1, paths.shape[1])))))
    swaps = _Swaps(paths, one, other)
    for _ in range(looks):
        if not swaps.improve():
            break
    found: Mask = np.zeros(rows, dtype=np.bool_)
    found[swaps.rows[0]] = True
    return found


def grouped(paths: Scores, sizes: Sequence[int], *, literal: bool = False, seed: int = 0) -> list[Ids]:
    """Groups of so many rows each, whose rows share experts: of each its rows of ``paths[R, N]``, ascending.

    More than two are made by dividing again. ``literal``: the paper's medoids alone, on paths that count as picked from
    a chance of ½ on. Else swaps follow. ``sizes`` add up to R.
    """
    if literal:
        paths = (paths >= THRESHOLD).astype(np.float32)
    return _divided(paths, np.arange(len(paths)), list(sizes), literal, seed)


def _divided(paths: Scores, rows: Ids, sizes: list[int], literal: bool, seed: int) -> list[Ids]:
    if len(sizes) == 1:
        return [rows]
    half = len(sizes) // 2
    own = paths if len(rows) == len(paths) else paths[rows]
    first = balanced_medoids(similarity(own), sum(sizes[:half]), seed=seed, unlike=not literal)
    if not literal:
        first = swapped(own, first)
    parts = (rows[first], sizes[:half]), (rows[~first], sizes[half:])
    return [group for part, some in parts for group in _divided(paths, part, some, literal, seed)]


class _Swaps:
    """Two groups of rows, and what swapping a row of one for a row of the other would save.

    ``rows``: of each group. With u = Π(1 − p) over a group, the experts that it is expected not to need sum up to Σ u.
    A row that leaves divides u by its own 1 − p, one that joins multiplies it. So a product of two matrices has what
    each of all pairs would leave: (u ÷ (1 − p_i)) · (1 − p_j).
    """

    def __init__(self, paths: Scores, one: Ids, other: Ids) -> None:
        self._without = 1 - np.minimum(paths, _SURE)
        self.rows = [one.copy(), other.copy()]
        self._unneeded = [self._product(group) for group in self.rows]
        self._left = self._total(self._unneeded)

    def improve(self) -> bool:
        """Look at all pairs, then swap the best ones that still save something. False: none does."""
        without = [self._without[group] for group in self.rows]
        left = [unneeded / own for unneeded, own in zip(self._unneeded, without, strict=True)]
        after = left[0] @ without[1].T + (left[1] @ without[0].T).T
        gains = after - self._left
        swaps = 0
        for _ in range(_SWAPS_A_LOOK):
            i, j = divmod(int(gains.argmax()), gains.shape[1])
            if gains[i, j] <= _GAIN:
                break
            gains[i, :] = gains[:, j] = 0
            swaps += self._swap(i, j)
        return swaps > 0

    def _swap(self, i: int, j: int) -> bool:
        """Swap the i-th row of one group for the j-th of the other, if that still saves something."""
        one, other = self.rows
        leaves, comes = self._without[one[i]], self._without[other[j]]
        ratio = comes / leaves
        after = [self._unneeded[0] * ratio, self._unneeded[1] / ratio]
        left = self._total(after)
        if left <= self._left + _GAIN:
            return False
        self._unneeded, self._left = after, left
        one[i], other[j] = other[j], one[i]
        return True

    @staticmethod
    def _total(unneeded: list[Scores]) -> float:
        return float(unneeded[0].sum() + unneeded[1].sum())

    def _product(self, group: Ids) -> Scores:
        product: Scores = np.prod(self._without[group], axis=0, dtype=np.float32)
        return product
