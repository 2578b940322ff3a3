"""A model of this process as the engine of a worker's service."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import GreenroomError, InvalidRequest, Saturated
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest
from greenroom.experts.copying.device_errors import device_loss
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.policies.base.array_types import Scores
from greenroom.policies.base.events import Artifact, Prediction
from greenroom.worker.faults import Fault
from greenroom.worker.generation_engine import ArtifactVersion, EngineState, Events, RecordedRouting
from greenroom.worker.model.model_runtime import ModelRuntime
from greenroom.worker.traces.routing import RoutingRecorder

log = logging.getLogger(__name__)

_MOST_PREDICTIONS = 64
_MOST_SWAPS = 8


class ModelEngine:
    """Generates on the batch loop of a ModelRuntime, of which it is the only user. Used from one event loop.

    Tokens come to the event loop with one wake-up a step, however many requests there are. Predictions and artifacts
    reach the expert policy on the model's thread, between steps. Few of them may wait; of more the oldest are dropped.
    """

    def __init__(
        self, worker: ModelRuntime, recorder: RoutingRecorder | None = None, *, fault: Fault | None = None
    ) -> None:
        self._worker = worker
        self._fault = fault
        self._recorder = recorder
        self._sequences: dict[int, int] = {}
        self._held: dict[int, GenerationRequest] = {}
        self._events: Events = []
        self._predictions: deque[Prediction] = deque(maxlen=_MOST_PREDICTIONS)
        self._swaps: deque[tuple[Artifact, ArtifactVersion]] = deque(maxlen=_MOST_SWAPS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Callable[[Events], None] | None = None
        self._measured = _StepTime()
        if recorder is not None:
            worker.experts.listener = recorder
        worker.loop.between_steps = self._pause

    @property
    def alive(self) -> bool:
        loop = self._worker.loop
        return loop.alive and loop.failure is None  # the thread lives on for a moment after a failure

    def listen(self, take: Callable[[Events], None]) -> None:
        self._loop, self._take = asyncio.get_running_loop(), take

    def admit_check(self, request: GenerationRequest) -> None:
        self._worker.loop.engine.admit_check(request)

    def begin(self, number: int, request: GenerationRequest) -> None:
        if not self._submit(number, request):
            self._held[number] = request

    def _submit(self, number: int, request: GenerationRequest) -> bool:
        """False where it can not be taken yet. It is tried again at the end of another generation."""
        try:
            self._sequences[number] = self._worker.loop.submit(request, functools.partial(self._put, number))
        except Saturated:
            return False
        except InvalidRequest as error:
            if error.code == "duplicate_request":
                return False  # an earlier generation of this request is still ending
            self._refuse(number, request, error)
        except GreenroomError as error:
            self._refuse(number, request, error)
        return True

    def _refuse(self, number: int, request: GenerationRequest, error: GreenroomError) -> None:
        self._finish(number, Finished(FinishReason.FAILED, len(request.prompt_ids), len(request.prefix), str(error)))

    def _finish(self, number: int, finished: Finished) -> None:
        """Tell the end of one that the batch loop does not have."""
        events: Events = [(number, finished)]
        asyncio.get_running_loop().call_soon(self._arrived, events)

    def cancel(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            self._finish(number, Finished(FinishReason.CANCELLED, len(held.prompt_ids), len(held.prefix)))
        elif number in self._sequences:
            self._worker.loop.cancel(self._sequences[number])

    def take_routing(self, number: int) -> RecordedRouting | None:
        sequence = self._sequences.get(number)
        routed = None if self._recorder is None or sequence is None else self._recorder.take(sequence)
        if routed is None:
            return None
        made = {kind: one.created_ms for kind, one in self.artifacts.items() if one is not None}
        return replace(routed, artifacts=made)

    def foresee(self, prediction: Prediction) -> None:
        self._predictions.append(prediction)

    @property
    def artifacts(self) -> Mapping[str, ArtifactVersion | None]:
        return self._worker.artifacts

    def swap(self, file: ArtifactFile) -> None:
        self._swaps.append((self._worker.prepare(file), ArtifactVersion.of(file)))

    def state(self) -> EngineState:
        worker = self._worker
        stats = worker.loop.stats()
        kv = worker.loop.engine.kv
        expert_load_ms = self._expert_load_ms()
        return EngineState(
            kv_tokens=kv.max_rows,
            kv_tokens_free=kv.layout.rows_within(max(0, stats.kv_free_bytes)),
            running=stats.running,
            waiting=stats.waiting,
            resident_experts=len(worker.experts.resident_keys()),
            experts=worker.experts.catalogue.size,
            expert_load_ms=expert_load_ms,
            token_ms=self._measured.of(stats.step_seconds, stats.rows),
            load_ms_by_task=self._load_ms_by_task(expert_load_ms),
        )

    def _load_ms_by_task(self, expert_load_ms: float) -> dict[str, float]:
        """From the profile's measurements where there are any, else the time of one expert times their number."""
        profile = self._worker.profile
        costs = None if profile is None or profile.costs is None else profile.costs
        measured = costs if costs is not None and costs.load_ms_by_experts else None
        return {
            task: count * expert_load_ms if measured is None else measured.load_ms(count)
            for task, count in self._worker.experts.policy.loads_by_task().items()
        }

    def _expert_load_ms(self) -> float:
        link = self._worker.link
        if link is not None:
            experts = self._worker.experts
            return experts.load_seconds(link.seconds(int(experts.catalogue.bytes_of.mean()))) * 1000.0
        counters = self._worker.experts.counters  # the pack was too small to be measured
        return counters.stall_seconds * 1000.0 / max(1, counters.on_demand_fetches)

    # -- on the model's thread -------------------------------------------------------------------------------------

    def _put(self, number: int, event: Event) -> None:
        self._events.append((number, event))

    def _pause(self) -> None:
        """Called between two steps."""
        while self._swaps:
            artifact, version = self._swaps.popleft()
            try:
                self._worker.swap(artifact, version)
            except Exception:
                log.exception("the expert policy can not use version %d of %s", version.version, artifact.kind)
        while self._predictions:
            try:
                self._worker.experts.predicted(self._predictions.popleft())
            except Exception:
                log.exception("the expert policy can not use a prediction")
        if not self._events or self._loop is None:
            return
        events, self._events = self._events, []
        if self._fault is not None:
            self._fault.steps(len(events), self._worker.experts.movers[0], self._lose_device)
        try:
            self._loop.call_soon_threadsafe(self._arrived, events)
        except RuntimeError:
            log.warning("the event loop is closed: %d events of requests are for no one", len(events))

    def _lose_device(self) -> None:
        """The fault ``device``: from now on every forward fails as on a GPU with a dead context."""

        def lost(chunks: Sequence[Chunk], paths: Scores | None = None) -> torch.Tensor:
            raise device_loss()

        self._worker.loop.engine.model.forward = lost  # type: ignore[method-assign]

    # -- on the event loop -----------------------------------------------------------------------------------------

    def _arrived(self, events: Events) -> None:
        if self._take is not None:
            self._take(events)
        ended = False
        for number, event in events:
            if type(event) is Finished:
                ended = True
                self.take_routing(number)  # drops a recording that was not asked for
                self._sequences.pop(number, None)
        if ended:
            for number, request in list(self._held.items()):
                if self._submit(number, request):
                    self._held.pop(number, None)


class _StepTime:
    """Milliseconds of a step for each of its rows, over the steps since the last call."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._rows = 0
        self._value = 0.0

    def of(self, seconds: float, rows: int) -> float:
        """``seconds`` and ``rows``: the totals of all steps so far."""
        if rows > self._rows:
            self._value = (seconds - self._seconds) * 1000.0 / (rows - self._rows)
            self._seconds, self._rows = seconds, rows
        return self._value
