"""The expert cache engine: the source of experts for a model that does not fit.

Three concerns meet here and live elsewhere: bookkeeping (``ledger``), deciding (the policy) and copying (``tiers``,
``mover``). Everything but the movers runs on the one thread that owns the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import BudgetTooSmall, TransferFailed
from greenroom.core.units import format_bytes
from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.ledger import Ledger, LedgerError, State
from greenroom.experts.bookkeeping.slot_tables import Table, Tables
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.copying.accelerator import Mark
from greenroom.experts.copying.carriers import Store
from greenroom.experts.copying.hardware import Hardware, RealHardware
from greenroom.experts.copying.mover import Mover
from greenroom.experts.deciding.evictor import Evictor
from greenroom.experts.deciding.on_demand import OnDemandFetcher
from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.experts.pack.layout import ExpertWeights, PackManifest
from greenroom.experts.running_layer import LayerContext, RunningLayer
from greenroom.experts.source import Arriving
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.catalogue import Catalogue
from greenroom.policies.base.events import (
    Artifact,
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
from greenroom.policies.base.expert_policy import ExpertPolicy, Target
from greenroom.policies.base.fidelity import Confinement, Fidelity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``queue_ahead``: prefetches handed to the movers at a time, so that those behind can still be reordered.

    ``transfer_timeout_s``: how long a layer waits without anything landing. ``approximate``: whether the policy
    may keep rows from experts (its ``row_mask``). ``fidelity``: whether rows go on with the experts that are on the
    device where the policy does not say (None: exact). Without either outputs are those of the fully resident model.
    """

    device_slots: int
    host_slots: int = 0
    queue_ahead: int = 4
    transfer_timeout_s: float = 60.0
    approximate: bool = False
    fidelity: Fidelity | None = None


def catalogue_of(manifest: PackManifest, pool: str = "model", *, decoder_start: int = 0) -> Catalogue:
    """The experts of a pack; each occupies a slot, whose size is that of the largest record."""
    slot_bytes = max(layer.layout.nbytes for layer in manifest.layers)
    return Catalogue(
        pool,
        experts_per_layer=[layer.experts for layer in manifest.layers],
        top_k=[layer.top_k for layer in manifest.layers],
        expert_bytes=[slot_bytes] * len(manifest.layers),
        decoder_start=decoder_start,
    )


_LAYER_EVENTS = frozenset({"on_layer_routed", "on_experts_done", "on_layer_done"})

