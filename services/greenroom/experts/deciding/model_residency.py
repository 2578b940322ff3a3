"""Which whole models are in a memory, and what the memory's policy hears.

The base of the memory that holds bytes and of its twin in simulations. So the two can not decide differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from greenroom.experts.bookkeeping.byte_arena import ByteArena, Move
from greenroom.experts.bookkeeping.free_bytes import FreeBytes
from greenroom.experts.bookkeeping.ledger import LedgerError
from greenroom.experts.deciding.model_room import ModelRoom, Present
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
)
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.placement.placement_policy import PendingRequest


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
        self._room = ModelRoom(policy, places, self._pieces)
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
        found = self._room.find(expert, Present(self._there, self._held, self._waited_for), whoever=whoever)
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
            self.policy.on_transfer_done(Transfer(expert, Tier.DISK, Tier.DEVICE, Reason.TARGET))

    def _arrives(self, expert: int) -> None:
        if expert not in self._coming:
            raise LedgerError(f"expert {expert} was not on its way")
        self._coming.remove(expert)
        self._there[expert] = True

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
