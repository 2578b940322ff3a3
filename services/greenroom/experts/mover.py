"""One link between two tiers, and the one thread that moves experts over it.

What waits is ordered: on-demand fetches in the order of asking, then the others by priority. Only the owner of the
engine queues, promotes and withdraws; the mover takes the first, copies, and posts the result for the owner.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from greenroom.policies.events import Reason, Tier

JOIN_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Job:
    """One expert to be moved; ``target_slot`` is reserved for it. ``priority``: higher is sooner."""

    expert: int
    source: Tier
    target: Tier
    source_slot: int
    target_slot: int
    reason: Reason
    priority: float = 0.0
    error: BaseException | None = None


class Outbox:
    """Finished jobs of all movers, for the engine's owner to collect."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._finished: list[Job] = []

    def post(self, job: Job) -> None:
        with self._condition:
            self._finished.append(job)
            self._condition.notify()

    def collect(self) -> list[Job]:
        """What has finished since the last call, in order; does not wait."""
        if not self._finished:
            return []
        with self._condition:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has finished; False where the time ran out."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._finished), timeout_s)


class Mover:
    """The thread of one link. ``copy`` moves a job's bytes and raises where it can not; returns the bytes moved."""

    def __init__(self, name: str, copy: Callable[[Job], int], outbox: Outbox) -> None:
        self.name = name
        self.bytes_moved = 0
        self._copy = copy
        self._outbox = outbox
        self._changed = threading.Condition()
        self._demand: deque[Job] = deque()
        self._ahead: dict[int, Job] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"mover {name}", daemon=True)
        self._thread.start()

    @property
    def waiting_ahead(self) -> int:
        """Queued jobs that no layer waits for."""
        return len(self._ahead)

    def put(self, job: Job) -> None:
        """Queue a job; bounded by the slots of its target, since each job holds one."""
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the mover {self.name} is closed")
            if job.reason is Reason.ON_DEMAND:
                self._demand.append(job)
            else:
                self._ahead[job.expert] = job
            self._changed.notify()

    def promote(self, expert: int) -> bool:
        """A layer now waits for a queued job: move it up. False where it is not queued (it runs, or is done)."""
        with self._changed:
            job = self._ahead.pop(expert, None)
            if job is None:
                return False
            self._demand.append(job)
            return True

    def reprioritise(self, expert: int, priority: float) -> None:
        """Change the place of a queued job, if it is still queued."""
        with self._changed:
            if expert in self._ahead:
                self._ahead[expert].priority = priority

    def withdraw(self, expert: int) -> Job | None:
        """Take back a job that no layer waits for and that has not begun; None where it is too late."""
        with self._changed:
            return self._ahead.pop(expert, None)

    def least_urgent(self) -> int | None:
        """The queued job to withdraw first."""
        with self._changed:
            return min(self._ahead.values(), key=lambda job: job.priority).expert if self._ahead else None

    def close(self) -> None:
        """Stop after the running job; queued ones are dropped. Raises TimeoutError where the job does not end."""
        with self._changed:
            self._closed = True
            self._demand.clear()
            self._ahead.clear()
            self._changed.notify()
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the mover {self.name} did not stop within {JOIN_TIMEOUT_S:.0f} s")

    def _take(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._demand or self._ahead)
            if self._closed:
                return None
            if self._demand:
                return self._demand.popleft()
            job = max(self._ahead.values(), key=lambda job: job.priority)  # the first queued among equals
            del self._ahead[job.expert]
            return job

    def _run(self) -> None:
        while (job := self._take()) is not None:
            try:
                self.bytes_moved += self._copy(job)
            except BaseException as error:  # the owner of the engine sees it: no failure ends the thread
                job.error = error
            self._outbox.post(job)
