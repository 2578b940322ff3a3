"""The expert cache engine: the source of experts for a model that does not fit.

Three concerns meet here and live elsewhere: bookkeeping (``ledger``), deciding (the policy) and copying (``tiers``,
``mover``). Everything but the movers runs on the one thread that owns the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import BudgetTooSmall, TransferFailed
from greenroom.core.units import format_bytes
from greenroom.experts.ahead import AheadFetcher
from greenroom.experts.carriers import Store
from greenroom.experts.counters import Counters
from greenroom.experts.hardware import Hardware, RealHardware
from greenroom.experts.layout import PackManifest
from greenroom.experts.ledger import Ledger, LedgerError, State
from greenroom.experts.room import Room
from greenroom.experts.source import ExpertWeights
from greenroom.experts.tiers import Tiers
from greenroom.policies.arrays import Keys, Mask
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import (
    LayerRouting,
    Phase,
    Prediction,
    PredictionRequest,
    Reason,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
)
from greenroom.policies.expert_policy import ExpertPolicy


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``queue_ahead``: prefetches handed to the movers at a time, so that those behind can still be reordered.

    ``transfer_timeout_s``: how long a layer waits without anything landing. ``approximate``: whether the policy
    may keep rows from experts (its ``row_mask``); without it outputs are those of the fully resident model.
    """

    device_slots: int
    host_slots: int = 0
    queue_ahead: int = 4
    transfer_timeout_s: float = 60.0
    approximate: bool = False


def catalogue_of(manifest: PackManifest, pool: str = "model") -> Catalogue:
    """The experts of a pack; each occupies a slot, whose size is that of the largest record."""
    slot_bytes = max(layer.layout.nbytes for layer in manifest.layers)
    return Catalogue(
        pool,
        experts_per_layer=[layer.experts for layer in manifest.layers],
        top_k=[layer.top_k for layer in manifest.layers],
        expert_bytes=[slot_bytes] * len(manifest.layers),
    )


class RoutingListener(Protocol):
    """Hears what is routed where, on the thread that owns the engine; a trace recorder."""

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        """A request has arrived."""
        ...

    def layer_routed(self, step: Step, layer: int, picks: NDArray[np.integer]) -> None:
        """The layer's router picked ``picks[T, k]`` for the rows of ``step``; copy what is kept."""
        ...

    def step_ended(self, step: Step, *, failed: bool) -> None:
        """The forward is over; after a failure its rows come again."""
        ...


