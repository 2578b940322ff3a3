"""A layer's experts from its router's picks to its end: pinned, fetched, handed out as they land, released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple

import numpy as np

from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.deciding.evictor import Room
from greenroom.experts.deciding.on_demand import DemandFetcher
from greenroom.experts.deciding.prefetcher import AheadFetcher
from greenroom.experts.source import Arriving, ExpertWeights
from greenroom.policies.base.events import LayerRouting
from greenroom.policies.base.expert_policy import ExpertPolicy


class Stage(NamedTuple):
    """What every layer of an engine runs on."""

    policy: ExpertPolicy
    tiers: Tiers
    room: Room
    demand: DemandFetcher
    ahead: AheadFetcher
    counters: Counters


class RunningLayer(AbstractContextManager[Arriving]):
    """See ExpertSource.routed. On entering, what is missing is begun to be fetched and what the policy wants next is
    queued behind it; the iterator hands out what is here, then what lands, or keeps the policy's order where it has
    one.
    """

    __slots__ = ("_first", "_pending", "_routing", "_stage")

    def __init__(self, stage: Stage, routing: LayerRouting, first: int) -> None:
        self._stage = stage
        self._routing = routing
        self._first = first
        self._pending: dict[int, None] = {}  # pinned for this layer

    def __enter__(self) -> Arriving:
        stage, routing = self._stage, self._routing
        experts, device = routing.experts, stage.tiers.device
        stage.demand.deliver()
        all_here = self._count()
        stage.demand.forget_failures()
        device.pin(experts)
        keys = experts.tolist()
        self._pending = dict.fromkeys(keys)
        try:
            stage.policy.on_layer_routed(routing)
            order = self._compute_order()
            if order is not None:
                keys = order
            if all_here:
                stage.ahead.pump()
                return self._of_residents(keys)
            stage.ahead.reorder()
            starved = stage.demand.begin(keys, experts)
            stage.ahead.pump()
            return self._landing(dict.fromkeys(keys), starved, in_order=order is not None)
        except BaseException:
            self._release_pending()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stage = self._stage
        if self._pending:
            if kind is None:
                self._have_run(list(self._pending))
            else:
                self._release_pending()
        if kind is not None:
            return
        if "on_layer_done" in stage.policy.hooks:
            stage.policy.on_layer_done(self._routing.step, self._routing.layer)
        stage.ahead.pump(freed=True)

    def _count(self) -> bool:
        """Whether all are resident."""
        experts, counters, unused = self._routing.experts, self._stage.counters, self._stage.room.unused
        hits = int(np.count_nonzero(self._stage.tiers.device.resident[experts]))
        counters.lookups += len(experts)
        counters.hits += hits
        if counters.prefetches:
            ahead = int(np.count_nonzero(unused[experts]))
            if ahead:
                counters.prefetches_used += ahead
                unused[experts] = False
        return hits == len(experts)

    def _of_residents(self, keys: list[int]) -> Arriving:
        """Everyone is here: nobody's slot is waited for, so all are released together at the end."""
        first, tiers = self._first, self._stage.tiers
        here = zip([key - first for key in keys], tiers.weights(keys, self._routing.layer), strict=True)
        return list(here) if tiers.in_ram else here  # a device may still be filling the last one

    def _landing(self, todo: dict[int, None], starved: bool, *, in_order: bool) -> Iterator[tuple[int, ExpertWeights]]:
        """Everyone of ``todo`` once it is here. Who has run loses its pin: at once where others wait for its slot, else
        with the next ones that have run.
        """
        stage, layer, running = self._stage, self._routing.layer, self._routing.experts
        while todo:
            ready = self._ready(todo, in_order=in_order)
            if not ready and starved and not stage.tiers.moving:
                ready = self._ready(todo, in_order=False)  # those before them can not come until these have run
            if not ready:
                stage.demand.wait_for(todo)
                starved = stage.demand.begin(list(todo), running)
                continue
            run: list[int] = []
            for key, weights in zip(ready, stage.tiers.weights(ready, layer), strict=True):
                yield key - self._first, weights
                del todo[key]
                run.append(key)
                if starved:
                    self._have_run(run)
                    run = []
                    stage.demand.deliver()
                    starved = stage.demand.begin(list(todo), running)
            if run:
                self._have_run(run)
            stage.demand.deliver()

    def _compute_order(self) -> list[int] | None:
        if "compute_order" not in self._stage.policy.hooks:
            return None
        order = self._stage.policy.compute_order(self._routing, self._stage.tiers.device.resident)
        return None if order is None else order.tolist()

    def _ready(self, todo: dict[int, None], *, in_order: bool) -> list[int]:
        """Who can run now: everyone who is computable, or where an order is kept those before the first who is not."""
        keys = list(todo)
        here = self._stage.tiers.computable(keys)
        if in_order and False in here:
            return keys[: here.index(False)]
        return [key for key, there in zip(keys, here, strict=True) if there]

    def _have_run(self, keys: list[int]) -> None:
        run = np.array(keys, dtype=np.int64)
        for key in keys:
            del self._pending[key]
        self._stage.tiers.release(run)
        if "on_experts_done" in self._stage.policy.hooks:
            self._stage.policy.on_experts_done(self._routing.step, self._routing.layer, run)

    def _release_pending(self) -> None:
        self._stage.tiers.release(np.fromiter(self._pending, dtype=np.int64))
        self._pending.clear()
