"""The tokens of a sequence, and what its rows have picked, as far back as they say something."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_forms.tables import LAST
from greenroom.policies.base.array_types import Ids, Mask

Picked = NDArray[np.integer]

MOST: Final = 1024
"""So many tokens before those that are asked for are remembered."""
_GAP: Final = 64
"""Of at most so many tokens that were never told, the place is kept; beyond it nothing before them counts."""
_FADED: Final = 512
"""Tokens that far back say nothing any more."""


class TokenHistory:
    """Of one sequence: its tokens from position ``start`` on, and of those of them that have run their picks.

    ``folded``: the position up to which the averages over tokens, kept elsewhere, have been taken.
    """

    def __init__(self, slot: int, picks: int, none: int) -> None:
        """``slot``: where its averages are. ``picks``: of a row, in all layers; ``none``: what is no pick."""
        self.slot = slot
        self.start = self.folded = 0
        self._count = 0
        self._none, self._picks = none, picks
        self._ids: Ids = np.empty(0, dtype=np.int64)
        self._keys: Picked = np.empty((0, picks), dtype=np.uint16 if none < 2**16 else np.uint32)
        self._told: Mask = np.empty(0, dtype=np.bool_)
        self.has_picks = False

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self._count

    def ask(self, position: int) -> tuple[Ids, bool]:
        """What is at ``position`` and after it is forgotten: it comes now, maybe once more.

        Returns the tokens that the averages are to take, and whether they are to begin anew with them.
        """
        if position < self.start or position > self.end + _GAP:
            self.start = self.folded = position
            self._count = 0
            return np.empty(0, dtype=np.int64), True
        if position > self.end:
            self._append(np.full(position - self.end, -1, dtype=np.int64))
        self._count = position - self.start
        anew = position < self.folded
        first = max(self.start, position - _FADED) if anew else self.folded
        self.folded = position
        return self._ids[first - self.start : self._count].copy(), anew

    def add(self, ids: Ids) -> None:
        """The tokens that are asked for, after ``ask``."""
        if self._count + len(ids) > 2 * MOST and self._count > MOST:
            kept = slice(self._count - MOST, self._count)
            self._ids, self._keys, self._told = self._ids[kept].copy(), self._keys[kept].copy(), self._told[kept].copy()
            self.start, self._count = self.start + kept.start, MOST
        self._append(ids)

    def picked(self, positions: Ids, keys: Picked) -> None:
        """``keys[T, picks]`` of these rows. Those of rows that are not remembered are left out."""
        places = positions - self.start
        known = (places >= 0) & (places < self._count)
        if known.any():
            self._keys[places[known]] = keys[known]
            self._told[places[known]] = True
            self.has_picks = True

    def before(self, count: int) -> Ids:
        """``[count, 3]``: of each of the last ``count`` rows its token and the two before it, -1: none."""
        own = np.concatenate((np.full(2, -1, dtype=np.int64), self._ids[max(0, self._count - count - 2) : self._count]))
        own = own[-count - 2 :]
        return np.stack([own[2:], own[1:-1], own[:-2]], axis=1)

    def same(self, count: int) -> Ids:
        """``[LAST + 1, count]``: as ``OWN_PICKS``, for the last ``count`` rows: a place for ``keys_of``, -1: none."""
        found = np.full((LAST + 1, count), -1, dtype=np.int64)
        if not self.has_picks:
            return found
        ids, told = self._ids[: self._count], self._told[: self._count]
        for row, place in enumerate(range(self._count - count, self._count)):
            token = ids[place]
            if token < 0:
                continue
            earlier = np.flatnonzero((ids[:place] == token) & told[:place])
            if not len(earlier):
                continue
            last = earlier[: -LAST - 1 : -1]
            found[: len(last), row] = last
            if place and ids[place - 1] >= 0:
                after = earlier[earlier > 0]
                pairs = after[ids[after - 1] == ids[place - 1]]
                if len(pairs):
                    found[LAST, row] = pairs[-1]
        return found

    def keys_of(self, places: Ids) -> Picked:
        """``[len(places), picks]``: keys, with what is no pick as the number of experts."""
        return self._keys[places]

    def _append(self, ids: Ids) -> None:
        needed = self._count + len(ids)
        if needed > len(self._ids):
            room = max(needed, min(2 * len(self._ids), 2 * MOST), 64)
            more = room - len(self._ids)
            self._ids = np.concatenate((self._ids, np.full(more, -1, dtype=np.int64)))
            self._told = np.concatenate((self._told, np.zeros(more, dtype=np.bool_)))
            self._keys = np.concatenate((self._keys, np.full((more, self._picks), self._none, self._keys.dtype)))
        self._ids[self._count : needed] = ids
        self._told[self._count : needed] = False
        self._count = needed
