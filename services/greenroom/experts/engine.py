"""The expert cache engine: the source of experts for a model that does not fit.

It joins three concerns: ``bookkeeping``, ``deciding`` (around the policy) and ``copying``. Everything except the movers
runs on the one thread that owns the model.

There are three ways through a layer:

- *Resident model*: every expert of the model is resident. There is nothing to decide, so layers are only counted. The
  policy hears of sequences and steps, not of layers.
- *Resident layer*: the fast path. All picked experts are resident in RAM, and compiled code computes the layer in one
  call. See ``resident_addresses``.
- *Running layer*: all other layers. Experts are pinned and fetched, and computed as they land. See ``RunningLayer``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import BudgetTooSmall
from greenroom.core.units import format_bytes
from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.ledger import Ledger, LedgerError
from greenroom.experts.bookkeeping.prefetch_use import PrefetchUse
from greenroom.experts.bookkeeping.resident_tables import ResidentTable, ResidentTables
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.copying.accelerator import Mark
from greenroom.experts.copying.hardware import Hardware, RealHardware
from greenroom.experts.copying.mover import Mover
from greenroom.experts.copying.transfers import Store
from greenroom.experts.deciding.evictor import Evictor
from greenroom.experts.deciding.first_fill import FillProgress, FirstFill
from greenroom.experts.deciding.on_demand import OnDemandFetcher
from greenroom.experts.deciding.predictions import Predictions
from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.experts.deciding.row_masks import RowMasks
from greenroom.experts.deciding.target_wait import TargetWait
from greenroom.experts.pack.layout import ExpertWeights, PackManifest
from greenroom.experts.running_layer import LayerContext, RunningLayer
from greenroom.experts.source import Arriving
from greenroom.policies.base.array_types import Keys, Mask
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
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.fidelity import Confinement, Fidelity
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.base.slot_sizes import SlotSizes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``queue_ahead``: how many prefetches are handed to the movers at a time. The others can still be reordered.

    ``transfer_timeout_s``: how long a layer waits without anything landing. ``approximate``: whether the policy may
    keep rows from experts (its ``row_mask``). ``fidelity``: whether rows are confined to resident experts where the
    policy gives no mask (None: exact, they are not). With neither, outputs are those of the fully resident model.
    """

    device_slots: int
    host_slots: int = 0
    queue_ahead: int = 4
    transfer_timeout_s: float = 60.0
    approximate: bool = False
    fidelity: Fidelity | None = None


def catalogue_of(manifest: PackManifest, pool: str = "model", *, decoder_start: int = 0) -> Catalogue:
    """The experts of a pack. Each occupies one slot, of its record's size."""
    return Catalogue(
        pool,
        experts_per_layer=[layer.experts for layer in manifest.layers],
        top_k=[layer.top_k for layer in manifest.layers],
        expert_bytes=[layer.layout.nbytes for layer in manifest.layers],
        decoder_start=decoder_start,
    )


