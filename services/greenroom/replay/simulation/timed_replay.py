"""Timed replay: the expert engine itself on simulated links and a virtual clock, with a trace's routing.

Bookkeeping, prefetching and the movers' queues are the engine's own, so predictions can not drift from what the engine
does. Only the times of links and computations are assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.experts.bookkeeping.counters import Counters, PhaseCounters
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.layout import PAGE_BYTES, PackLayer, PackManifest, RecordLayout, align
from greenroom.experts.source import Arriving
from greenroom.policies.base.events import (
    ROUTER,
    UNKNOWN_TASK,
    Artifact,
    Phase,
    SequenceEnd,
    SequenceInfo,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.replay.hit_rates import ReplayResult
from greenroom.replay.simulation.simulated_hardware import LinkProfile, SimulatedHardware
from greenroom.replay.simulation.simulated_predictions import GradedPredictions, TracePredictions
from greenroom.replay.traces.replayed_paths import ReplayedPaths
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.scheduled_steps import ScheduledStep
from greenroom.replay.traces.steps import TraceStep

LINK_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """How long a step computes, in seconds. Raises InvalidConfig.

    ``step_s``: once a step. ``layer_s``: in each layer before its experts, plus ``layer_row_s`` a row. ``expert_s``:
    for each distinct expert, plus ``row_s`` for each of its rows.
    """

    layer_s: float = 0.0
    expert_s: float = 0.0
    row_s: float = 0.0
    layer_row_s: float = 0.0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not getattr(self, entry.name) >= 0:
                raise InvalidConfig(entry.name, getattr(self, entry.name), "0 seconds or more")


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """Of the steps with prompt rows, or of the others: see PhaseCounters. Bytes are those read from the lowest tier."""

    steps: int
    rows: int
    seconds: float
    stall_seconds: float
    lookups: int
    hits: int
    on_demand_fetches: int
    bytes_moved: int
    bytes_on_demand: int

    @classmethod
    def until_now(cls, counters: PhaseCounters) -> PhaseResult:
        moved = counters.bytes_by_link["disk"]
        return cls(
            counters.steps,
            counters.rows,
            counters.seconds,
            counters.stall_seconds,
            counters.lookups,
            counters.hits,
            counters.on_demand_fetches,
            moved.total,
            moved.on_demand,
        )

    def since(self, before: PhaseResult) -> PhaseResult:
        """What was added to ``before``."""
        return PhaseResult(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class TimedResult:
    """The engine's counters, and the clock's ``seconds``; of these ``stall_seconds`` were spent waiting.

    An expert that was still on its way when it was needed is a miss. ``prefill``: the part of steps with prompt rows;
    ``decode``: of all others. Together they are the whole.
    """

    tokens: int
    seconds: float
    stall_seconds: float
    lookups: int
    hits: int
    evictions: int
    on_demand_fetches: int
    prefetches: int
    prefetches_used: int
    prefetches_wasted: int
    bytes_moved: int
    """Those read from the lowest tier."""
    prefill: PhaseResult
    decode: PhaseResult

    @property
    def phases(self) -> dict[str, PhaseResult]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def cache(self) -> ReplayResult:
        return ReplayResult(self.lookups, self.hits, self.evictions)

    @property
    def hit_rate(self) -> float:
        return self.cache.hit_rate

    @property
    def compute_seconds(self) -> float:
        return self.seconds - self.stall_seconds


class SimulatedStore:
    """A lowest tier of the traced model's shapes that reads nothing."""

    def __init__(self, trace: RoutingTrace, expert_bytes: int | None) -> None:
        catalogue = trace.catalogue(expert_bytes=expert_bytes)
        sizes = catalogue.bytes_of[catalogue.first[:-1]].tolist()
        self.manifest = PackManifest(
            trace.model or "trace",
            "trace",
            "trace",
            tuple(
                PackLayer(f"{layer}", experts, k, RecordLayout((), align(size, PAGE_BYTES)))
                for layer, (experts, k, size) in enumerate(
                    zip(catalogue.experts_per_layer.tolist(), catalogue.top_k.tolist(), sizes, strict=True)
                )
            ),
        )

    def read_part(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        pass

    def is_checked(self, layer: int, expert: int) -> bool:
        return True

    def check(self, layer: int, expert: int, record: memoryview) -> None:
        pass


MakesPredictors = Callable[[ExpertPolicy], Sequence[PicksPredictor]]
"""See ``TimedReplay.predictors``. A function of a module, so that processes can be handed it."""


def no_predictors(policy: ExpertPolicy) -> Sequence[PicksPredictor]:
    return ()


MakesPaths = Callable[[ExpertPolicy, RoutingTrace], TokenPaths | None]
"""See ``TimedReplay.paths``. A function of a module, so that processes can be handed it."""


def no_paths(policy: ExpertPolicy, trace: RoutingTrace) -> TokenPaths | None:
    return None


@dataclass(frozen=True, slots=True)
class TimedReplay:
    """What compared policies have in common: the model's shape, the machine, the budgets.

    ``expert_bytes``: of every expert; None: what was recorded for each layer. ``recall``: that of predictions (None:
    requests for predictions get no answer). ``graded``: they are chances (``GradedPredictions``), not names. ``seed``:
    of their mistakes. ``predictors``: what the engine runs beside the policy's own, made anew for each policy; they
    take no time. ``paths``: what foretells each step's rows from their tokens, which takes no time either. It is asked
    only where tokens were recorded.
    """

    trace: RoutingTrace
    expert_bytes: int | None
    disk: LinkProfile
    compute: ComputeProfile
    upload: LinkProfile | None = None
    reads: ReadSettings = field(default_factory=ReadSettings)
    host_slots: int = 0
    queue_ahead: int = EngineConfig(1).queue_ahead
    recall: float | None = None
    graded: bool = False
    seed: int = 0
    predictors: MakesPredictors = no_predictors
    paths: MakesPaths = no_paths

    def catalogue(self) -> Catalogue:
        """The experts that a policy for it is made for."""
        manifest = SimulatedStore(self.trace, self.expert_bytes).manifest
        return catalogue_of(manifest, "replay", decoder_start=self.trace.decoder_start)

    def run(
        self,
        policy: ExpertPolicy,
        steps: Iterable[TraceStep | ScheduledStep],
        device_slots: int,
        *,
        resident: Sequence[int] = (),
        waits: list[list[float]] | None = None,
        artifacts: Iterable[Artifact] = (),
    ) -> TimedResult:
        """Time and counts of ``steps`` under ``device_slots``. ``resident`` experts are loaded before, in this order.

        ``waits``, ``artifacts``: see TimedEngine. Raises BudgetTooSmall as the engine does, InvalidConfig for an
        artifact that can not be predicted by.
        """
        with TimedEngine(self, policy, device_slots, resident, waits=waits, artifacts=artifacts) as engine:
            return engine.run(steps)


class TimedEngine:
    """An engine on simulated hardware for several runs of steps. A context manager.

    ``compute`` and the disk may change between two runs. ``artifacts``: for the policy and what predicts for it. Each
    layer appends to ``waits``, where given, how many seconds
    it was blocked for each of its experts: 0 where one was resident, or landed while others ran.
    """

    def __init__(
        self,
        setup: TimedReplay,
        policy: ExpertPolicy,
        device_slots: int,
        resident: Sequence[int] = (),
        *,
        waits: list[list[float]] | None = None,
        artifacts: Iterable[Artifact] = (),
    ) -> None:
        self.compute = setup.compute
        self._waits = waits
        self._tasks = setup.trace.task
        answers = GradedPredictions if setup.graded else TracePredictions
        self._predictions = None if setup.recall is None else answers(policy.catalogue, setup.recall, seed=setup.seed)
        self._paths = ReplayedPaths(setup.paths(policy, setup.trace))
        self._hardware = SimulatedHardware(setup.disk, setup.upload, setup.reads)
        config = EngineConfig(
            device_slots=device_slots,
            host_slots=setup.host_slots,
            queue_ahead=setup.queue_ahead,
            transfer_timeout_s=LINK_DEADLINE_S,
        )
        store = SimulatedStore(setup.trace, setup.expert_bytes)
        self._engine = ExpertEngine(
            store, policy.catalogue, policy, config, hardware=self._hardware, predictors=setup.predictors(policy)
        )
        for artifact in artifacts:
            self._engine.swapped(self._engine.prepare(artifact))
        self._engine.preload(resident)

    def run(self, steps: Iterable[TraceStep | ScheduledStep]) -> TimedResult:
        """Time and counts of these steps. Scheduled ones bring their own paths, and the step planned to follow."""
        counters, begin = self._engine.refresh_counters(), self._hardware.now()
        before, stalled_before, phases_before = _copy(counters), counters.stall_seconds, _phases(counters)
        tokens = 0
        for step in steps:
            if isinstance(step, ScheduledStep):  # who scheduled it tells what foretells of its picks
                self._run(step)
                tokens += len(step.step.picks)
            else:
                self.step(step)
                tokens += len(step.picks)
        self._hardware.settle()
        counters, seconds = self._engine.refresh_counters(), self._hardware.now() - begin
        after, phases = _copy(counters), _phases(counters)
        counted: dict[str, Any] = {name: int(after[name] - before[name]) for name in _COUNTED}
        return TimedResult(
            tokens=tokens,
            seconds=seconds,
            stall_seconds=counters.stall_seconds - stalled_before,
            prefill=phases["prefill"].since(phases_before["prefill"]),
            decode=phases["decode"].since(phases_before["decode"]),
            **counted,
        )

    def step(self, step: TraceStep) -> None:
        """Run these rows; the clock then stands at their end."""
        self._run(ScheduledStep(step, self._paths.of(step)))
        self._paths.ran(step)

    def _run(self, scheduled: ScheduledStep) -> None:
        step = scheduled.step
        engine, clock, compute = self._engine, self._hardware.clock, self.compute
        for sequence in step.started:
            info = SequenceInfo(sequence, UNKNOWN_TASK if self._tasks is None else self._tasks[sequence])
            engine.sequence_queued(info)
            engine.sequence_started(info)
        picks = step.picks.astype(np.int64)
        before_experts = compute.layer_s + compute.layer_row_s * len(picks)
        if scheduled.following is not None:
            planned = scheduled.following.step
            prefill = planned.phases != Phase.DECODE
            engine.step_planned(planned.sequences, prefill, planned.tokens, scheduled.following.paths)
        with engine.step_of(step.sequences, step.phases, step.tokens, scheduled.paths):
            clock.advance(compute.step_s)
            for layer in self._layers_of(picks):
                engine.layer_entered(layer)
                clock.advance(before_experts)
                own = picks[:, layer]
                with engine.routed(layer, own) as landing:
                    if self._predictions is not None:
                        request = engine.take_request(ROUTER)
                        if request is not None:
                            engine.predicted(self._predictions.answer(request, picks))
                    rows = np.bincount(own.ravel()).astype(np.float64)
                    self._compute(landing, rows * compute.row_s + compute.expert_s)
        for sequence in step.ended:
            engine.sequence_ended(sequence, SequenceEnd.FINISHED)

    @property
    def experts(self) -> ExpertEngine:
        """The engine, for a batch loop that tells it of sequences itself."""
        return self._engine

    def now(self) -> float:
        """Seconds since the start."""
        return self._hardware.now()

    def rest_until(self, now: float) -> None:
        """Nothing is computed until then; the links go on. Does nothing for a time that has passed."""
        self._hardware.clock.advance(max(0.0, now - self._hardware.now()))
        self._hardware.settle()

    def change_disk(self, link: LinkProfile) -> None:
        """Read the disk at this speed from now on."""
        self._hardware.change_disk(link)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _layers_of(self, picks: NDArray[np.int64]) -> list[int]:
        """The layers that run: in an encoder-decoder a step runs either part."""
        width = self._engine.catalogue.experts_per_layer[:, None]
        layers: list[int] = np.flatnonzero((picks < width).any(axis=(0, 2))).tolist()
        return layers

    def _compute(self, landing: Arriving, seconds: NDArray[np.float64]) -> None:
        """Compute each expert as it is handed out: ``seconds[expert]``."""
        clock, waits, asked = self._hardware.clock, [], self._hardware.clock.now
        for expert, _ in landing:
            waits.append(clock.now - asked)
            clock.advance(float(seconds[expert]))
            asked = clock.now
        if self._waits is not None:
            self._waits.append(waits)


_COUNTED = (
    "lookups", "hits", "evictions", "on_demand_fetches", "prefetches", "prefetches_used", "prefetches_wasted",
    "bytes_moved",
)  # fmt: skip


def _copy(counters: Counters) -> dict[str, int]:
    moved = {"bytes_moved": counters.bytes_by_link["disk"]}
    return moved | {name: getattr(counters, name) for name in _COUNTED if name not in moved}


def _phases(counters: Counters) -> dict[str, PhaseResult]:
    return {name: PhaseResult.until_now(part) for name, part in counters.phases.items()}
