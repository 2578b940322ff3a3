"""Which whole models are in a memory, and what the memory's policy hears.

The base of the memory that holds bytes and of its twin in simulations. So the two can not decide differently.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from greenroom.experts.bookkeeping.byte_arena import ByteArena, Move
from greenroom.experts.bookkeeping.free_bytes import FreeBytes
from greenroom.experts.bookkeeping.ledger import LedgerError
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import (
    LayerRouting,
    Phase,
    Reason,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.placement.placement_policy import PendingRequest

_AHEAD: Final = 3
"""So many of the largest experts beyond what is needed count as leaving next."""
_TRIALS: Final = 8
"""Choices of who leaves that are tried before something is moved."""
_MORE: Final = 1
"""So many experts more may leave rather than that much is moved."""


@dataclass(slots=True)
class ModelCounters:
    """What a memory of whole models has done. The first fill is not counted.

    ``uses``: batches that an expert was held for. ``hits``: of these, those that it was not loaded for. ``loads``:
    experts that have come. ``failed_loads``: that have not. ``bytes_moved``: within the memory, to make room.
    """

    uses: int = 0
    hits: int = 0
    loads: int = 0
    bytes_loaded: int = 0
    failed_loads: int = 0
    evictions: int = 0
    bytes_moved: int = 0


class ModelResidency(ABC):
    """The bookkeeping of one memory: an ``ExpertMemory`` but for the bytes. Used by one thread.

    An expert is absent, on its way or there. While it is held it neither leaves nor moves; while it is on its way it
    does neither too. The policy hears of requests that wait (sequences), of batches (a step of one layer that is routed
    to one expert), and of what comes and leaves.
    """

    def __init__(
        self, policy: ExpertPolicy, places: ByteArena | FreeBytes, pieces: Sequence[Sequence[int]] | None = None
    ) -> None:
        """``pieces``: by expert, the bytes of the pieces that its record is cut into (None: it lies whole)."""
        self.policy = policy
        self.nbytes = places.nbytes
        self.counters = ModelCounters()
        self._bytes_of: list[int] = policy.catalogue.bytes_of.tolist()
        self._pieces: Sequence[Sequence[int]] = pieces or [(size,) for size in self._bytes_of]
        self._places = places
        self._there: Mask = np.zeros(policy.catalogue.size, dtype=np.bool_)
        self._coming: set[int] = set()
        self._held: Counter[int] = Counter()
        self._loaded: set[int] = set()  # and not used since
        self._waiting: dict[tuple[str, int], SequenceInfo] = {}  # by request and stage
        self._waited_for: Counter[int] = Counter()
        self._sequences = 0
        self._steps = 0
        policy.on_budget_changed(Tier.DEVICE, self.nbytes)

    # -- what dispatchers ask (coe/dispatch/base.py) ----------------------------------------------------------------

    @property
    def residents(self) -> Keys:
        return np.flatnonzero(self._there)

    @property
    def loading(self) -> int:
        return len(self._coming)

    def has(self, expert: int) -> bool:
        return bool(self._there[expert])

    def waits(self, request: PendingRequest) -> None:
        """Raises LedgerError if this stage of it waits already."""
        assert request.expert is not None
        key = request.request_id, request.stage
        if key in self._waiting:
            raise LedgerError(f"stage {request.stage} of {request.request_id} waits already")
        sequence = SequenceInfo(self._sequences, request.task, expert=request.expert)
        self._sequences += 1
        self._waiting[key] = sequence
        self._waited_for[request.expert] += 1
        self.policy.on_sequence_queued(sequence)

    def forget(self, request: PendingRequest, end: SequenceEnd) -> None:
        """It waits no more and is not computed. Raises LedgerError if it does not wait."""
        self.policy.on_sequence_ended(self._no_longer_waits(request).sequence, end)

    def hold(self, expert: int, requests: Sequence[PendingRequest]) -> None:
        """Raises LedgerError if it is not there, or if a request does not wait for it."""
        if not self._there[expert]:
            raise LedgerError(f"expert {expert} is held and not there")
        if any(request.expert != expert for request in requests):
            raise LedgerError(f"requests of other experts are to be computed by expert {expert}")
        started = [self._no_longer_waits(request) for request in requests]
        self._held[expert] += 1
        self.counters.uses += 1
        self.counters.hits += expert not in self._loaded
        self._loaded.discard(expert)
        self._tell_of_batch(expert, started)

    def release(self, expert: int) -> None:
        """Raises LedgerError if it is not held."""
        if not self._held[expert]:
            raise LedgerError(f"expert {expert} is released and not held")
        self._held[expert] -= 1
        if not self._held[expert]:
            del self._held[expert]

    def fetch(self, expert: int, *, whoever: bool = True) -> bool:
        if self._there[expert] or expert in self._coming:
            return True
        found = self._find_room(expert, whoever=whoever)
        if found is None:
            return False
        victims, moves = found
        if victims:
            self._there[victims] = False
            self._loaded.difference_update(victims)
            self.counters.evictions += len(victims)
            self.policy.on_evicted(Tier.DEVICE, np.array(victims, dtype=np.int64))
        self.counters.bytes_moved += sum(move.nbytes for move in moves)
        self._coming.add(expert)
        self._begin(expert, victims, moves)
        return True

    # -- what the link tells ------------------------------------------------------------------------------------------

    def landed(self, expert: int) -> None:
        """What was begun has come."""
        self._arrives(expert)
        self._loaded.add(expert)
        self.counters.loads += 1
        self.counters.bytes_loaded += self._bytes_of[expert]
        self.policy.on_transfer_done(Transfer(expert, Tier.DISK, Tier.DEVICE, Reason.ON_DEMAND))

    def failed(self, expert: int, why: str, reason: Reason = Reason.ON_DEMAND) -> None:
        """What was begun will not come. Its room is free again."""
        if expert not in self._coming:
            raise LedgerError(f"expert {expert} was not on its way")
        self._coming.remove(expert)
        self._places.give_back(expert)
        self.counters.failed_loads += 1
        self.policy.on_transfer_failed(Transfer(expert, Tier.DISK, Tier.DEVICE, reason, why))

    def audit(self) -> None:
        """Raises LedgerError where an invariant does not hold."""
        self._places.audit()
        there = set(self.residents.tolist())
        if there & self._coming or set(self._places.owners) != there | self._coming:
            raise LedgerError("places and the experts that are there or on their way disagree")
        if sum(self._bytes_of[key] for key in there | self._coming) != self.nbytes - self._places.free:
            raise LedgerError("the experts' bytes and what is taken disagree")
        if not self._held.keys() <= there or min(self._held.values(), default=1) < 1:
            raise LedgerError("an expert is held and not there")
        if Counter(sequence.expert for sequence in self._waiting.values()) != self._waited_for:
            raise LedgerError("the requests that wait are counted wrongly")

    # -- for subclasses -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, expert: int, left: Sequence[int], moves: Sequence[Move]) -> None:
        """Carry out the moves, then begin to bring the expert to its places. ``landed`` or ``failed`` follows.

        ``left``: those that have just left, whose bytes are anyone's.
        """

    def _place_first(self, experts: Iterable[int]) -> list[int]:
        """Before anything runs: give these room in this order, as far as they fit, without moving anything.

        Returns those that are on their way now.
        """
        if self._there.any() or self._coming:
            raise LedgerError("a memory is filled while it is empty")
        placed = []
        for expert in dict.fromkeys(experts):
            if self._places.take(expert, self._pieces[expert]) is not None:
                self._coming.add(expert)
                placed.append(expert)
        return placed

    def _filled(self, experts: Sequence[int]) -> None:
        """These have come, the most wanted first. The policy hears of that one last: so it is the most recent."""
        for expert in reversed(experts):
            self._arrives(expert)
            self.policy.on_transfer_done(Transfer(expert, Tier.DISK, Tier.DEVICE, Reason.FILL))

    def _arrives(self, expert: int) -> None:
        if expert not in self._coming:
            raise LedgerError(f"expert {expert} was not on its way")
        self._coming.remove(expert)
        self._there[expert] = True

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _find_room(self, expert: int, *, whoever: bool) -> tuple[list[int], list[Move]] | None:
        """Take places for it. Returns who leaves and what moves for it. None: there is no room, and nothing changed.

        Of those that leave next, it is some whose places hold the expert as they lie, if there are any. Where enough is
        free and of no use (what is held lies in between), one expert more leaves at a time. So it does rather than
        that more is moved than is loaded, since it may not be needed again.
        """
        return self._make_room(expert, self._bytes_of[expert], whoever=whoever) or self._make_room(
            expert, None, whoever=whoever
        )

    def _make_room(self, expert: int, most_moved: int | None, *, whoever: bool) -> tuple[list[int], list[Move]] | None:
        """The same, with moves of at most so many bytes. Then ``_MORE`` leave at most that need not."""
        resident = self._there.copy()
        evictable = resident.copy()
        evictable[list(self._held)] = False
        movable = set(np.flatnonzero(evictable).tolist())
        if not whoever:
            evictable[list(self._waited_for)] = False
        needed = self._bytes_of[expert] - self._places.free
        victims: list[int] = []
        bring_back, more, whoever_may = None, 0, evictable
        while True:
            if needed > 0:
                request = VictimRequest(
                    Tier.DEVICE, needed, evictable, resident, Reason.ON_DEMAND, np.array([expert], dtype=np.int64)
                )
                leaving = self.policy.victims(request).tolist()
                if more and not leaving:
                    leaving = self.policy.victims(replace(request, evictable=whoever_may)).tolist()
                if not leaving:
                    break
                if most_moved is not None and not victims and not more:
                    instead = self._leaving_in_place(expert, leaving, request)
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
                evictable[list(self._waited_for)] = False  # nobody whom requests wait for, if there are others
            elif not self._fits_without(expert, np.flatnonzero(evictable).tolist(), movable):
                break
            needed = 1
        if bring_back is not None:
            bring_back()
        return None

    def _leaving_in_place(self, expert: int, first: list[int], request: VictimRequest) -> list[int] | None:
        """Take places for it without a move, by letting ``first`` leave, or others of those that come next.

        Moves cost as much as the memory's speed says, and an expert that leaves a few turns early costs no loads that
        are seen (docs/decisions/0031). None: nobody's places hold it, and nothing has changed.
        """
        for leaving in itertools.islice(self._next_to_leave(first, request), _TRIALS):
            bring_back = self._places.as_it_is()
            for victim in leaving:
                self._places.give_back(victim)
            if self._places.take(expert, self._pieces[expert]) is not None:
                return leaving
            bring_back()
        return None

    def _next_to_leave(self, first: list[int], request: VictimRequest) -> Iterator[list[int]]:
        """The policy's choice, then each other expert, then each two, that free enough of those that leave next.

        Nobody that requests wait for is among the others.
        """
        yield first
        most = int(np.sum(self.policy.catalogue.bytes_of[request.evictable]))
        more = min(request.bytes_needed + _AHEAD * max(self._bytes_of), most)
        order = self.policy.victims(replace(request, bytes_needed=more)).tolist()
        able = [one for one in order if one not in self._waited_for]
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

    # -- telling the policy -------------------------------------------------------------------------------------------

    def _no_longer_waits(self, request: PendingRequest) -> SequenceInfo:
        sequence = self._waiting.pop((request.request_id, request.stage), None)
        if sequence is None or sequence.expert is None:
            raise LedgerError(f"stage {request.stage} of {request.request_id} does not wait")
        self._waited_for[sequence.expert] -= 1
        if not self._waited_for[sequence.expert]:
            del self._waited_for[sequence.expert]
        return sequence

    def _tell_of_batch(self, expert: int, sequences: Sequence[SequenceInfo]) -> None:
        policy, catalogue = self.policy, self.policy.catalogue
        for sequence in sequences:
            policy.on_sequence_started(sequence)
        self._steps += 1
        rows = np.array([sequence.sequence for sequence in sequences], dtype=np.int64)
        step = Step(catalogue.pool, self._steps, rows, np.full(len(rows), Phase.DECODE, dtype=np.uint8))
        policy.on_step_started(step)
        picks = np.full((len(rows), 1), expert, dtype=np.int64)
        policy.on_layer_routed(LayerRouting.from_picks(catalogue, step, 0, picks))
        for sequence in sequences:
            policy.on_sequence_ended(sequence.sequence, SequenceEnd.FINISHED)
