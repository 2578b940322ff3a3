"""A running collaboration as the engine of a worker's service."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from greenroom.coe.serving.outcomes import Outcome
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.core.errors import DeadlinePassed, GreenroomError, InvalidRequest, ModelBroken, Saturated
from greenroom.core.inference import InferenceInput, InferenceRequest
from greenroom.worker.collaboration.outputs import outputs_of
from greenroom.worker.generation_engine import EngineState
from greenroom.worker.inference_engine import InferenceResult

log = logging.getLogger(__name__)

OnResult = Callable[[InferenceResult], None]
_AGAIN_S = 0.02


def most_requests(runs: int) -> int:
    """That the engine of a worker with so many runs is to take: each may have followed one that was cancelled while it
    was computed, and still is."""
    return 2 * runs


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that waits for room in the engine. ``deadline_s``: on the engine's clock."""

    given: bytes
    parameter: str
    deadline_s: float
    priority: int
    on_result: OnResult


class CollaborationEngine:
    """An InferenceEngine: the only user of a CollaborationRuntime's engine. Used from one event loop.

    What happens on the deciding thread comes to the loop with one wake-up, however many requests it is about. Which
    requests are executed is told before what has ended, so nobody hears of an end that is still executed.
    """

    def __init__(self, runtime: CollaborationRuntime, *, unix: Callable[[], float] = time.time) -> None:
        self._runtime = runtime
        self._engine = runtime.engine
        self._unix = unix
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: Callable[[], None] = lambda: None
        self._wanted: dict[str, OnResult] = {}
        self._later: dict[str, _Asked] = {}  # of those that are wanted, for which the engine had no room
        self._retry: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._ended: deque[tuple[str, OnResult, Outcome]] = deque()
        self._executing_changed = False
        self._woken = False

    # -- on the event loop ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._engine.alive

    def listen(self, changed: Callable[[], None]) -> None:
        self._loop, self._changed = asyncio.get_running_loop(), changed
        self._engine.on_changed = self._on_changed

    def check(self, request: InferenceRequest) -> None:
        self._input_of(request.inputs, request.parameter)

    def _input_of(self, inputs: Sequence[InferenceInput], parameter: str | None) -> InferenceInput:
        """Of the kind that the first expert takes. Raises InvalidRequest."""
        expert = self._engine.first_expert(parameter or "")
        kind = str(self._runtime.collaboration.experts[expert].takes)
        for one in inputs:
            if str(one.kind) == kind:
                return one
        raise InvalidRequest(f"there is no {kind} among the inputs", param=f"inputs.{kind}", code="missing_field")

    def submit(
        self,
        request_id: str,
        inputs: Sequence[InferenceInput],
        parameter: str | None,
        *,
        deadline_ms: float,
        priority: int,
        on_result: OnResult,
    ) -> None:
        """``priority`` changes nothing here: within a collaboration requests go by expert and by how long they wait."""
        left_s = deadline_ms / 1000.0 - self._unix()
        try:
            if request_id in self._later:
                raise InvalidRequest(f"{request_id} is here already", code="duplicate_request")
            given = self._input_of(inputs, parameter).data
            asked = _Asked(given, parameter or "", self._engine.now() + left_s, priority, on_result)
            if not self._submit(request_id, asked):
                self._later[request_id] = asked
                self._try_again_soon()
        except GreenroomError as error:
            if request_id in self._wanted:  # a request of this id is here, and keeps its place
                asyncio.get_running_loop().call_soon(on_result, _result(Outcome((), error)))
                return
            self._wanted[request_id] = on_result
            self._on_end(request_id, on_result, Outcome((), error))

    def _submit(self, request_id: str, asked: _Asked) -> bool:
        """Whether there was room. Raises a GreenroomError that is its end."""
        room = True
        try:
            self._engine.submit(
                request_id,
                asked.given,
                asked.parameter,
                on_end=functools.partial(self._on_end, request_id, asked.on_result),
                deadline_s=asked.deadline_s,
                priority=asked.priority,
            )
        except ModelBroken:
            return True  # it never ends here, as the service learns from ``alive``
        except Saturated:
            room = False
        self._wanted[request_id] = asked.on_result  # its end comes to this loop, so not before
        return room

    def _try_again_soon(self) -> None:
        """Cancelled ones that are still computed have the engine's room. The worker has promised these theirs, so they
        wait. There are no more of them than it has runs."""
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_AGAIN_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        for request_id, asked in list(self._later.items()):
            try:
                if not self._submit(request_id, asked):
                    self._try_again_soon()
                    return
            except GreenroomError as error:
                self._on_end(request_id, asked.on_result, Outcome((), error))
            del self._later[request_id]

    def cancel(self, request_id: str) -> None:
        self._wanted.pop(request_id, None)
        if self._later.pop(request_id, None) is None:
            self._engine.cancel(request_id)

    def _arrived(self) -> None:
        with self._lock:
            self._woken = False
            ended, self._ended = self._ended, deque()
            changed, self._executing_changed = self._executing_changed, False
        if changed:
            self._changed()
        for request_id, on_result, outcome in ended:
            if self._wanted.get(request_id) is on_result:  # else it was cancelled meanwhile
                del self._wanted[request_id]
                on_result(_result(outcome))

    # -- from any thread ------------------------------------------------------------------------------------------

    def executing(self) -> Collection[str]:
        return self._engine.executing()

    def state(self) -> EngineState:
        engine, costs = self._engine, self._runtime.costs.costs
        return EngineState(
            running=len(engine.executing()),
            waiting=engine.waiting + len(self._later),
            resident_experts=engine.resident,
            experts=len(self._runtime.sizes),
            expert_load_ms=max(costs.load_ms_by_expert.values()),
        )

    # -- on the deciding thread -----------------------------------------------------------------------------------

    def _on_changed(self) -> None:
        self._wake(None)

    def _on_end(self, request_id: str, on_result: OnResult, outcome: Outcome) -> None:
        self._wake((request_id, on_result, outcome))

    def _wake(self, ended: tuple[str, OnResult, Outcome] | None) -> None:
        with self._lock:
            if ended is None:
                self._executing_changed = True
            else:
                self._ended.append(ended)
            if self._woken or self._loop is None:
                return
            self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._arrived)
        except RuntimeError:
            log.warning("the event loop is closed: what the collaboration has computed is for no one")


def _result(outcome: Outcome) -> InferenceResult:
    error = outcome.error
    if error is not None:
        return InferenceResult(
            error=str(error),
            invalid=isinstance(error, InvalidRequest),
            expired=isinstance(error, DeadlinePassed),
        )
    return InferenceResult(outputs_of(outcome))