class ExpertEngine:
    """An ExpertSource that keeps ``device_slots`` experts in memory and fetches the others as they are needed.

    Owned by one thread. Raises BudgetTooSmall where a layer's top-k experts do not fit.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        policy: ExpertPolicy,
        config: EngineConfig,
        *,
        hardware: Hardware | None = None,
    ) -> None:
        least = int(catalogue.top_k.max())
        slot_bytes = int(catalogue.bytes_of.max())
        if config.device_slots < least:
            raise BudgetTooSmall(
                f"the expert memory holds {config.device_slots} experts of {format_bytes(slot_bytes)}; a layer's "
                f"router picks {least}, so give at least {format_bytes(least * slot_bytes)}"
            )
        self.catalogue = catalogue
        self.policy = policy
        self.counters = Counters()
        self.listener: RoutingListener | None = None
        self._config = config
        self._hardware = hardware or RealHardware()
        self._device = Ledger(catalogue.size, min(config.device_slots, catalogue.size))
        self._host = Ledger(catalogue.size, min(config.host_slots, catalogue.size)) if config.host_slots else None
        self._room = Room(policy, self._device, self._host, slot_bytes, self.counters)
        self._tiers = Tiers(
            store, catalogue, self._device, self._host, make_host_room=self._room.on_host, hardware=self._hardware
        )
        self._ahead = AheadFetcher(policy, self._tiers, self._room, self.counters, config.queue_ahead)
        self._failed: dict[int, str] = {}
        self.asks = frozenset() if self._device.slots == catalogue.size else policy.asks
        self._requests: dict[str, PredictionRequest] = {}  # by kind, the newest that no provider has taken
        self._steps = 0
        self._step = Step(catalogue.pool, 0, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8))
        policy.on_budget_changed(Tier.DEVICE, self.device.slots * slot_bytes)
        if self._host is not None:
            policy.on_budget_changed(Tier.HOST, self._host.slots * slot_bytes)

    # -- what the model's hooks ask (ExpertSource) ------------------------------------------------------------

    @contextmanager
    def step(self, sequences: NDArray[np.int64], prefill: NDArray[np.bool_]) -> Iterator[None]:
        """One forward; ``sequences[T]`` and ``prefill[T]`` tell whose row each is and in which phase."""
        phases = np.where(prefill, Phase.PREFILL, Phase.DECODE).astype(np.uint8)
        self._steps += 1
        self._step = Step(self.catalogue.pool, self._steps, sequences, phases)
        self.counters.steps += 1
        if "on_step_started" in self.policy.hooks:
            self.policy.on_step_started(self._step)
        failed = True
        try:
            yield
            failed = False
        finally:
            if self.listener is not None:
                self.listener.step_ended(self._step, failed=failed)

    def take_request(self, kind: str) -> PredictionRequest | None:
        for request in self.policy.take_requests() if self.asks else ():
            self._requests[request.kind] = request
        return self._requests.pop(kind, None)

    def predicted(self, prediction: Prediction) -> None:
        self.policy.on_prediction(prediction)
        self._ahead.pump()

    def layer_entered(self, layer: int) -> None:
        if "on_layer_entered" in self.policy.hooks:
            self.policy.on_layer_entered(self._step, layer)
        self._deliver()
        self._ahead.pump()

    def allowed_experts(self, layer: int) -> Mask | None:
        if not self._config.approximate or "row_mask" not in self.policy.hooks:
            return None
        return self.policy.row_mask(self._step, layer, self.device.resident)

    @contextmanager
    def routed(self, layer: int, picks: NDArray[np.int64]) -> Iterator[Iterator[tuple[int, ExpertWeights]]]:
        """See ExpertSource. What has landed comes first, or the policy's order is kept where it has one."""
        if self.listener is not None:
            self.listener.layer_routed(self._step, layer, picks)
        self._deliver()
        routing = LayerRouting.from_picks(self.catalogue, self._step, layer, picks)
        experts = routing.experts
        self._count(experts)
        self._failed.clear()
        self.device.pin(experts)
        pending = dict.fromkeys(experts.tolist())
        try:
            self.policy.on_layer_routed(routing)
            order = self._compute_order(routing)
            todo = dict.fromkeys(pending if order is None else order)
            starved = self._demand(todo, routing)
            self._ahead.pump()
            yield self._landing(routing, pending, todo, starved, in_order=order is not None)
        finally:
            if pending:
                self._tiers.release(np.fromiter(pending, dtype=np.int64))
        if "on_layer_done" in self.policy.hooks:
            self.policy.on_layer_done(self._step, layer)
        self._ahead.pump(freed=True)

    # -- what the batch loop tells (SequenceObserver) ---------------------------------------------------------------

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        if self.listener is not None:
            self.listener.sequence_queued(sequence)
        self.policy.on_sequence_queued(sequence)

    def sequence_started(self, sequence: SequenceInfo) -> None:
        self.policy.on_sequence_started(sequence)

    def sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self.policy.on_sequence_ended(sequence, end)

    def audit_idle(self) -> None:
        """As ``audit``, while nothing waits or runs; what still landed is booked first."""
        self._deliver()
        self.audit(idle=True)

    # -- around it ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Ledger:
        return self._device

    @property
    def host(self) -> Ledger | None:
        return self._host

    def preload(self, keys: Sequence[int], progress: Callable[[int], object] | None = None) -> int:
        """Fill free device slots with these, the first first; returns how many fitted.

        ``progress`` is told 1 for each. Raises TransferFailed.
        """
        wanted = [key for key in dict.fromkeys(keys) if self.device.state[key] == State.ABSENT][: self.device.free]
        missing = set(wanted)
        self._failed.clear()
        for key in wanted:
            self._tiers.fetch(key, Reason.TARGET)
        while missing:
            landed = {key for key in missing if self.device.resident[key]}
            if progress is not None and landed:
                progress(len(landed))
            missing -= landed
            if missing:
                self._wait_for(missing)
        return len(wanted)

    def resident_keys(self) -> Keys:
        """Who is on the device, ascending."""
        return np.flatnonzero(self.device.resident)

    def refresh_counters(self) -> Counters:
        """The counters, with the bytes that the links have moved."""
        self.counters.bytes_by_link = {mover.name: mover.bytes_moved for mover in self._tiers.movers}
        return self.counters

    def audit(self, *, idle: bool = False) -> None:
        """Raises LedgerError where an invariant does not hold; ``idle``: and where anything is still pinned."""
        self._tiers.audit()
        if idle and self.device.pinned:
            raise LedgerError(f"{self.device.pinned} experts are pinned though nothing runs")

    def close(self) -> None:
        """Stop the movers."""
        self._tiers.close()

    # -- a layer's experts ----------------------------------------------------------------------------------------

    def _count(self, experts: Keys) -> None:
        counters = self.counters
        counters.lookups += len(experts)
        counters.hits += int(np.count_nonzero(self.device.resident[experts]))
        ahead = self._room.unused[experts]
        if ahead.any():
            counters.prefetches_used += int(np.count_nonzero(ahead))
            self._room.unused[experts] = False

    def _landing(
        self, routing: LayerRouting, pending: dict[int, None], todo: dict[int, None], starved: bool, *, in_order: bool
    ) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield every pending expert once it is here. Who has run leaves ``pending`` and loses its pin: at once where
        others wait for its slot, else with the next ones that have run.
        """
        first = int(self.catalogue.first[routing.layer])
        while todo:
            ready = self._ready(todo, in_order=in_order)
            if not ready and starved and not self._tiers.moving:
                ready = self._ready(todo, in_order=False)  # those before them can not come until these have run
            if not ready:
                self._wait_for(todo)
                starved = self._demand(todo, routing)
                continue
            run: list[int] = []
            for key, weights in zip(ready, self._tiers.weights(ready, routing.layer), strict=True):
                yield key - first, weights
                del todo[key]
                run.append(key)
                if starved:
                    self._have_run(run, routing, pending)
                    run = []
                    self._deliver()
                    starved = self._demand(todo, routing)
            if run:
                self._have_run(run, routing, pending)
            self._deliver()

    def _compute_order(self, routing: LayerRouting) -> list[int] | None:
        if "compute_order" not in self.policy.hooks:
            return None
        order = self.policy.compute_order(routing, self.device.resident)
        return None if order is None else order.tolist()

    def _ready(self, todo: dict[int, None], *, in_order: bool) -> list[int]:
        """Who can run now: everyone who is resident, or where an order is kept those before the first who is not."""
        keys = list(todo)
        here = self.device.resident[keys]
        if here.all():
            return keys
        if in_order:
            return keys[: int(here.argmin())]
        return [key for key, there in zip(keys, here.tolist(), strict=True) if there]

    def _have_run(self, keys: list[int], routing: LayerRouting, pending: dict[int, None]) -> None:
        run = np.array(keys, dtype=np.int64)
        for key in keys:
            del pending[key]
        self._tiers.release(run)
        if "on_experts_done" in self.policy.hooks:
            self.policy.on_experts_done(self._step, routing.layer, run)

    def _demand(self, todo: dict[int, None], routing: LayerRouting) -> bool:
        """Begin to fetch as many of the missing as room can be found for; True: some have found none yet."""
        self._raise_failure_of(todo)
        keys = list(todo)
        states = self.device.state[keys]
        if (states == State.RESIDENT).all():
            return False
        absent = []
        for key, state in zip(keys, states.tolist(), strict=True):
            if state == State.ABSENT:
                absent.append(key)
            elif state == State.LOADING and self._tiers.queued_ahead(key) is not None:
                self._tiers.hurry(key)
        if not absent:
            return False
        self._ahead.withdraw_all_but(len(absent))
        if self.device.free < len(absent):
            self._room.on_demand(len(absent) - self.device.free, absent, routing.experts)
        begun = absent[: self.device.free]
        for key in begun:
            self.counters.on_demand_fetches += 1
            self._tiers.fetch(key, Reason.ON_DEMAND)
        return len(begun) < len(absent)

    def _wait_for(self, wanted: Iterable[int]) -> None:
        """Wait until something lands. Raises TransferFailed where one of ``wanted`` can not be had."""
        self._raise_failure_of(wanted)
        if not self._tiers.moving:
            raise LedgerError("a layer waits for experts, and nothing moves")
        begin = self._hardware.now()
        landed = self._tiers.wait(self._config.transfer_timeout_s)
        self.counters.stall_seconds += self._hardware.now() - begin
        self._deliver()
        self._raise_failure_of(wanted)
        if not landed:
            raise TransferFailed(f"no expert has landed for {self._config.transfer_timeout_s:g} s")

    def _raise_failure_of(self, wanted: Iterable[int]) -> None:
        for key in wanted if self._failed else ():
            if key in self._failed:
                layer, index = int(self.catalogue.layer_of[key]), int(self.catalogue.index_of[key])
                raise TransferFailed(f"expert {index} of MoE layer {layer} could not be had: {self._failed[key]}")

    def _deliver(self) -> None:
        """Book what the movers have finished and tell the policy."""
        for transfer in self._tiers.collect():
            if transfer.error is None:
                self.policy.on_transfer_done(transfer)
                continue
            self.counters.failed_transfers += 1
            self._room.unused[transfer.expert] = False
            self._failed[transfer.expert] = transfer.error
            self.policy.on_transfer_failed(transfer)
