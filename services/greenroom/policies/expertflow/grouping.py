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
_WORK = 0.9e8
"""Experts × (rows², and what else takes as long) that a decision may spend on looking for swaps, for all of its groups
together. It bounds a decision's time: by it 64 rows of 6144 experts that make two groups are looked at twice."""
_ROW_WORK, _SWAP_WORK = 24, 106
"""A look's arithmetic for each row, and a swap's, in the unit of `_WORK`, as measured."""
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


class SwapWork:
    """What looking for swaps may take in a decision that divides so many rows at a time, one after the other.

    Each division has a share by its own size. What it leaves, those after it have.
    """

    def __init__(self, divisions: Sequence[int], experts: int) -> None:
        self._left = _WORK / max(1, experts)
        self._to_come = sum(map(self.of_a_look, divisions))

    @staticmethod
    def of_a_look(rows: int) -> int:
        return rows * (rows + _ROW_WORK) + _SWAP_WORK * min(_SWAPS_A_LOOK, rows // 2)

    def looks(self, rows: int) -> int:
        """How often the next division, of so many rows, may look at all pairs; it may be never."""
        looks = self._left // max(1, self._to_come)
        self._to_come -= self.of_a_look(rows)
        return int(min(_MOST_LOOKS, looks))

    def looked(self, rows: int) -> None:
        self._left -= self.of_a_look(rows)


def swapped(paths: Scores, first: Mask) -> Mask:
    """The same two groups after swaps of one row for another, each of which lowers the expected union of both. Ours.

    The number of swaps is bounded, by the size of ``paths[R, N]`` alone.
    """
    return _swapped(_not_picked(paths), first, SwapWork([len(paths)], paths.shape[1]))


def _not_picked(paths: Scores) -> Scores:
    """``[R, N]``: the chance that a row does not pick each expert."""
    return 1 - np.minimum(paths, _SURE)


def _swapped(without: Scores, first: Mask, work: SwapWork) -> Mask:
    """See ``swapped``. ``without``: of the divided rows, what ``_not_picked`` has of them."""
    rows = len(without)
    one, other = np.flatnonzero(first), np.flatnonzero(~first)
    if not len(one) or not len(other):
        return first
    looks = work.looks(rows)
    if not looks:
        return first
    swaps = _Swaps(without, one, other)
    for _ in range(looks):
        work.looked(rows)
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
    rows = np.arange(len(paths))
    if max(sizes) <= 1:  # in whichever way, they are the same groups
        return np.split(rows, np.cumsum(sizes)[:-1])
    swaps = None if literal else (_not_picked(paths), SwapWork(_divisions(sizes), paths.shape[1]))
    return _divided(similarity(paths), rows, sizes, swaps, seed)


def _halves(sizes: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    half = len(sizes) // 2
    return sizes[:half], sizes[half:]


def _divisions(sizes: Sequence[int]) -> list[int]:
    """The rows of each division that makes groups of these sizes."""
    if max(sizes) <= 1 or len(sizes) == 1:
        return []
    return [sum(sizes), *(rows for part in _halves(sizes) for rows in _divisions(part))]


def _divided(
    alike: NDArray[np.float32], rows: Ids, sizes: Sequence[int], swaps: tuple[Scores, SwapWork] | None, seed: int
) -> list[Ids]:
    """Groups of ``rows``. ``alike`` and what ``swaps`` has are of all rows. ``swaps`` None: medoids alone."""
    if len(sizes) == 1:
        return [rows]
    if max(sizes) <= 1:
        return np.split(rows, np.cumsum(sizes)[:-1])
    one, other = _halves(sizes)
    first = balanced_medoids(alike[np.ix_(rows, rows)], sum(one), seed=seed, unlike=swaps is not None)
    if swaps is not None:
        without, work = swaps
        first = _swapped(without if len(rows) == len(without) else without[rows], first, work)
    parts = (rows[first], one), (rows[~first], other)
    return [group for part, some in parts for group in _divided(alike, part, some, swaps, seed)]


class _Swaps:
    """Two groups of rows, and what swapping a row of one for a row of the other would save.

    ``rows``: of each group. With u = Π(1 − p) over a group, the experts that it is expected not to need sum up to Σ u.
    A row that leaves divides u by its own 1 − p, one that joins multiplies it. So a product of two matrices has what
    each of all pairs would leave: (u ÷ (1 − p_i)) · (1 − p_j).
    """

    def __init__(self, without: Scores, one: Ids, other: Ids) -> None:
        self._without = without
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
