"""A layer's experts from its router's picks to its end: pinned, fetched, handed out as they land, unpinned."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, compress, islice
from types import TracebackType
from typing import NamedTuple

import numpy as np

from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.deciding.on_demand import OnDemandFetcher
from greenroom.experts.deciding.predictions import Predictions
from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.experts.held_outputs import HeldOutputs
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.source import Arriving, Landing
from greenroom.policies.base.array_types import NO_KEYS
from greenroom.policies.base.events import LayerRouting
from greenroom.policies.base.expert_policy import ExpertPolicy


class LayerContext(NamedTuple):
    """What every layer of an engine uses."""

    policy: ExpertPolicy
    tiers: Tiers
    on_demand: OnDemandFetcher
    prefetcher: Prefetcher
    predictions: Predictions
    counters: Counters
    stream_slots: Sequence[int]
    """By size class: through so many slots a layer passes its missing experts, where the policy wants that."""


class RunningLayer(AbstractContextManager[Arriving]):
    """See ExpertSource.routed.

    Entering it queues the missing experts, and then what the policy wants next. The iterator hands out the resident
    experts first and the others as they land, or all in the policy's order if it has one.

    In a step with prompts under a policy that ``streams`` none runs so early that many outputs wait (``HeldOutputs``).
    """

    __slots__ = ("_context", "_first", "_held", "_passing", "_pinned", "_routing", "_stream_slots")

    def __init__(self, context: LayerContext, routing: LayerRouting, first: int) -> None:
        self._context = context
        self._routing = routing
        self._first = first
        self._pinned: dict[int, None] = {}
        self._passing: frozenset[int] | None = None
        """The missing experts, where the layer passes them through a few slots."""
        self._stream_slots = context.stream_slots[context.tiers.device.size_class(first)]
        bounded = "streams" in context.policy.hooks and routing.step.has_prompt_rows
        self._held = HeldOutputs(routing) if bounded else None

    def __enter__(self) -> Arriving:
        context, routing = self._context, self._routing
        experts, device = routing.experts, context.tiers.device
        context.on_demand.deliver()
        all_resident = self._count_hits()
        context.on_demand.forget_failures()
        device.pin(experts)
        keys = experts.tolist()
        self._pinned = dict.fromkeys(keys)
        try:
            context.policy.on_layer_routed(routing)
            order = self._compute_order()
            if order is not None:
                keys = order
            if all_resident:
                context.predictions.layer_routed(routing)
                context.predictions.decided()
                if context.policy.slot_by_slot:
                    return self._landing(keys, short_of_slots=False, in_order=order is not None)
                return self._residents(keys)
            context.prefetcher.reorder()
            if "streams" in context.policy.hooks:
                missing = experts[~device.resident[experts]]
                if len(missing) > self._stream_slots and context.policy.streams(routing, missing):
                    self._passing = frozenset(missing.tolist())
            short_of_slots = self._begin(keys)
            context.predictions.layer_routed(routing)  # before more of what was wanted until now is fetched
            context.predictions.decided()
            return self._landing(keys, short_of_slots=short_of_slots, in_order=order is not None)
        except BaseException:
            self._unpin_all()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            if self._pinned:
                self._unpin_all()
            return
        context, routing = self._context, self._routing
        if self._pinned:
            self._have_run(list(self._pinned))
        if "on_layer_done" in context.policy.hooks:
            context.policy.on_layer_done(routing.step, routing.layer)
        context.predictions.poll()
        context.prefetcher.pump(freed=True)

    def _count_hits(self) -> bool:
        """Whether all picked experts are resident."""
        experts, running, device = self._routing.experts, self._context.counters.running, self._context.tiers.device
        hits = int(np.count_nonzero(device.resident[experts]))
        running.lookups += len(experts)
        running.hits += hits
        if device.prefetches.begun:
            device.prefetches.use(experts)
        return hits == len(experts)

    def _residents(self, keys: list[int]) -> Arriving:
        """All picked experts have arrived: no slot is waited for, so all are unpinned together at the end."""
        weights = list(self._context.tiers.weights(keys, self._routing.layer))
        pairs = list(zip([key - self._first for key in keys], weights, strict=True))
        if self._context.tiers.in_ram:
            return pairs
        coming = deque(weights)
        return Landing(_one_by_one(pairs, coming), coming)  # on a device predictions are answered between two experts

    def _landing(self, keys: list[int], *, short_of_slots: bool, in_order: bool) -> Landing:
        coming: deque[ExpertWeights] = deque()
        return Landing(self._as_they_land(dict.fromkeys(keys), coming, short_of_slots, in_order=in_order), coming)

    def _as_they_land(
        self, todo: dict[int, None], coming: deque[ExpertWeights], short_of_slots: bool, *, in_order: bool
    ) -> Iterator[tuple[int, ExpertWeights]]:
        """Each of ``todo`` once it can be computed. An expert that has run is unpinned at once where others wait for
        its slot, or the policy wants it used, and else together with the next ones. ``coming``: see ``Landing``.
        """
        context, layer, slot_by_slot = self._context, self._routing.layer, self._context.policy.slot_by_slot
        while todo:
            ready = self._ready(todo, in_order=in_order)
            if not ready and short_of_slots and not context.tiers.moving:
                ready = self._ready(todo, in_order=False)  # the first ones only get slots when these have run
            if not in_order and (self._passing is not None or self._held is not None):
                ready = self._next_one(ready)
            if not ready:
                context.on_demand.wait_for(todo)
                context.predictions.poll()
                if short_of_slots or self._passing is not None:  # else all of them are on their way, and pinned
                    short_of_slots = self._begin(list(todo))
                continue
            ready, arrived = self._arrived_first(ready, in_order=in_order)
            run: list[int] = []
            each = iter(context.tiers.weights(ready, layer))  # one on its way is taken when those before it are queued
            coming.extend(islice(each, arrived))
            for key, weights in zip(ready, chain(tuple(coming), each), strict=True):
                if coming:
                    coming.popleft()
                yield key - self._first, weights
                del todo[key]
                run.append(key)
                if self._held is not None:
                    self._held.have_run(key)
                if short_of_slots or slot_by_slot:
                    self._have_run(run)
                    run = []
                    context.on_demand.deliver()
                    short_of_slots = self._begin(list(todo))
                    if slot_by_slot and not short_of_slots:
                        context.prefetcher.pump(freed=True)
                context.predictions.poll()
            if run:
                self._have_run(run)
            context.on_demand.deliver()
            if self._passing is not None and not short_of_slots:
                context.prefetcher.pump(freed=True)  # the layer's last ones are on their way: the next layer's follow

    def _begin(self, todo: list[int]) -> bool:
        """Begin to fetch what is missing. True: some must wait.

        Where experts pass through a few slots, only those that have not run count, and those that have run may leave as
        any other: the policy chooses among all.
        """
        on_demand = self._context.on_demand
        if self._passing is None:
            return on_demand.begin(todo, self._routing.experts)
        absent = self._context.tiers.device.absent[todo]
        held = sum(key in self._passing for key, gone in zip(todo, absent.tolist(), strict=True) if not gone)
        most = self._stream_slots - held
        if self._held is not None and todo and todo[0] == self._held.turn and absent[0]:
            most = max(1, most)  # prefetched ones may hold all slots, and wait for this one
        return on_demand.begin(todo, NO_KEYS, most)

    def _compute_order(self) -> list[int] | None:
        if "compute_order" not in self._context.policy.hooks:
            return None
        order = self._context.policy.compute_order(self._routing, self._context.tiers.device.resident)
        return None if order is None else order.tolist()

    def _ready(self, todo: dict[int, None], *, in_order: bool) -> list[int]:
        """The experts that can run now. In order: those before the first that can not."""
        keys = list(todo)
        computable = self._context.tiers.computable(keys)
        if in_order and False in computable:
            return keys[: computable.index(False)]
        return [key for key, can_run in zip(keys, computable, strict=True) if can_run]

    def _arrived_first(self, ready: list[int], *, in_order: bool) -> tuple[list[int], int]:
        """Those whose bytes have arrived before those that have landed, unless there is an order. And how many of the
        first have arrived.
        """
        here = self._context.tiers.device.resident[ready].tolist()
        if False not in here:
            return ready, len(ready)
        if not in_order:
            return [*compress(ready, here), *(key for key, one in zip(ready, here, strict=True) if not one)], sum(here)
        return ready, here.index(False)

    def _next_one(self, ready: list[int]) -> list[int]:
        """One at a time. One that passes comes first, since the link waits for its slot; residents fill the gaps."""
        if self._held is not None:
            allowed = [key for key in ready if self._held.may_run(key)]
            # Where nothing moves, the one whose turn it is has no slot until another has run.
            ready = allowed or ([] if self._context.tiers.moving else ready)
        passing = self._passing or frozenset()
        return [next((key for key in ready if key in passing), ready[0])] if ready else []

    def _have_run(self, keys: list[int]) -> None:
        run = np.array(keys, dtype=np.int64)
        for key in keys:
            del self._pinned[key]
        self._context.tiers.release(run)
        if "on_experts_done" in self._context.policy.hooks:
            self._context.policy.on_experts_done(self._routing.step, self._routing.layer, run)

    def _unpin_all(self) -> None:
        self._context.tiers.release(np.fromiter(self._pinned, dtype=np.int64))
        self._pinned.clear()


def _one_by_one(
    pairs: list[tuple[int, ExpertWeights]], coming: deque[ExpertWeights]
) -> Iterator[tuple[int, ExpertWeights]]:
    for pair in pairs:
        coming.popleft()
        yield pair
