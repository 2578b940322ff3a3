"""What a worker's service judges inferences with: a collaboration of experts, or its twin in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from greenroom.core.collaboration import CollaborationCard
from greenroom.core.generation import FinishReason
from greenroom.core.inference import InferenceInput, InferenceRequest
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.core.messages import ModelCard
from greenroom.worker.generation_engine import EngineState

TAKES_AT_ONCE: Final = 4000
"""Requests that a worker with such an engine announces to take: the engine arranges them, and needs a queue for that. A
scheduler reads 4096 ahead, and a server has as many calls."""
INPUT_COPIES: Final = 2
"""How often an input is in a worker: in the call that brought it, and taken out of that."""


def model_card(name: str, digest: str, collaboration: CollaborationCard, *, created: int = 0) -> ModelCard:
    """What a worker with such an engine announces. ``digest``: of the definition and all weights, in hexadecimal; the
    workers of a pool must share it. ``created``: Unix time in s."""
    return ModelCard(
        name=name,
        digest=digest,
        text_digest="",
        max_model_len=2,
        vocab_size=1,
        created=created,
        collaboration=collaboration,
    )


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """How one request ended: with ``outputs``, or with an ``error`` for people. ``invalid``: the request is at fault,
    as where its image can not be decoded, and no worker can serve it. ``expired``: its deadline has passed."""

    outputs: InferenceOutputs | None = None
    error: str | None = None
    invalid: bool = False
    expired: bool = False

    @property
    def reason(self) -> FinishReason:
        if self.outputs is not None:
            return FinishReason.STOP
        return FinishReason.EXPIRED if self.expired else FinishReason.FAILED


@runtime_checkable
class InferenceEngine(Protocol):
    """Takes thousands of requests and arranges them itself.

    Used from one event loop, that of ``listen``, except for ``state`` and ``executing``. What it calls back it calls on
    that loop. No method waits.
    """

    @property
    def alive(self) -> bool:
        """Whether it can execute. Once it can not, what has not ended never will."""
        ...

    def listen(self, changed: Callable[[], None]) -> None:
        """``changed`` is called whenever ``executing`` has changed, and when ``alive`` has.

        It should be called before a batch is given to an executor, not after: if the batch ends the process, the
        scheduler knows which requests were in it only from what it was told.
        """
        ...

    def check(self, request: InferenceRequest) -> None:
        """Raises InvalidRequest for a request that can never be served here."""
        ...

    def submit(
        self,
        request_id: str,
        inputs: Sequence[InferenceInput],
        parameter: str | None,
        *,
        deadline_ms: float,
        priority: int,
        on_result: Callable[[InferenceResult], None],
    ) -> None:
        """Queue a request. ``on_result`` is called once, at its end, unless it is cancelled before.

        ``parameter``: the router's value. ``deadline_ms``: Unix time; the scheduler ends it then. ``priority``: higher
        is sooner. An id is submitted again only after its end or its cancel.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Its result is not wanted. ``on_result`` is not called any more, whatever is executed of it. The id may be
        submitted again at once. Nothing happens where there is no such request."""
        ...

    def executing(self) -> Collection[str]:
        """The requests in the batches that executors have. From any thread."""
        ...

    def state(self) -> EngineState:
        """``running``: requests being executed; ``waiting``: those behind them. There is no KV. May take milliseconds.
        Called from any thread, by one at a time."""
        ...
