"""Belady's oracle: evicts the expert whose next use is farthest away. No policy on demand can beat this bound.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import NO_KEYS, Counts, Keys, Mask
from greenroom.policies.base.events import LayerRouting, Reason, Transfer, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch
from greenroom.policies.base.victim_selection import lowest
from greenroom.policies.replacement.lru import Recency


def next_uses(accesses: Keys) -> Counts:
    """For each access the position of the next access to the same expert; ``len(accesses)`` where there is none."""
    count = len(accesses)
    order = np.argsort(accesses, kind="stable")
    uses = np.full(count, count, dtype=np.int64)
    same = accesses[order[:-1]] == accesses[order[1:]]
    uses[order[:-1][same]] = order[1:][same]
    return uses


def belady(accesses: Keys, slots: int) -> Mask:
    """Which of the single ``accesses`` hit a cache of ``slots`` equal experts that starts empty: ``[len(accesses)]``.

    A miss brings its expert in. Where there is no room, the resident expert of the farthest next use goes. No other
    choice of victims gives fewer misses. Raises InvalidConfig where there is no slot.
    """
    if slots < 1:
        raise InvalidConfig("slots", slots, "at least 1")
    count = len(accesses)
    following = next_uses(accesses)
    # A unique number for each next use: it identifies the expert, too.
    numbers = np.where(following < count, following, count + np.arange(count))
    owners = np.concatenate([accesses, accesses]).tolist()
    hits = bytearray(count)
    resident = bytearray(int(accesses.max(initial=0)) + 1)
    free = slots
    # Negated, the farthest first. The number of a past use is smaller than every resident's next use, so it never gets
    # to the front. It only takes room, until it is cleared out.
    farthest: list[int] = []
    room = 4 * slots + 1024
    for position, (expert, number) in enumerate(zip(accesses.tolist(), numbers.tolist(), strict=True)):
        if resident[expert]:
            hits[position] = 1
            heapq.heappush(farthest, -number)
        else:
            resident[expert] = 1
            if free:
                free -= 1
                heapq.heappush(farthest, -number)
            else:
                resident[owners[-heapq.heapreplace(farthest, -number)]] = 0
        if len(farthest) > room:
            farthest = [other for other in farthest if -other > position]
            heapq.heapify(farthest)
    return np.frombuffer(hits, dtype=np.bool_)


@dataclass(frozen=True, eq=False)
class Future:
    """The accesses to come, by step and layer.

    Group ``g`` is layer ``g % layers`` of step ``g // layers``. It uses the experts
    ``accesses[starts[g]:starts[g + 1]]``, keys of the pool, in this order.
    """

    accesses: Keys
    starts: Counts

    @classmethod
    def of_groups(cls, groups: Iterable[Keys | Sequence[int]]) -> Future:
        """From each layer's distinct experts, layer after layer and step after step."""
        accesses = array("q")
        starts = array("q", [0])
        for group in groups:
            accesses.extend(group)
            starts.append(len(accesses))
        return cls(np.array(accesses, dtype=np.int64), np.array(starts, dtype=np.int64))

    @classmethod
    def of_picks(cls, catalogue: Catalogue, steps: Iterable[NDArray[np.integer]]) -> Future:
        """From the routers' picks ``[T, layers, k]`` of every step; a layer's distinct picks, ascending.

        An entry at or above the layer's number of experts is no pick.
        """
        first, experts = catalogue.first, catalogue.experts_per_layer
        return cls.of_groups(
            layer_picks[layer_picks < experts[layer]] + first[layer]
            for picks in steps
            for layer, layer_picks in enumerate(map(np.unique, np.moveaxis(picks, 1, 0)))
        )


class Belady(ExpertPolicy):
    """Evicts the expert whose next use in ``future`` is farthest; of those never used again, the least recently used.

    The events have to come as the future says; ``departures`` counts the layers that were routed otherwise. With
    ``ahead`` > 0 it also prefetches what the next ``ahead`` layers need, the nearest first, in place of experts that
    are used later still: no policy has less to wait for. Without a future it is LRU.
    """

    def __init__(self, catalogue: Catalogue, *, future: Future | None = None, ahead: int = 0) -> None:
        """Raises InvalidConfig for negative ``ahead`` or a future of other experts."""
        super().__init__(catalogue)
        if ahead < 0:
            raise InvalidConfig("ahead", ahead, "0 or more layers")
        future = Future.of_groups([]) if future is None else future
        if len(future.accesses) and not 0 <= future.accesses.min() <= future.accesses.max() < catalogue.size:
            raise InvalidConfig("future", "accesses", f"keys from 0 to {catalogue.size - 1}")
        self.departures = 0
        self._future = future
        self._ahead = ahead
        self._group = 0
        self._following = next_uses(future.accesses)
        self._next: Counts = np.full(catalogue.size, len(future.accesses), dtype=np.int64)
        self._next[future.accesses[::-1]] = np.arange(len(future.accesses))[::-1]  # the first use of each
        self._recency = Recency(catalogue.size)
        self._publish()

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._recency.use(routing.experts)
        future, group = self._future, self._group
        if group + 1 >= len(future.starts):
            return
        self._group += 1
        start, stop = future.starts[group : group + 2]
        expected = future.accesses[start:stop]
        self._next[expected] = self._following[start:stop]
        if not np.array_equal(np.sort(expected), np.sort(routing.experts)):
            self.departures += 1
        self._publish()

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._recency.arrived(transfer)

    def victims(self, request: VictimRequest) -> Keys:
        victims = lowest(self.catalogue, request, -self._next, self._recency.last)
        if request.reason is Reason.PREFETCH and len(victims):
            soonest_to_leave, comes = self._next[victims].min(), self._next[request.incoming]
            return victims if (comes <= soonest_to_leave).all() else NO_KEYS
        return victims

    def _publish(self) -> None:
        if not self._ahead:
            return
        starts = self._future.starts
        start = int(starts[self._group])
        stop = int(starts[min(self._group + self._ahead, len(starts) - 1)])
        soon = self._future.accesses[start:stop][::-1]
        priority = np.zeros(self.catalogue.size, dtype=np.float32)
        priority[soon] = np.arange(1, len(soon) + 1)  # of an expert used twice the nearer use stays
        generation = 0 if self.prefetch is None else self.prefetch.generation + 1
        self.prefetch = Prefetch(generation, priority)
