"""Both kinds of engine behind one interface: what a worker's service runs tasks with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import Finished, Token
from greenroom.core.inference import InferenceRequest
from greenroom.core.messages import Inference, Task
from greenroom.worker.generation_engine import EngineState, Events, GenerationEngine
from greenroom.worker.inference_engine import InferenceEngine, InferenceResult
from greenroom.worker.runs.results import request_of


class TaskEngine(Protocol):
    """As GenerationEngine, with tasks in place of requests."""

    @property
    def alive(self) -> bool: ...

    def listen(self, take: Callable[[Events], None], changed: Callable[[], None]) -> None:
        """``changed``: called when ``executing`` has changed."""
        ...

    def check(self, task: Task) -> None:
        """Raises InvalidRequest for a task that can never be served here."""
        ...

    def begin(self, number: int, task: Task, prefix: tuple[Token, ...], now_ms: float) -> None: ...

    def cancel(self, number: int) -> None: ...

    def state(self) -> EngineState: ...

    def executing(self) -> Collection[str] | None:
        """The requests that are being executed, where the engine has many and arranges them itself. Else None: all that
        it has may be."""
        ...


class Generating:
    """A model that generates text."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    @property
    def alive(self) -> bool:
        return self._engine.alive

    def listen(self, take: Callable[[Events], None], changed: Callable[[], None]) -> None:
        self._engine.listen(take)

    def check(self, task: Task) -> None:
        if isinstance(task.request, Inference):
            raise InvalidRequest("this worker generates text; a collaboration of experts takes inferences")
        self._engine.admit_check(request_of(task))

    def begin(self, number: int, task: Task, prefix: tuple[Token, ...], now_ms: float) -> None:
        self._engine.begin(number, request_of(task, prefix, now_ms=now_ms))

    def cancel(self, number: int) -> None:
        self._engine.cancel(number)

    def state(self) -> EngineState:
        return self._engine.state()

    def executing(self) -> None:
        return None


class Inferring:
    """A collaboration of experts. A run has no tokens: its only event is its end."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._ids: dict[int, str] = {}
        self._take: Callable[[Events], None] = lambda events: None

    @property
    def alive(self) -> bool:
        return self._engine.alive

    def listen(self, take: Callable[[Events], None], changed: Callable[[], None]) -> None:
        self._take = take
        self._engine.listen(changed)

    def check(self, task: Task) -> None:
        request = task.request
        if not isinstance(request, Inference):
            raise InvalidRequest("this worker serves a collaboration of experts, which takes inferences, not prompts")
        self._engine.check(InferenceRequest(request.request_id, request.inputs, request.parameter))

    def begin(self, number: int, task: Task, prefix: tuple[Token, ...], now_ms: float) -> None:
        request = task.request
        assert isinstance(request, Inference), "it was checked"
        self._ids[number] = request.request_id
        self._engine.submit(
            request.request_id,
            request.inputs,
            request.parameter,
            deadline_ms=request.deadline_ms,
            priority=request.priority,
            on_result=lambda result: self._ended(number, result),
        )

    def cancel(self, number: int) -> None:
        request_id = self._ids.pop(number, None)
        if request_id is not None:
            self._engine.cancel(request_id)

    def state(self) -> EngineState:
        return self._engine.state()

    def executing(self) -> Collection[str]:
        return self._engine.executing()

    def _ended(self, number: int, result: InferenceResult) -> None:
        if self._ids.pop(number, None) is not None:
            end = Finished(result.reason, 0, 0, result.error, outputs=result.outputs, invalid=result.invalid)
            self._take([(number, end)])
