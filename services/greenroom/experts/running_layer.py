"""A layer's experts from its router's picks to its end: pinned, fetched, handed out as they land, released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple

import numpy as np

from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.deciding.evictor import Evictor
from greenroom.experts.deciding.on_demand import OnDemandFetcher
from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.source import Arriving
from greenroom.policies.base.events import LayerRouting
from greenroom.policies.base.expert_policy import ExpertPolicy


class LayerContext(NamedTuple):
    """What every layer of an engine runs on."""

    policy: ExpertPolicy
    tiers: Tiers
    evictor: Evictor
    on_demand: OnDemandFetcher
    prefetcher: Prefetcher
    counters: Counters


class RunningLayer(AbstractContextManager[Arriving]):
    """See ExpertSource.routed. On entering, what is missing is begun to be fetched and what the policy wants next is
    queued behind it; the iterator hands out what is here, then what lands, or keeps the policy's order where it has
    one.
    """

    __slots__ = ("_context", "_first", "_pending", "_routing")

    def __init__(self, context: LayerContext, routing: LayerRouting, first: int) -> None:
        self._context = context
        self._routing = routing
        self._first = first
        self._pending: dict[int, None] = {}  # pinned for this layer

    def __enter__(self) -> Arriving:
        context, routing = self._context, self._routing
        experts, device = routing.experts, context.tiers.device
        context.on_demand.deliver()
        all_here = self._count()
        context.on_demand.forget_failures()
        device.pin(experts)
        keys = experts.tolist()
        self._pending = dict.fromkeys(keys)
        try:
            context.policy.on_layer_routed(routing)
            order = self._compute_order()
            if order is not None:
                keys = order
            if all_here:
                context.prefetcher.pump()
                return self._of_residents(keys)
            context.prefetcher.reorder()
            starved = context.on_demand.begin(keys, experts)
            context.prefetcher.pump()
            return self._landing(dict.fromkeys(keys), starved, in_order=order is not None)
        except BaseException:
            self._release_pending()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context = self._context
        if self._pending:
            if kind is None:
                self._have_run(list(self._pending))
            else:
                self._release_pending()
        if kind is not None:
            return
        if "on_layer_done" in context.policy.hooks:
            context.policy.on_layer_done(self._routing.step, self._routing.layer)
        context.prefetcher.pump(freed=True)

    def _count(self) -> bool:
        """Whether all are resident."""
        experts, counters, unused = self._routing.experts, self._context.counters, self._context.evictor.unused
        hits = int(np.count_nonzero(self._context.tiers.device.resident[experts]))
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
        first, tiers = self._first, self._context.tiers
        here = zip([key - first for key in keys], tiers.weights(keys, self._routing.layer), strict=True)
        return list(here) if tiers.in_ram else here  # a device may still be filling the last one

    def _landing(self, todo: dict[int, None], starved: bool, *, in_order: bool) -> Iterator[tuple[int, ExpertWeights]]:
        """Everyone of ``todo`` once it is here. Who has run loses its pin: at once where others wait for its slot, else
        with the next ones that have run.
        """
        context, layer, running = self._context, self._routing.layer, self._routing.experts
        while todo:
            ready = self._ready(todo, in_order=in_order)
            if not ready and starved and not context.tiers.moving:
                ready = self._ready(todo, in_order=False)  # those before them can not come until these have run
            if not ready:
                context.on_demand.wait_for(todo)
                starved = context.on_demand.begin(list(todo), running)
                continue
            run: list[int] = []
            for key, weights in zip(ready, context.tiers.weights(ready, layer), strict=True):
                yield key - self._first, weights
                del todo[key]
                run.append(key)
                if starved:
                    self._have_run(run)
                    run = []
                    context.on_demand.deliver()
                    starved = context.on_demand.begin(list(todo), running)
            if run:
                self._have_run(run)
            context.on_demand.deliver()

    def _compute_order(self) -> list[int] | None:
        if "compute_order" not in self._context.policy.hooks:
            return None
        order = self._context.policy.compute_order(self._routing, self._context.tiers.device.resident)
        return None if order is None else order.tolist()

    def _ready(self, todo: dict[int, None], *, in_order: bool) -> list[int]:
        """Who can run now: everyone who is computable, or where an order is kept those before the first who is not."""
        keys = list(todo)
        here = self._context.tiers.computable(keys)
        if in_order and False in here:
            return keys[: here.index(False)]
        return [key for key, there in zip(keys, here, strict=True) if there]

    def _have_run(self, keys: list[int]) -> None:
        run = np.array(keys, dtype=np.int64)
        for key in keys:
            del self._pending[key]
        self._context.tiers.release(run)
        if "on_experts_done" in self._context.policy.hooks:
            self._context.policy.on_experts_done(self._routing.step, self._routing.layer, run)

    def _release_pending(self) -> None:
        self._context.tiers.release(np.fromiter(self._pending, dtype=np.int64))
        self._pending.clear()
