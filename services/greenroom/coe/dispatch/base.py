"""What a dispatcher is told and what it answers.

One thread owns it. Executors compute, movers load; both are told to, and tell when they have done it. So the same
object can run a worker and a simulation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import SequenceEnd
from greenroom.policies.placement.placement_policy import PendingRequest, Shed


class ExpertMemory(Protocol):
    """Memory in which experts are held, of one executor or of several."""

    def waits(self, request: PendingRequest) -> None:
        """It will be computed with an expert in this memory."""
        ...

    def forget(self, request: PendingRequest, end: SequenceEnd) -> None:
        """It waits no more, and is not computed: it was cancelled or has failed."""
        ...

    def hold(self, expert: int, requests: Sequence[PendingRequest]) -> None:
        """Keep the expert, which is there, until it is released as often: these requests wait no more."""
        ...

    def release(self, expert: int) -> None: ...

    def fetch(self, expert: int, *, whoever: bool = True) -> bool:
        """Begin to bring it, if it is neither there nor on its way; others leave for it as the policy says.

        ``whoever``: also those that requests wait for. False: there is no room that may be made, so nothing was begun.
        """
        ...

    def has(self, expert: int) -> bool:
        """Whether it is there."""
        ...

    @property
    def residents(self) -> Keys:
        """Those that are there."""
        ...

    @property
    def loading(self) -> int:
        """How many are on their way."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """The executor is to compute these requests, all of the expert, which is held for it until ``finished``."""

    executor: str
    expert: int
    requests: tuple[PendingRequest, ...]


class Dispatcher(ABC):
    """Every request that arrives is run exactly once, by one executor at a time for each batch, or shed at once."""

    @abstractmethod
    def arrived(self, requests: Sequence[PendingRequest], now_ms: float) -> tuple[Shed, ...]:
        """Requests that need their ``expert``: new ones, and further stages of others. Returns those that are not run,
        and why; it knows nothing of them any more.
        """

    @abstractmethod
    def finished(self, executor: str, now_ms: float) -> None:
        """The executor has computed what it was told to."""

    @abstractmethod
    def cancel(self, request: PendingRequest) -> bool:
        """Nobody wants this stage any more: it leaves, as if it had never come. False: it does not wait, so it runs or
        has ended, or was never here.
        """

    @abstractmethod
    def failed(self, memory: ExpertMemory, expert: int) -> tuple[PendingRequest, ...]:
        """The expert could not be brought into this memory. Those that wait for it there leave, and are returned; the
        dispatcher knows nothing of them any more. Later ones try again.
        """

    @abstractmethod
    def next_runs(self, now_ms: float) -> list[Run]:
        """What is to be computed from now on. To be asked after each of these events, and when an expert has come."""

    @property
    def asks_ms(self) -> float | None:
        """When ``next_runs`` is to be asked though nothing has happened by then. None: never, as of all that serve."""
        return None

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that run nowhere."""
