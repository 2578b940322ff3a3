"""Topic ``tasks``: requests with their task type. One partition a pool. Key: the request's id."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from greenroom.core.messages.codec import Message
from greenroom.core.messages.inferences import Inference
from greenroom.core.messages.requests import Cancel, PoolNumber, Request, RequestId


class Task(Message, frozen=True, kw_only=True, tag="task"):
    """A request and its task type. ``source``: where the task type comes from; of an inference ``client``, since its
    type is the parameter that came with it."""

    request: Request | Inference
    task_type: Annotated[str, Meta(min_length=1, max_length=64)]
    source: Literal["client", "keywords"] = "keywords"

    @property
    def input_bytes(self) -> int:
        """Of an inference. A prompt has few, which were bounded as text."""
        return sum(len(one.data) for one in self.request.inputs) if isinstance(self.request, Inference) else 0


class Rejected(Message, frozen=True, kw_only=True, tag="rejected"):
    """A request whose body could not be read though its id could. It still gets an outcome."""

    request_id: RequestId
    pool: PoolNumber
    reason: str


TaskRecord = Task | Cancel | Rejected