_PRELOAD_QUEUED = 64  # enough for any link, and few enough to look through each time one lands


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

    def sequence_reported(self, sequence: int, report: Mapping[str, float]) -> None:
        """The sequence has ended, and the policy has this to say of it (ExpertPolicy.report)."""
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
        self._evictor = Evictor(policy, self._device, self._host, slot_bytes, self.counters)
        self._tiers = Tiers(
            store, catalogue, self._device, self._host, make_host_room=self._host_room, hardware=self._hardware
        )
        self._prefetcher = Prefetcher(policy, self._tiers, self._evictor, self.counters, config.queue_ahead)
        self._on_demand = OnDemandFetcher(
            policy,
            self._tiers,
            self._evictor,
            self._prefetcher,
            self.counters,
            self._hardware,
            config.transfer_timeout_s,
        )
        self._context = LayerContext(
            policy, self._tiers, self._evictor, self._on_demand, self._prefetcher, self.counters
        )
        self._firsts: list[int] = catalogue.first.tolist()
        self.asks = frozenset() if self._device.slots == catalogue.size else policy.asks
        self._requests: dict[str, PredictionRequest] = {}  # by kind, the newest that no provider has taken
        self._fits = self._device.slots == catalogue.size
        self._weights: list[list[ExpertWeights]] = []  # by layer and expert, while every expert is on the device
        self._masks = config.approximate and "row_mask" in policy.hooks
        fidelity = config.fidelity or Fidelity()
        self._confinement = None if fidelity.name == "exact" else Confinement(fidelity, catalogue)
        self._waits = fidelity.waits
        self._awaited: Target | None = None  # the newest target that a layer waited for, and until when one may
        self._await_until = 0.0
        self._approximates = self._masks or self._confinement is not None
        self._tables = Tables(catalogue, self._tiers)
        heard = policy.hooks & _LAYER_EVENTS
        self._hears_layers = bool(heard)
        self._knows_hands = (
            self._tiers.in_ram
            and not self.asks
            and "compute_order" not in policy.hooks
            and (not heard or self._confinement is not None)
        )
        self._here_alone = -1  # the layer whose rows are all confined to who is here, if the newest is
        self._running: LayerRouting | None = None  # the layer that was said to be at hand, if the policy heard of it
        self._rerouted: NDArray[np.int64] | None = None  # [T]: layers in which the step's rows got other experts
        self._rerouted_rows: dict[int, int] = {}  # by sequence, (row, layer) pairs
        self._steps = 0
        self._step = Step(catalogue.pool, 0, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8))
        policy.on_budget_changed(Tier.DEVICE, self.device.slots * slot_bytes)
        if self._host is not None:
            policy.on_budget_changed(Tier.HOST, self._host.slots * slot_bytes)

    # -- what the model's hooks ask (ExpertSource) ------------------------------------------------------------

    def step(self, sequences: NDArray[np.int64], prefill: NDArray[np.bool_]) -> AbstractContextManager[None]:
        """One forward; ``sequences[T]`` and ``prefill[T]`` tell whose row each is and in which phase."""
        return self.step_of(sequences, np.where(prefill, Phase.PREFILL, Phase.DECODE).astype(np.uint8))

    @contextmanager
    def step_of(self, sequences: NDArray[np.int64], phases: NDArray[np.uint8]) -> Iterator[None]:
        """As ``step``, with any phase for each row: ``phases[T]``, values of Phase."""
        self._steps += 1
        self._step = Step(self.catalogue.pool, self._steps, sequences, phases)
        self.counters.steps += 1
        if "on_step_started" in self.policy.hooks:
            self.policy.on_step_started(self._step)
        if self._confinement is not None:
            self._confinement.step_started(self._step)
        self._rerouted = None
        self._on_demand.step_begins()
        failed = True
        try:
            yield
            self._on_demand.confirm()
            failed = False
            self._count_rerouted()
        finally:
            if self._weights:
                self._tiers.all_read()
            if self.listener is not None:
                self.listener.step_ended(self._step, failed=failed)

    def take_request(self, kind: str) -> PredictionRequest | None:
        for request in self.policy.take_requests() if self.asks else ():
            self._requests[request.kind] = request
        return self._requests.pop(kind, None)

    def predicted(self, prediction: Prediction) -> None:
        self.policy.on_prediction(prediction)
        self._prefetcher.pump()

    def mark(self) -> Mark:
        accelerator = self._hardware.accelerator
        if accelerator is None:
            raise RuntimeError("the experts are in RAM that computes: there is nothing to wait for")
        return accelerator.mark()

    def swapped(self, artifact: Artifact) -> None:
        """What the policy predicts by is another version from now on. Between steps."""
        self.policy.on_artifact_swapped(artifact)
        self._prefetcher.pump()

    def layer_entered(self, layer: int) -> None:
        if self._whole():
            return
        if "on_layer_entered" in self.policy.hooks:
            self.policy.on_layer_entered(self._step, layer)
        self._on_demand.deliver()
        self._prefetcher.pump(freed=layer == 0 and not self._hears_layers)

    def allowed_experts(self, layer: int) -> Mask | None:
        self._here_alone = -1
        if self._masks and (mask := self.policy.row_mask(self._step, layer, self._device.resident)) is not None:
            return mask
        if self._confinement is None:
            return None
        if self._waits and self._confinement.confines(layer):
            self._wait_for_target(layer)
        here = self._tables.of(layer).here
        mask = self._confinement.confine(layer, here)
        if mask is here:
            self._here_alone = layer
        return mask

    def _wait_for_target(self, layer: int) -> None:
        """Until those of the policy's target that are the layer's have landed, or find no room. They come layer after
        layer, so those of earlier layers are here by now.

        A target is waited for no longer than ``transfer_timeout_s`` after it was first; once that is over, or where one
        of its experts can not be had, layers go on without.
        """
        span = self.catalogue.spans[layer]
        state = self._device.state[span]
        while (target := self.policy.target) is not None and target.tier is Tier.DEVICE:
            if target is not self._awaited:
                self._awaited, self._await_until = target, self._hardware.now() + self._config.transfer_timeout_s
                self._on_demand.forget_failures()
            lacking = target.wanted[span] & (state != State.RESIDENT)
            if not lacking.any() or self._hardware.now() >= self._await_until:
                return
            self._prefetcher.pump()
            coming = bool((lacking & (state == State.LOADING)).any())
            if not coming and self._tiers.moving < self._config.queue_ahead:
                return
            try:
                self._on_demand.wait_for((np.flatnonzero(lacking) + span.start).tolist())
            except TransferFailed as error:
                self._await_until = self._hardware.now()
                log.warning("layers go on without some of the experts that were to be kept: %s", error)

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None:
        if self._rerouted is None:
            self._rerouted = np.zeros(len(rows), dtype=np.int64)
        self._rerouted += rows

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        if self.listener is not None:
            self.listener.layer_routed(self._step, layer, picks)
        if self._whole():
            return nullcontext(self._all_here(layer, picks))
        routing = LayerRouting.from_picks(self.catalogue, self._step, layer, picks)
        return RunningLayer(self._context, routing, self._firsts[layer])

    def _host_room(self, incoming: int) -> bool:
        return self._prefetcher.withdraw_from_host() or self._evictor.on_host(incoming)

    def resident_addresses(self, layer: int, picks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Where all that are picked are here nobody needs to be pinned: who leaves does so by this thread's doing, and
        the layer runs in one call. So the policy is told of the layer, where it wants to be, and its wants looked at
        when the layer has run.
        """
        if not self._tiers.in_ram:
            return None
        whole = self._whole()
        if not (whole or self._knows_hands):
            return None
        table = self._tables.of(layer)
        if not whole:
            if self._here_alone != layer and not table.here[0, picks].all():
                return None
            if table.arrived:
                self._count_used(table, layer, picks)
        if self.listener is not None:
            self.listener.layer_routed(self._step, layer, picks)
        if self._hears_layers and not whole:
            self._running = LayerRouting.from_picks(self.catalogue, self._step, layer, picks)
            self.policy.on_layer_routed(self._running)
        return table.addresses

    def layer_ran(self, layer: int, experts: int) -> None:
        self._hit(experts)
        routing, self._running = self._running, None
        if routing is None:
            return
        hooks = self.policy.hooks
        if "on_experts_done" in hooks:
            self.policy.on_experts_done(routing.step, layer, routing.experts)
        if "on_layer_done" in hooks:
            self.policy.on_layer_done(routing.step, layer)
        self._prefetcher.pump(freed=True)

    def _hit(self, experts: int) -> None:
        self.counters.lookups += experts
        self.counters.hits += experts

    def _count_used(self, table: Table, layer: int, picks: NDArray[np.int64]) -> None:
        """Of those that have come to the layer the picked, if they were brought ahead, have been of use."""
        unused, first = self._evictor.unused, self._firsts[layer]
        for index in table.arrived.intersection(picks.ravel().tolist()):
            table.arrived.remove(index)
            if unused[first + index]:
                unused[first + index] = False
                self.counters.prefetches_used += 1

    def _count_rerouted(self) -> None:
        """The step has not failed: its rows count for their sequences."""
        if self._rerouted is None:
            return
        for row in np.flatnonzero(self._rerouted).tolist():
            sequence = int(self._step.row_sequences[row])
            if sequence in self._rerouted_rows:
                self._rerouted_rows[sequence] += int(self._rerouted[row])

    def _whole(self) -> bool:
        """Whether every expert is on the device and none is moving. Then there is nothing to decide and nothing to wait
        for, and layers cost no bookkeeping: the policy is told of sequences and steps, not of layers. Of who reads the
        slots one mark a step tells: nobody leaves before its end.
        """
        if not self._fits or self._device.free or self._tiers.moving:
            self._weights.clear()
            return False
        if not self._weights:
            self._on_demand.deliver()
            if self._device.free or self._tiers.moving:
                return False
            for layer, span in enumerate(self.catalogue.spans):
                self._weights.append(list(self._tiers.weights(range(span.start, span.stop), layer)))
        return True

    def _all_here(self, layer: int, picks: NDArray[np.int64]) -> list[tuple[int, ExpertWeights]]:
        weights = self._weights[layer]
        wanted = [expert for expert in sorted(set(picks.ravel().tolist())) if expert < len(weights)]
        self._hit(len(wanted))
        return [(expert, weights[expert]) for expert in wanted]

    # -- what the batch loop tells (SequenceObserver) ---------------------------------------------------------------

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        if self.listener is not None:
            self.listener.sequence_queued(sequence)
        if self._confinement is not None:
            self._confinement.sequence_queued(sequence)
        if self._approximates:
            self._rerouted_rows[sequence.sequence] = 0
        self.policy.on_sequence_queued(sequence)

    def sequence_started(self, sequence: SequenceInfo) -> None:
        self.policy.on_sequence_started(sequence)

    def approximated(self, sequence: int, rows: int) -> float:
        return self._rerouted_rows.get(sequence, 0) / max(1, rows * self.catalogue.layers)

    def sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self._rerouted_rows.pop(sequence, None)
        if self._confinement is not None:
            self._confinement.sequence_ended(sequence)
        self.policy.on_sequence_ended(sequence, end)
        if "report" in self.policy.hooks and (report := self.policy.report(sequence)) and self.listener is not None:
            self.listener.sequence_reported(sequence, report)

    def idle(self) -> bool:
        self._on_demand.deliver()
        return self._prefetcher.fill() or self._tiers.moving_to_host > 0

    def audit_idle(self) -> None:
        """As ``audit``, while nothing waits or runs; what still landed is booked first."""
        self._on_demand.deliver()
        self.audit(idle=True)

    # -- around it ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Ledger:
        return self._device

    @property
    def host(self) -> Ledger | None:
        return self._host

    @property
    def movers(self) -> tuple[Mover, ...]:
        """Of the links, the lowest first."""
        return self._tiers.movers

    def preload(self, keys: Sequence[int], progress: Callable[[int], object] | None = None) -> int:
        """Fill free device slots with these, the first first; returns how many fitted.

        ``progress`` is told 1 for each. Raises TransferFailed.
        """
        wanted = [key for key in dict.fromkeys(keys) if self.device.state[key] == State.ABSENT][: self.device.free]
        self._on_demand.forget_failures()
        missing: set[int] = set()
        for key in wanted:
            self._evictor.goes_to_device(key)
            self._tiers.fetch(key, Reason.TARGET)
            missing.add(key)
            if len(missing) == _PRELOAD_QUEUED:
                missing -= self._some_of(missing, progress)
        while missing:
            missing -= self._some_of(missing, progress)
        return len(wanted)

    def _some_of(self, missing: set[int], progress: Callable[[int], object] | None) -> set[int]:
        """Wait until some have landed; returns these."""
        while not (landed := {key for key in missing if self.device.resident[key]}):
            self._on_demand.wait_for(missing)
        if progress is not None:
            progress(len(landed))
        return landed

    def fill_host(self, keys: Iterable[int]) -> None:
        """Fill the host with those of these that are not on the device, the first first: slots that are free, or hold
        what the device has too. It goes on while layers run and while nothing does (``idle``), behind everything else
        on the link. Without a host tier nothing is done.
        """
        self._prefetcher.fill_host(keys)

    def load_seconds(self, disk_seconds: float) -> float:
        """How long an expert that is not on the device takes to get there, on average over those, where a read from the
        disk takes ``disk_seconds``. With a host tier by what is on it now, and by what its link has needed so far.
        """
        upload = None if self._host is None else self._tiers.movers[-1].seconds(int(self.catalogue.bytes_of.max()))
        if self._host is None or upload is None:
            return disk_seconds
        absent = ~self._device.resident
        missing = int(np.count_nonzero(absent))
        on_disk = int(np.count_nonzero(absent & ~self._host.resident))
        return upload + (disk_seconds * on_disk / missing if missing else 0.0)

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