def _phases(prefill: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.where(prefill, Phase.PREFILL, Phase.DECODE).astype(np.uint8)


_LAYER_EVENTS = frozenset({"on_layer_routed", "on_experts_done", "on_layer_done"})

_PRELOAD_QUEUED = 64  # enough for any link, and few enough to search each time an expert lands


class RoutingListener(Protocol):
    """Hears of routing, on the thread that owns the engine. A trace recorder is one."""

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        """A request has arrived."""
        ...

    def sequence_preempted(self, sequence: int) -> None:
        """Its rows so far run again, as many as have run in steps that did not fail. Count them once."""
        ...

    def layer_routed(self, step: Step, layer: int, picks: NDArray[np.integer]) -> None:
        """The layer's router picked ``picks[T, k]`` for the rows of ``step``. Copy what you keep."""
        ...

    def step_ended(self, step: Step, *, failed: bool) -> None:
        """The forward is over. After a failure its rows come again in another step."""
        ...

    def sequence_reported(self, sequence: int, report: Mapping[str, float]) -> None:
        """The sequence has ended, and this is what the policy reports of it (ExpertPolicy.report)."""
        ...


class ExpertEngine:
    """An ExpertSource that keeps ``device_slots`` experts on the device and fetches the others when they are needed.

    Owned by one thread. Raises BudgetTooSmall if a layer's top-k experts do not fit.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        policy: ExpertPolicy,
        config: EngineConfig,
        *,
        hardware: Hardware | None = None,
        predictors: Sequence[PicksPredictor] = (),
    ) -> None:
        """``predictors``: that the policy may ask, beside its own."""
        sizes = SlotSizes(catalogue)
        if config.device_slots < sizes.least:
            raise BudgetTooSmall(
                f"the expert memory holds {config.device_slots} experts of {sizes.describe()}; {sizes.say_least()}, so "
                f"give at least {format_bytes(sizes.nbytes(sizes.least))}"
            )
        if 0 < config.host_slots < sizes.classes:
            raise BudgetTooSmall(
                f"the host tier holds {config.host_slots} experts of {sizes.describe()}; give none, or at least "
                f"{format_bytes(sizes.nbytes(sizes.classes))} for one of each size"
            )
        self.catalogue = catalogue
        self.policy = policy
        self._listener: RoutingListener | None = None
        self._also: tuple[RoutingListener, ...] = ()
        self._listeners: tuple[RoutingListener, ...] = ()
        self._hardware = hardware or RealHardware()
        self._device = Ledger(sizes, min(config.device_slots, catalogue.size))
        self._host = Ledger(sizes, min(config.host_slots, catalogue.size)) if config.host_slots else None
        host_use = PrefetchUse(catalogue.size) if self._host is None else self._host.prefetches
        self._tiers = Tiers(
            store, catalogue, self._device, self._host, make_host_room=self._free_host_slot, hardware=self._hardware
        )
        self.counters = Counters(self._device.prefetches, host_use, self._tiers.movers)
        self._evictor = Evictor(policy, self._device, self._host, self.counters)
        self._tables = ResidentTables(catalogue, self._tiers)
        self._first_fill = FirstFill(self._tiers, self._evictor, self._hardware)
        self._prefetcher = Prefetcher(policy, self._tiers, self._evictor, self._first_fill, config.queue_ahead)
        self._on_demand = OnDemandFetcher(
            policy, self._tiers, self._evictor, self._prefetcher, self._first_fill, self.counters, self._hardware,
            config.transfer_timeout_s,
        )  # fmt: skip
        self.asks = frozenset() if self._device.slots == catalogue.size else policy.asks
        self._predictions = Predictions(policy, (*policy.predictors, *predictors), self._prefetcher, self.asks)
        self._context = LayerContext(
            *(policy, self._tiers, self._on_demand, self._prefetcher, self._predictions, self.counters),
            stream_slots=self._tiers.stream_slots,
        )
        self._row_masks = self._make_row_masks(config)
        self._firsts: list[int] = catalogue.first.tolist()
        confined = config.fidelity is not None and config.fidelity.name != "exact"
        self._loads_no_row = config.fidelity is not None and config.fidelity.name == "paper"
        self._hears_layers = bool(policy.hooks & _LAYER_EVENTS)
        self._has_fast_path = (
            self._tiers.in_ram
            and not self.asks
            and "compute_order" not in policy.hooks
            and (confined or not self._hears_layers)
        )
        self._resident_layer: LayerRouting | None = None  # runs on the fast path, and the policy has heard of it
        self._steps = 0
        self._step = Step(catalogue.pool, 0, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8))
        policy.on_budget_changed(Tier.DEVICE, self._device.nbytes)
        if self._host is not None:
            policy.on_budget_changed(Tier.HOST, self._host.nbytes)

    @property
    def listener(self) -> RoutingListener | None:
        """Hears of routing. It may be set, and taken away, between steps."""
        return self._listener

    @listener.setter
    def listener(self, listener: RoutingListener | None) -> None:
        self._listener = listener
        self._listeners = self._also if listener is None else (listener, *self._also)

    def also_tell(self, listener: RoutingListener) -> None:
        """This one hears of routing too, from now on."""
        self._also = (*self._also, listener)
        self.listener = self._listener

    # -- what the model's hooks ask (ExpertSource) ------------------------------------------------------------

    def step(
        self,
        sequences: NDArray[np.int64],
        prefill: NDArray[np.bool_],
        tokens: NDArray[np.int64] | None = None,
        paths: NDArray[np.float32] | None = None,
    ) -> AbstractContextManager[None]:
        """One forward. ``sequences[T]``: which sequence each row belongs to; ``prefill[T]``: its phase; ``tokens[T]``
        and ``paths[T, N]``: see Step."""
        return self.step_of(sequences, _phases(prefill), tokens, paths)

    def step_planned(
        self,
        sequences: NDArray[np.int64],
        prefill: NDArray[np.bool_],
        tokens: NDArray[np.int64] | None = None,
        paths: NDArray[np.float32] | None = None,
    ) -> None:
        """Tell the policy of the forward after the one that is about to start. Arguments as of ``step``."""
        if paths is not None and paths.shape != (len(sequences), self.catalogue.size):
            paths = None
        if "on_step_planned" in self.policy.hooks and not self._model_resident():
            number = self._steps + 2
            self.policy.on_step_planned(Step(self.catalogue.pool, number, sequences, _phases(prefill), tokens, paths))

    @contextmanager
    def step_of(
        self,
        sequences: NDArray[np.int64],
        phases: NDArray[np.uint8],
        tokens: NDArray[np.int64] | None = None,
        paths: NDArray[np.float32] | None = None,
    ) -> Iterator[None]:
        """As ``step``, with any phase a row: ``phases[T]``, values of Phase."""
        self._steps += 1
        if paths is not None and (paths.shape != (len(sequences), self.catalogue.size) or self._model_resident()):
            paths = None  # of another model's experts; or nothing is to be fetched by them
        self._step = Step(self.catalogue.pool, self._steps, sequences, phases, tokens, paths)
        self._resident_layer = None
        failed = True
        self.counters.step_began(self._step, self._hardware.now())
        try:
            if "on_step_started" in self.policy.hooks:
                self.policy.on_step_started(self._step)
            self._predictions.step_started(self._step)
            if self._row_masks is not None:
                self._row_masks.step_started(self._step)
            self._on_demand.begin_step()
            yield
            self._on_demand.confirm_step()
            failed = False
            if self._row_masks is not None:
                self._row_masks.step_succeeded(self._step)
        finally:
            self.counters.step_ended(self._hardware.now())
            if self._model_resident():
                self._tiers.all_read()
            for listener in self._listeners:
                listener.step_ended(self._step, failed=failed)

    def take_request(self, kind: str) -> PredictionRequest | None:
        return self._predictions.take_request(kind)

    def predicted(self, prediction: Prediction) -> None:
        self._predictions.answered(prediction)

    def answers_at_once(self, kind: str) -> None:
        self._predictions.answers_at_once(kind)

    def mark(self) -> Mark:
        accelerator = self._hardware.accelerator
        if accelerator is None:
            raise RuntimeError("the device tier is RAM: there is nothing to wait for")
        return accelerator.mark()

    def prepare(self, artifact: Artifact) -> Artifact:
        """What takes long about swapping to it, done beforehand; in any thread. Raises InvalidConfig for one that can
        not be predicted by."""
        return self.policy.prepare(self._predictions.prepare(artifact))

    def swapped(self, artifact: Artifact) -> None:
        """From now on the policy predicts by another version of an artifact. To be called between steps."""
        self.policy.on_artifact_swapped(artifact)
        self._predictions.swapped(artifact)
        if not self._model_resident():  # where it is, a target that drops all others would only evict
            self._prefetcher.pump()

    def layer_entered(self, layer: int) -> None:
        if self._model_resident():
            return
        if "on_layer_entered" in self.policy.hooks:
            self.policy.on_layer_entered(self._step, layer)
        self._on_demand.deliver()
        self._predictions.poll()
        # Where the policy hears of no layer, the fast path never says that experts may be evicted again.
        self._prefetcher.pump(freed=layer == 0 and not self._hears_layers)

    def allowed_experts(self, layer: int) -> Mask | None:
        return None if self._row_masks is None else self._row_masks.of(self._step, layer)

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None:
        if self._row_masks is not None:
            self._row_masks.rerouted(rows)

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        for listener in self._listeners:
            listener.layer_routed(self._step, layer, picks)
        if self._model_resident():
            return nullcontext(self._resident_weights(layer, picks))
        routing = LayerRouting.from_picks(self.catalogue, self._step, layer, picks)
        return RunningLayer(self._context, routing, self._firsts[layer])

    def resident_addresses(self, layer: int, picks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Fast path: all picked experts are resident. No pin is needed, because only this thread evicts.

        The policy hears of the layer now, if it wants to. Its wants are looked at once the layer has run.
        """
        if not self._tiers.in_ram:
            return None
        table = self._tables.of(layer)
        tells_policy = False
        if not self._model_resident():
            if not (self._has_fast_path and self._all_resident(table, layer, picks)):
                return None
            tells_policy = self._hears_layers
            if table.arrived:
                self._count_used_prefetches(table, layer, picks)
        for listener in self._listeners:
            listener.layer_routed(self._step, layer, picks)
        if tells_policy:
            self._resident_layer = LayerRouting.from_picks(self.catalogue, self._step, layer, picks)
            self.policy.on_layer_routed(self._resident_layer)
        return table.addresses

    def layer_ran(self, layer: int, experts: int) -> None:
        self._count_hits(experts)
        routing, self._resident_layer = self._resident_layer, None
        if routing is None:
            return
        hooks = self.policy.hooks
        if "on_experts_done" in hooks:
            self.policy.on_experts_done(routing.step, layer, routing.experts)
        if "on_layer_done" in hooks:
            self.policy.on_layer_done(routing.step, layer)
        self._prefetcher.pump(freed=True)

    def _model_resident(self) -> bool:
        """Whether every expert of the model is resident."""
        return self._device.residents == self.catalogue.size

    def _all_resident(self, table: ResidentTable, layer: int, picks: NDArray[np.int64]) -> bool:
        """Whether all picked experts are resident. Rows that are confined to resident experts picked no others."""
        if self._row_masks is not None and self._row_masks.confined_layer == layer:
            return True
        return bool(table.resident[0, picks].all())

    def _resident_weights(self, layer: int, picks: NDArray[np.int64]) -> list[tuple[int, ExpertWeights]]:
        weights = self._tables.weights(layer)
        experts = [expert for expert in sorted(set(picks.ravel().tolist())) if expert < len(weights)]
        self._count_hits(len(experts))
        return [(expert, weights[expert]) for expert in experts]

    def _count_hits(self, experts: int) -> None:
        running = self.counters.running
        running.lookups += experts
        running.hits += experts

    def _count_used_prefetches(self, table: ResidentTable, layer: int, picks: NDArray[np.int64]) -> None:
        """A prefetched expert is used when it is picked for the first time after it arrived."""
        for index in table.arrived.intersection(picks.ravel().tolist()):
            table.arrived.remove(index)
            self._device.prefetches.use(self._firsts[layer] + index)

    def _make_row_masks(self, config: EngineConfig) -> RowMasks | None:
        """None: outputs are exact."""
        fidelity = config.fidelity or Fidelity()
        asks_policy = config.approximate and "row_mask" in self.policy.hooks
        if fidelity.name == "exact" and not asks_policy:
            return None
        target_wait = TargetWait(
            self.policy, self._tiers, self._prefetcher, self._on_demand, self._hardware,
            timeout_s=config.transfer_timeout_s, queue_ahead=config.queue_ahead,
        )  # fmt: skip
        return RowMasks(
            self.policy,
            self._tables,
            self._device.resident,
            asks_policy=asks_policy,
            confinement=None if fidelity.name == "exact" else Confinement(fidelity, self.catalogue),
            target_wait=target_wait if fidelity.waits else None,
        )

    def _free_host_slot(self, incoming: int) -> bool:
        return self._prefetcher.free_host_slot(incoming) or self._evictor.free_host_slot(incoming)

    # -- what the batch loop tells (SequenceObserver) ---------------------------------------------------------------

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        for listener in self._listeners:
            listener.sequence_queued(sequence)
        if self._row_masks is not None:
            self._row_masks.sequence_queued(sequence)
        self.policy.on_sequence_queued(sequence)

    def sequence_started(self, sequence: SequenceInfo) -> None:
        self.policy.on_sequence_started(sequence)

    def sequence_preempted(self, sequence: SequenceInfo) -> None:
        for listener in self._listeners:
            listener.sequence_preempted(sequence.sequence)
        if self._row_masks is not None:
            self._row_masks.sequence_preempted(sequence.sequence)
        self.policy.on_sequence_preempted(sequence)

    def approximated(self, sequence: int, rows: int) -> float:
        pairs = 0 if self._row_masks is None else self._row_masks.rerouted_pairs(sequence)
        return pairs / max(1, rows * self.catalogue.layers)

    def sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        if self._row_masks is not None:
            self._row_masks.sequence_ended(sequence)
        self.policy.on_sequence_ended(sequence, end)
        if "report" in self.policy.hooks and (report := self.policy.report(sequence)):
            for listener in self._listeners:
                listener.sequence_reported(sequence, report)

    def idle(self) -> bool:
        self._on_demand.deliver()
        self._first_fill.queue()
        return self._first_fill.unfinished

    def audit_idle(self) -> None:
        """As ``audit``, while no layer waits or runs. What has landed meanwhile is booked first."""
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
        """One a link, the link from the disk first."""
        return self._tiers.movers

    def preload(self, keys: Sequence[int], progress: Callable[[int], object] | None = None) -> int:
        """Fill free device slots with these experts, in this order, and wait for them. Returns how many fitted.

        ``progress`` is told how many have landed, each time some have. Raises TransferFailed.
        """
        absent = [key for key in dict.fromkeys(keys) if self.device.absent[key]]
        wanted = self._device.sizes.placed(np.array(absent, dtype=np.int64), self._device.free_places).tolist()
        self._on_demand.forget_failures()
        missing: set[int] = set()
        for key in wanted:
            self._tiers.fetch(key, Reason.TARGET)
            missing.add(key)
            if len(missing) == _PRELOAD_QUEUED:
                missing -= self._wait_for_some(missing, progress)
        while missing:
            missing -= self._wait_for_some(missing, progress)
        return len(wanted)

    def _wait_for_some(self, missing: set[int], progress: Callable[[int], object] | None) -> set[int]:
        """Wait until some have arrived, and return these."""
        while not (landed := {key for key in missing if self.device.resident[key]}):
            self._on_demand.wait_for(missing)
        if progress is not None:
            progress(len(landed))
        return landed

    def fill(self, keys: Sequence[int]) -> None:
        """Begin to fill free device slots with these experts, in this order.

        The filling goes on while layers run and while none does (``idle``), behind everything else on the link. Whoever
        needs a slot takes it, unless its expert has begun to move. An expert that can not be read is left out.
        """
        self._tiers.take_pages(len(keys))
        self._first_fill.begin_device(keys)

    def fill_host(self, keys: Iterable[int]) -> None:
        """As ``fill``, of the host, behind the device's: with those of these experts that are not on the device.

        Only slots are filled that are free, or that hold an expert which the device holds too. Does nothing without a
        host tier.
        """
        self._first_fill.begin_host(keys)

    @property
    def filled(self) -> threading.Event:
        """Whether the device's fill is over. Any thread may wait for it, as long as the owner works or is ``idle``."""
        return self._first_fill.done

    @property
    def fill_progress(self) -> FillProgress:
        """Of the device's last fill. Any thread may read it."""
        return self._first_fill.progress

    def wait_filled(self, timeout_s: float, progress: Callable[[int], object] | None = None) -> bool:
        """Wait until the device's fill is over. False: nothing has come for ``timeout_s``. For the thread that owns the
        engine.

        ``progress`` is told how many experts have landed, each time some have.
        """
        deadline = self._hardware.now() + timeout_s
        told = self.fill_progress.experts
        while True:
            self.idle()
            landed = self.fill_progress.experts - told
            if landed:
                deadline = self._hardware.now() + timeout_s
                told += landed
                if progress is not None:
                    progress(landed)
            if self.filled.is_set():
                return True
            left_s = deadline - self._hardware.now()
            if left_s <= 0 or not self._tiers.wait(left_s):
                return False

    def load_seconds(self, disk_seconds: float) -> float:
        """How long a fetch to the device takes, on average over the experts that are not there.

        ``disk_seconds``: how long a read from the disk takes. With a host tier it counts which experts that holds now,
        and how fast its link to the device has been so far.
        """
        absent = ~self._device.resident
        missing = int(np.count_nonzero(absent))
        nbytes = int(self.catalogue.bytes_of[absent if missing else ...].mean())
        upload = None if self._host is None else self._tiers.movers[-1].seconds(nbytes)
        if self._host is None or upload is None:
            return disk_seconds
        on_disk = int(np.count_nonzero(absent & ~self._host.resident))
        return upload + (disk_seconds * on_disk / missing if missing else 0.0)

    def missing_seconds(self, disk_bytes_per_s: float | None) -> float | None:
        """How long moving the experts that are not on the device takes. Each link moves as fast as it has so far.

        ``disk_bytes_per_s``: the disk's rate until it has moved anything. Two links work side by side, so the one that
        takes longer counts. None: the rate of a link is not known. Under fidelity ``paper`` no row needs them.
        """
        if self._device.residents == self.catalogue.size or self._loads_no_row:
            return 0.0
        bytes_of, absent = self.catalogue.bytes_of, ~self._device.resident
        disk, *upload = self._tiers.movers
        missing = on_disk = int(bytes_of[absent].sum())
        if self._host is not None:
            on_disk = int(bytes_of[absent & ~self._host.resident].sum())
        disk_seconds = disk.seconds(on_disk) if on_disk else 0.0
        if disk_seconds is None and disk_bytes_per_s is not None:
            disk_seconds = on_disk / disk_bytes_per_s
        taken = [disk_seconds, *(mover.seconds(missing) for mover in upload)]
        known = [seconds for seconds in taken if seconds is not None]
        return max(known) if len(known) == len(taken) else None

    def resident_keys(self) -> Keys:
        """The experts on the device, ascending."""
        return np.flatnonzero(self.device.resident)

    def keys_to_remember(self) -> list[int]:
        """The experts on the device, and those that the first fill would still have brought there."""
        return [*self.resident_keys().tolist(), *self._first_fill.to_come()]

    def refresh_counters(self) -> Counters:
        """The counters, with the bytes that the links have moved by now. Any thread may call it."""
        self.counters.book_bytes()
        return self.counters

    def audit(self, *, idle: bool = False) -> None:
        """Raises LedgerError if an invariant does not hold, or, with ``idle``, if an expert is still pinned."""
        self._tiers.audit()
        if idle and self.device.pinned:
            raise LedgerError(f"{self.device.pinned} experts are pinned though nothing runs")

    def close(self) -> None:
        """Stop the movers."""
        self._tiers.close()
