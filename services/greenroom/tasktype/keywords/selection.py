"""Which phrases become keywords: chosen one after the other for the extractor's own rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.tasktype.keywords.candidates import Candidates, Ints

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_TRIED_AT_ONCE = 60
_SHARED_AT_MOST = 0.2


@dataclass(frozen=True, slots=True)
class Move:
    """A keyword that is listed for a type, or no longer."""

    candidate: int
    type: int
    listed: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Matched:
    """The prompts as the extractor would find them.

    ``longest[place]``: the longest keyword that begins there, -1 for none; ``taken``: the places where one was taken;
    ``share[prompt, type]``: how likely each type is by the counts.
    """

    longest: Ints
    taken: Ints
    share: Floats
    loss: float


class Selection:
    """Lists and drops keywords for as long as the prompts of the training part are told apart better.

    What is made smaller is Σ weight · −log share[label], where the shares of a prompt are the softmax of its counts: a
    smooth stand-in for "the most matches wins". Each keyword must earn ``price`` of it, so that rare chances do not
    become keywords; dropping one, half of that. Which are worth trying follows from the first two derivatives, for all
    candidates at once; what is kept was counted by the extractor's own rule: the longest at each word, left to right.
    """

    def __init__(
        self, candidates: Candidates, labels: Ints, types: int, *, weights: Floats, price: float, listed: Flags
    ) -> None:
        self._candidates = candidates
        self._labels = labels
        self._weights = weights
        self._price = price
        self._right = np.eye(types)[labels]
        self._refused = np.zeros_like(listed)
        by_length = np.argsort(candidates.length[candidates.of], kind="stable")
        self._of, self._at = candidates.of[by_length], candidates.at[by_length]
        self._prompt = candidates.prompt_at[candidates.at]
        self.listed = listed.copy()
        self._start = listed.copy()
        self.moves: list[Move] = []
        self._now = self._matched(self.listed)

    def run(self, most: int) -> None:
        """Makes up to ``most`` moves; fewer where no more are worth it."""
        while len(self.moves) < most:
            tried = self._worth_trying()[: most - len(self.moves)]
            if not tried:
                return
            if not self._make(tried):
                for move in tried:
                    if not self._make([move]):
                        self._refused[move.candidate, move.type] = True

    def listed_after(self, moves: int) -> Flags:
        """What was listed after the first so many moves."""
        listed = self._start.copy()
        for move in self.moves[:moves]:
            listed[move.candidate, move.type] = move.listed
        return listed

    @property
    def shares(self) -> Floats:
        """[prompts, types]: the softmax of what is counted now."""
        return self._now.share

    def _make(self, moves: list[Move]) -> bool:
        """Makes the moves if they are worth their price together."""
        listed = self.listed.copy()
        for move in moves:
            listed[move.candidate, move.type] = move.listed
        matched = self._matched(listed)
        if matched.loss > self._now.loss - sum(self._price if move.listed else self._price / 2 for move in moves) / 2:
            return False
        self.listed, self._now = listed, matched
        self.moves += moves
        return True

    def _worth_trying(self) -> list[Move]:
        """The best few; of different words, and for a type of different prompts, so that they add up."""
        if not self._candidates.phrases:
            return []
        gains = self._gains()
        best = np.argpartition(gains, -min(_TRIED_AT_ONCE, gains.size), axis=None)[-_TRIED_AT_ONCE:]
        best = best[np.argsort(-gains.ravel()[best], kind="stable")]
        moves: list[Move] = []
        used: set[str] = set()
        moved = np.zeros((gains.shape[1], self._candidates.prompts), dtype=np.bool_)
        for number in best.tolist():
            candidate, kind = divmod(number, gains.shape[1])
            if gains[candidate, kind] < self._price:
                break
            phrase = self._candidates.phrases[candidate]
            prompts = self._prompt[self._candidates.first[candidate] : self._candidates.first[candidate + 1]]
            if used.isdisjoint(phrase) and moved[kind, prompts].mean() < _SHARED_AT_MOST:
                used.update(phrase)
                moved[kind, prompts] = True
                moves.append(Move(candidate, kind, not self.listed[candidate, kind]))
        return moves

    def _gains(self) -> Floats:
        """[candidates, types]: by how much listing it would lower the loss, about; of what is listed, dropping it,
        and what dropping costs less."""
        one, now = self._candidates, self._now
        length = one.length[one.of]
        inside = np.zeros(one.places + 1, dtype=np.int64)
        inside[now.taken + 1] += 1
        inside[now.taken + one.length[now.longest[now.taken]]] -= 1
        covered = np.cumsum(inside)[:-1] > 0
        longest = np.where(now.longest >= 0, one.length[now.longest], 0)[one.at]
        free = np.flatnonzero(~covered[one.at] & (longest <= length))
        of, at, prompt, length = one.of[free], one.at[free], self._prompt[free], length[free]
        missing = (self._right - now.share) * self._weights[:, None]
        spread = now.share * (1 - now.share) * self._weights[:, None]
        # A keyword takes the place of shorter ones that begin within it.
        counted = np.zeros(one.places + 1)
        kept = now.taken
        counted[kept + 1] = (missing[one.prompt_at[kept]] * self.listed[now.longest[kept]]).sum(axis=1)
        before = np.cumsum(counted)
        lost = np.where(longest[free] < length, before[at + length] - before[at], 0.0)
        gains = _sums(of, (missing - spread / 2)[prompt], len(one.phrases))
        gains -= np.bincount(of, weights=lost, minlength=len(one.phrases))[:, None]
        drops = _sums(now.longest[kept], -(missing + spread / 2)[one.prompt_at[kept]], len(one.phrases))
        gains = np.where(self.listed, drops + self._price / 2, gains)
        gains[self._refused] = -np.inf
        return gains

    def _matched(self, listed: Flags) -> _Matched:
        one = self._candidates
        of_keywords = np.any(listed, axis=1, keepdims=True)[self._of, 0]
        longest = np.full(one.places, -1, dtype=np.int64)
        longest[self._at[of_keywords]] = self._of[of_keywords]  # the longer ones come last, and stay
        starts = np.flatnonzero(longest >= 0)
        taken = []
        free = 0
        for place, length in zip(starts.tolist(), one.length[longest[starts]].tolist(), strict=True):
            if place >= free:
                taken.append(place)
                free = place + length
        places = np.array(taken, dtype=np.int64)
        counts = _sums(one.prompt_at[places], listed[longest[places]].astype(np.float64), one.prompts)
        share = np.exp(counts - counts.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        loss = -float(self._weights @ np.log(share[np.arange(len(share)), self._labels]))
        return _Matched(longest, places, share, loss)


def _sums(groups: Ints, values: Floats, number: int) -> Floats:
    """[number, columns]: the sum of the rows of each group."""
    columns = [np.bincount(groups, weights=column, minlength=number) for column in values.T]
    return np.stack(columns, axis=1).astype(np.float64)  # of no rows it would be whole numbers
