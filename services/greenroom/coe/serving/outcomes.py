"""What is asked of a running collaboration, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from greenroom.coe.computing.expert_result import Stage
from greenroom.coe.computing.inputs import Input
from greenroom.core.errors import GreenroomError
from greenroom.policies.placement.placement_policy import PendingRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. ``stages``: what its experts said, in order; the last one's result is the answer.

    ``error``: why it has no answer. InvalidRequest if its input is at fault. Then ``stages`` are those before.
    """

    stages: tuple[Stage, ...]
    error: GreenroomError | None = None

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(stage.expert for stage in self.stages)


@dataclass(slots=True, eq=False)
class InFlight:
    """A request that has not ended. ``number``: its own; a request's id may come again after a cancel.

    ``pending``: the stage that waits or runs. ``entered``: the deciding thread knows it. ``runs``: an executor has it.
    ``cancelled``: no outcome is to be told any more, since one was, or nobody wants one.
    """

    number: str
    request_id: str
    given: Input = field(repr=False)
    value: str
    deadline_ms: float
    priority: int
    on_end: Callable[[Outcome], object]
    pending: PendingRequest | None = None
    entered: bool = False
    runs: bool = False
    cancelled: bool = False
    stages: list[Stage] = field(default_factory=list)
