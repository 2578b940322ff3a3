"""From the event of an inference to its result. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.generation import Event, Finished, FinishReason
from greenroom.core.inference import InferenceRequest
from greenroom.gateway.replies.choices import Delta, GenerationFailed, failure_of


@dataclass(frozen=True, slots=True)
class InferenceJob:
    """The ``index``-th element of a batch of ``count``."""

    index: int
    request: InferenceRequest
    count: int = 1


class InferenceAssembler:
    """Has one part, the last."""

    def __init__(self, job: InferenceJob) -> None:
        self._index = job.index
        self._count = job.count
        self.finish: FinishReason | None = None
        """Why it ended, None until then."""

    def push(self, event: Event) -> Delta | None:
        """Raises GenerationFailed."""
        if not isinstance(event, Finished):
            return None
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            failure = failure_of(event)
            if failure.invalid and self._count > 1:
                message = f"element {self._index}: {failure}"
                raise GenerationFailed(message, failure.reason, invalid=True)
            raise failure
        if event.outputs is None:
            raise GenerationFailed("the inference ended without outputs", FinishReason.FAILED)
        self.finish = event.reason
        return Delta(self._index, "", finish=event.reason, outputs=event.outputs)
