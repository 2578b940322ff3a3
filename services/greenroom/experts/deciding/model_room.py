"""Room for a whole model that is to come: who leaves for it, and what moves."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from greenroom.experts.bookkeeping.byte_arena import ByteArena, Move
from greenroom.experts.bookkeeping.free_bytes import FreeBytes
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import Reason, Tier, VictimRequest
from greenroom.policies.base.expert_policy import ExpertPolicy

_AHEAD: Final = 3
"""So many of the largest experts beyond what is needed count as leaving next."""
_TRIALS: Final = 8
"""Choices of who leaves that are tried before something is moved."""
_MORE: Final = 1
"""So many experts more may leave rather than that much is moved."""


@dataclass(frozen=True, slots=True)
class Present:
    """What the memory holds: ``there[N]``, of these those that are ``held`` now, and those that requests wait for."""

    there: Mask
    held: Collection[int]
    waited_for: Collection[int]


class ModelRoom:
    """The policy says who leaves, ``places`` what fits where. What is held neither leaves nor moves."""

    def __init__(self, policy: ExpertPolicy, places: ByteArena | FreeBytes, pieces: Sequence[Sequence[int]]) -> None:
        """``pieces``: by expert, the bytes of the pieces that its record is cut into."""
        self._policy = policy
        self._places = places
        self._pieces = pieces
        self._bytes_of: list[int] = policy.catalogue.bytes_of.tolist()

    def find(self, expert: int, present: Present, *, whoever: bool) -> tuple[list[int], list[Move]] | None:
        """Take places for it. Returns who leaves and what moves for it. None: there is no room, and nothing changed.

        Of those that leave next, it is some whose places hold the expert as they lie, if there are any. Where enough is
        free and of no use (what is held lies in between), one expert more leaves at a time. So it does rather than
        that more is moved than is loaded, since it may not be needed again.
        """
        return self._make(expert, present, self._bytes_of[expert], whoever=whoever) or self._make(
            expert, present, None, whoever=whoever
        )

    def _make(
        self, expert: int, present: Present, most_moved: int | None, *, whoever: bool
    ) -> tuple[list[int], list[Move]] | None:
        """The same, with moves of at most so many bytes. Then ``_MORE`` leave at most that need not."""
        resident = present.there.copy()
        evictable = resident.copy()
        evictable[list(present.held)] = False
        movable = set(np.flatnonzero(evictable).tolist())
        if not whoever:
            evictable[list(present.waited_for)] = False
        needed = self._bytes_of[expert] - self._places.free
        victims: list[int] = []
        bring_back, more, whoever_may = None, 0, evictable
        while True:
            if needed > 0:
                request = VictimRequest(
                    Tier.DEVICE, needed, evictable, resident, Reason.ON_DEMAND, np.array([expert], dtype=np.int64)
                )
                leaving = self._policy.victims(request).tolist()
                if more and not leaving:
                    leaving = self._policy.victims(replace(request, evictable=whoever_may)).tolist()
                if not leaving:
                    break
                if most_moved is not None and not victims and not more:
                    instead = self._leaving_in_place(expert, leaving, request, present.waited_for)
                    if instead is not None:
                        return instead, []
                bring_back = bring_back or self._places.as_it_is()
                for victim in leaving:
                    self._places.give_back(victim)
                resident[leaving] = evictable[leaving] = False
                movable.difference_update(leaving)
                victims += leaving
            moves = self._places.take(expert, self._pieces[expert], movable, most_moved)
            if moves is not None:
                return victims, moves
            if most_moved is not None:
                more += 1
                if more > _MORE:
                    break
                whoever_may = evictable.copy()
                evictable[list(present.waited_for)] = False  # nobody whom requests wait for, if there are others
            elif not self._fits_without(expert, np.flatnonzero(evictable).tolist(), movable):
                break
            needed = 1
        if bring_back is not None:
            bring_back()
        return None

    def _leaving_in_place(
        self, expert: int, first: list[int], request: VictimRequest, waited_for: Collection[int]
    ) -> list[int] | None:
        """Take places for it without a move, by letting ``first`` leave, or others of those that come next.

        Moves cost as much as the memory's speed says, and an expert that leaves a few turns early costs no loads that
        are seen (docs/decisions/0031). None: nobody's places hold it, and nothing has changed.
        """
        for leaving in itertools.islice(self._next_to_leave(first, request, waited_for), _TRIALS):
            bring_back = self._places.as_it_is()
            for victim in leaving:
                self._places.give_back(victim)
            if self._places.take(expert, self._pieces[expert]) is not None:
                return leaving
            bring_back()
        return None

    def _next_to_leave(
        self, first: list[int], request: VictimRequest, waited_for: Collection[int]
    ) -> Iterator[list[int]]:
        """The policy's choice, then each other expert, then each two, that free enough of those that leave next.

        Nobody that requests wait for is among the others.
        """
        yield first
        most = int(np.sum(self._policy.catalogue.bytes_of[request.evictable]))
        more = min(request.bytes_needed + _AHEAD * max(self._bytes_of), most)
        order = self._policy.victims(replace(request, bytes_needed=more)).tolist()
        able = [one for one in order if one not in waited_for]
        size = self._bytes_of.__getitem__
        for one in able:
            if size(one) >= request.bytes_needed and [one] != first:
                yield [one]
        small = [one for one in able if size(one) < request.bytes_needed]
        for one, other in itertools.combinations(small, 2):
            if size(one) + size(other) >= request.bytes_needed and [one, other] != first:
                yield [one, other]

    def _fits_without(self, expert: int, leaving: Sequence[int], movable: set[int]) -> bool:
        """Whether there would be room if all of these left. So an expert that finds none costs two trials, not one a
        resident."""
        bring_back = self._places.as_it_is()
        for victim in leaving:
            self._places.give_back(victim)
        fits = self._places.take(expert, self._pieces[expert], movable.difference(leaving)) is not None
        bring_back()
        return fits
