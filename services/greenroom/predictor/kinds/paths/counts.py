"""How often each expert is picked after which tokens: counted, and shrunk towards what fewer tokens say."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_forms.tables import BACKS_OFF_TO, GRAMS, LAST, codes_of
from greenroom.policies.base.array_types import Counts, Mask

Array = NDArray[np.float32]
Rows = NDArray[np.intp]

SHRINK: Final[Mapping[str, float]] = {
    "token": 2.0, "pair": 3.0, "triple": 3.0, "before": 2.0, "pair_before": 3.0, "two_before": 4.0,
}  # fmt: skip
"""What a table backs off to counts as this many tokens."""
NEVER: Final = 1e-4
"""The least chance, since its logarithm is taken."""


def logit(chance: Array) -> Array:
    """log(p / (1 − p)), with p clipped to ``NEVER`` .. 1 − ``NEVER``."""
    clipped = np.clip(chance, np.float32(NEVER), np.float32(1 - NEVER))
    found: Array = np.log(clipped / (1 - clipped))
    return found


def looked_up(codes: Counts, asked: Counts) -> Rows:
    """The place of each of ``asked`` in the ascending ``codes``, -1 where it is not in there."""
    if not len(codes):
        return np.full(len(asked), -1, dtype=np.intp)
    places = np.minimum(np.searchsorted(codes, asked), len(codes) - 1)
    return np.where(codes[places] == asked, places, -1)


def tokens_back(places: Counts, seq_starts: Counts, back: int) -> Counts:
    """``[T]``: the token ``back`` rows before each in its sequence, -1 where there is none."""
    found = np.full(len(places), -1, dtype=np.int64)
    if back < len(places):
        found[back:] = places[: len(places) - back]
    position = np.arange(len(places)) - np.repeat(seq_starts[:-1], np.diff(seq_starts))
    found[position < back] = -1
    return found


def in_sequences(codes: Counts, sequence: Counts) -> Counts:
    """``[T]``: in how many sequences there is a row of the same code. ``sequence``: which one each row is of."""
    distinct, place = np.unique(codes, return_inverse=True)
    many = int(sequence.max(initial=0)) + 1
    pairs = np.unique(place * many + sequence)
    return np.bincount(pairs // many, minlength=len(distinct))[place].astype(np.int64)


class Grouped:
    """The learnt rows by a number that each has: sums over the rows of each group."""

    def __init__(self, rows: Rows, codes: Counts) -> None:
        """``codes``: of ``rows``."""
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        self.codes, self._begin, self.counts = np.unique(ordered, return_index=True, return_counts=True)
        self._rows = rows[order]

    def sums(self, picked: Array) -> Array:
        """``[groups, E]`` of ``picked[T, E]``."""
        if not len(self.codes):
            return np.zeros((0, picked.shape[1]), dtype=np.float32)
        found: Array = np.add.reduceat(picked[self._rows], self._begin, axis=0)
        return found


class GramCounts:
    """One of ``GRAMS`` over a trace. ``codes``: of its rows, ascending, those alone that enough sequences share.
    ``rare``: how many others there are. ``place[T]``: which of them foretells each row of the trace, -1: none.
    """

    def __init__(
        self, name: str, back: Counts, tokens: int, learnt: Mask, sequence: Counts, least_sequences: int = 1
    ) -> None:
        """``back[T, 3]``: the places of each row's token and the two before it, -1 where there is none."""
        self.name = name
        columns = back[:, GRAMS[name]]
        known = (columns >= 0).all(axis=1)
        codes = codes_of(np.maximum(columns, 0), tokens)
        rows = np.flatnonzero(learnt & known)
        shared_by = in_sequences(codes[rows], sequence[rows])
        kept = rows[shared_by >= least_sequences]
        self.rare = len(np.unique(codes[rows[shared_by < least_sequences]]))
        self._all = Grouped(kept, codes[kept])
        self.codes, self.counts = self._all.codes, self._all.counts
        place = np.where(known, looked_up(self.codes, codes), -1)
        many = int(sequence.max(initial=0)) + 1
        of_sequence = place * many + sequence
        self._own = Grouped(kept, of_sequence[kept])
        foretold = place >= 0
        foretold[rows[shared_by <= least_sequences]] = False  # without their own, other sequences are too few
        self.place = np.where(foretold, place, -1)
        self._own_place = np.where(learnt & foretold, looked_up(self._own.codes, of_sequence), -1)
        places = np.zeros((len(self.codes), len(GRAMS[name])), dtype=np.uint32)
        rest = self.codes.copy()
        for column in reversed(range(places.shape[1])):
            rest, places[:, column] = np.divmod(rest, max(tokens, 1))
        self.keys = places

    def sums(self, picked: Array) -> tuple[Array, Array]:
        """Of ``picked[T, E]``: by row of the table, and by row of the table and sequence."""
        return self._all.sums(picked), self._own.sums(picked)

    def chances(self, sums: tuple[Array, Array], prior: Array) -> Array:
        """``[R, E]``: of each row of the table, shrunk towards ``prior[R, E]``."""
        shrink = np.float32(SHRINK[self.name])
        found: Array = sums[0] + shrink * prior
        found /= (self.counts + shrink)[:, None].astype(np.float32)
        return found

    def chances_without(self, rows: Rows, sums: tuple[Array, Array], prior: Array) -> Array:
        """``[rows, E]``: for rows of the trace, by all sequences but the row's own, as a sequence that is not learnt
        from would be foretold.
        """
        shrink = np.float32(SHRINK[self.name])
        found: Array = shrink * prior
        place, own = self.place[rows], self._own_place[rows]
        has = np.flatnonzero(place >= 0)
        found[has] += sums[0][place[has]]
        has = np.flatnonzero(own >= 0)
        found[has] -= sums[1][own[has]]
        found /= (self.counts_without(rows) + shrink)[:, None].astype(np.float32)
        return found

    def counts_without(self, rows: Rows) -> Counts:
        """How many rows of other sequences each of these rows of the trace is foretold by."""
        found = np.zeros(len(rows), dtype=np.int64)
        for grouped, place, sign in ((self._all, self.place[rows], 1), (self._own, self._own_place[rows], -1)):
            has = np.flatnonzero(place >= 0)
            found[has] += sign * grouped.counts[place[has]]
        return found


def backed_off(counts: Mapping[str, GramCounts], name: str, tokens: int) -> Rows:
    """For each row of the table ``name`` that row of the one that it backs off to."""
    parent = BACKS_OFF_TO[name]
    own = counts[name].keys[:, -len(GRAMS[parent]) :]
    return looked_up(counts[parent].codes, codes_of(own, tokens))


def same_before(ids: Counts, seq_starts: Counts) -> Counts:
    """``[LAST + 1, T]``: the last rows of the same sequence with the same token, the newest first, and the last one
    with the same token and the same one before it. -1: none. Tokens below 0 are not told apart.
    """
    found = np.full((LAST + 1, len(ids)), -1, dtype=np.int64)
    listed = ids.tolist()
    for begin, end in pairwise(seq_starts.tolist()):
        rows: dict[int, list[int]] = {}
        pairs: dict[tuple[int, int], int] = {}
        before = -1
        for row in range(begin, end):
            token = listed[row]
            if token >= 0:
                earlier = rows.setdefault(token, [])
                for number, one in enumerate(earlier[: -LAST - 1 : -1]):
                    found[number, row] = one
                earlier.append(row)
                if before >= 0:
                    found[LAST, row] = pairs.get((before, token), -1)
                    pairs[before, token] = row
            before = token
    return found
