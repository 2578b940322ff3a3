"""The requests that are here: by id for those who cancel, by number for the deciding thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from greenroom.coe.computing.inputs import Input
from greenroom.coe.serving.outcomes import InFlight, Outcome
from greenroom.core.errors import GreenroomError, InvalidRequest, Saturated
from greenroom.policies.placement.placement_policy import PendingRequest

log = logging.getLogger(__name__)

NO_DEADLINE = float("inf")


class RequestsHere:
    """``add`` and ``withdraw`` are for any thread, everything else for the deciding one.

    Each request is told one outcome at most, and none after it was withdrawn. At most ``most`` are here.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: deque[InFlight] = deque()
        """For the deciding thread: those that are new, and once more those that were withdrawn."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._by_id: dict[str, InFlight] = {}  # those that may still be told
        self._count = 0  # with those that run for no one
        self._here: dict[str, InFlight] = {}
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._here)

    def add(
        self,
        request_id: str,
        given: Input,
        value: str,
        *,
        deadline_ms: float,
        priority: int,
        on_end: Callable[[Outcome], object],
        first_stage: Callable[[InFlight], PendingRequest],
    ) -> None:
        """Raises InvalidRequest if the id is here, Saturated if there are too many."""
        with self._lock:
            if request_id in self._by_id:
                raise InvalidRequest(f"{request_id} is here already", code="duplicate_request")
            if self._count >= self.most:
                raise Saturated(f"{self._count} requests are here, which is the most")
            request = InFlight(str(next(self._numbers)), request_id, given, value, deadline_ms, priority, on_end)
            self._by_id[request_id] = request
            request.pending = first_stage(request)
            self._count += 1
            self.asked.append(request)

    def withdraw(self, request_id: str) -> bool:
        """Its outcome is not to be told any more, and its id may come again. False: it is not here."""
        with self._lock:
            request = self._by_id.pop(request_id, None)
            if request is not None:
                request.cancelled = True
                self.asked.append(request)
        return request is not None

    def enter(self, request: InFlight) -> None:
        """The deciding thread has taken it."""
        self._here[request.number] = request
        if request.deadline_ms != NO_DEADLINE:
            heapq.heappush(self._deadlines, (request.deadline_ms, request.number))

    def of(self, number: str) -> InFlight:
        return self._here[number]

    def has(self, request: InFlight) -> bool:
        return request.number in self._here

    def tell(self, request: InFlight, error: GreenroomError | None) -> bool:
        """Its outcome, unless it was told one or was withdrawn: then False. A caller that can not take it is logged:
        the others are to be told theirs.
        """
        with self._lock:
            if request.cancelled:
                return False
            request.cancelled = True
            self._by_id.pop(request.request_id, None)
        try:
            request.on_end(Outcome(tuple(request.stages), error))
        except Exception:
            log.exception("what was to be told the outcome of %s has failed", request.request_id)
        return True

    def forget(self, request: InFlight) -> None:
        """It has left for good."""
        del self._here[request.number]
        with self._lock:
            self._count -= 1

    def overdue(self, now_ms: float) -> list[InFlight]:
        """Those whose deadline has passed since the last call."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, number = heapq.heappop(self._deadlines)
            if number in self._here:
                found.append(self._here[number])
        if len(self._deadlines) > 4 * len(self._here) + 1000:  # most are of requests that have ended
            self._deadlines = [one for one in self._deadlines if one[1] in self._here]
            heapq.heapify(self._deadlines)
        return found

    @property
    def next_deadline_ms(self) -> float:
        """Not before this one. Infinite: there is none."""
        return self._deadlines[0][0] if self._deadlines else NO_DEADLINE
