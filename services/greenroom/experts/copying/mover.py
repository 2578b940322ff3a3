"""One link between two tiers, and the threads that move experts over it.

What waits is ordered: on-demand fetches in the order of asking, then the others by priority, those that go no further
than the host tier last. Only the owner of the engine queues, promotes and withdraws; the mover's threads take the
first, move it part by part, and post the result for the owner.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from greenroom.core.errors import ModelBroken
from greenroom.policies.base.events import Reason, Tier

JOIN_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Job:
    """One expert to be moved; ``target_slot`` is reserved for it. ``priority``: higher is sooner.

    ``part_bytes``: set by a carrier that splits it. ``bound``: the tier it is on its way to in the end; ``target`` is
    where this hop takes it.
    """

    expert: int
    source: Tier
    target: Tier
    source_slot: int
    target_slot: int
    reason: Reason
    priority: float = 0.0
    part_bytes: int = 0
    error: BaseException | None = None
    bound: Tier = Tier.DEVICE

    @property
    def urgency(self) -> tuple[int, float]:
        """Orders what no layer waits for: what goes to the device before what stays on the host, then by priority."""
        return -self.bound, self.priority


class Landing(NamedTuple):
    """Posted ahead of a job's end: who computes may queue work on the target now, it will wait for the bytes itself.

    Only the job says whether the bytes came. Until it is posted, nothing that was computed with them counts, and what
    the job holds of its source is in use.
    """

    job: Job


class Outbox:
    """What all movers have to tell the engine's owner."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._posted: list[Job | Landing] = []
        self._defect: BaseException | None = None

    def post(self, message: Job | Landing) -> None:
        with self._condition:
            self._posted.append(message)
            self._condition.notify()

    def fail(self, defect: BaseException) -> None:
        """A mover has died of a defect; whoever collects is told."""
        with self._condition:
            self._defect = defect
            self._condition.notify()

    def collect(self) -> list[Job | Landing]:
        """What has come since the last call, in order; does not wait. Raises ModelBroken where a mover has died."""
        if self._defect is not None:
            raise ModelBroken("a mover has died") from self._defect
        if not self._posted:
            return []
        with self._condition:
            posted, self._posted = self._posted, []
        return posted

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has come; False where the time ran out."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._posted) or self._defect is not None, timeout_s)


class Carrier(Protocol):
    """How the jobs of one link are moved; called on the mover's threads, for several parts at once.

    ``threads``: how many parts move at once. ``depth``: how many jobs are begun at once; on-demand jobs do not wait
    for those begun ahead of need, nor do these for those that stay on the host, so there may be as many again of each.
    """

    @property
    def threads(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def begin(self, job: Job) -> int:
        """Into how many parts the job is split; must not wait."""
        ...

    def move(self, job: Job, part: int) -> int:
        """Move one part; returns its bytes, raises where it can not."""
        ...

    def finish(self, job: Job) -> None:
        """Every part has been moved. Raises where what came is wrong."""
        ...

    def drop(self, job: Job) -> None:
        """A part could not be moved, and none is moving any more."""
        ...

    def close(self) -> None:
        """No thread of the mover runs any more."""
        ...


@dataclass(slots=True, eq=False)
class Begun:
    """A job under way: ``taken`` of its parts were given to threads, ``moving`` of these are not done."""

    job: Job
    parts: int
    taken: int = 0
    moving: int = 0
    error: BaseException | None = None

    @property
    def urgent(self) -> bool:
        return self.job.reason is Reason.ON_DEMAND


class Mover:
    """The threads of one link. A thread that is free takes, in this order, the next part of a begun job that a layer
    waits for, the next such job, and then the same of those that none waits for: an on-demand fetch overtakes a
    prefetch between two parts, and both overtake what is only bound for the host.
    """

    def __init__(self, name: str, carrier: Carrier, outbox: Outbox) -> None:
        self.name = name
        self.bytes_moved = 0
        self.busy_seconds = 0.0
        """For how long at least one part was moving; not kept by a simulated link, which knows its rate."""
        self._moving = 0
        self._counted_until = 0.0
        self._carrier = carrier
        self._outbox = outbox
        self._changed = threading.Condition(threading.Lock())
        self._idle = 0
        self._demand: deque[Job] = deque()
        self._ahead: dict[int, Job] = {}
        self._begun: list[Begun] = []
        self._closed = False
        self._threads = self._start()

    @property
    def waiting_ahead(self) -> int:
        """Queued jobs bound for the device that no layer waits for. Without the lock: ``dict.copy`` takes it whole, and
        what is begun meanwhile is counted once more at worst. (Going through its values would not: a collection of
        garbage may come in between, and another thread with it.)
        """
        return sum(job.bound is Tier.DEVICE for job in self._ahead.copy().values())

    def seconds(self, nbytes: int) -> float | None:
        """How long so many bytes take, as measured on what has been moved so far; None: nothing has."""
        moved, busy = self.bytes_moved, self.busy_seconds
        return busy * nbytes / moved if moved and busy else None

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
            self._changed.notify()
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
        """The queued job bound for the device to withdraw first."""
        with self._changed:
            jobs = [job for job in self._ahead.values() if job.bound is Tier.DEVICE]
            return min(jobs, key=lambda job: job.priority).expert if jobs else None

    def close(self) -> None:
        """Stop after the parts that move now; all other work is dropped. Raises TimeoutError where one does not end."""
        with self._changed:
            self._closed = True
            self._demand.clear()
            self._ahead.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        if any(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"the mover {self.name} did not stop within {JOIN_TIMEOUT_S:.0f} s")
        self._carrier.close()

    def _start(self) -> list[threading.Thread]:
        """The threads: one more than parts move at once, so that what is done with a job's last part (a checksum, the
        handing over) does not keep the next one waiting. A simulated link has none and keeps the time itself.
        """
        threads = [
            threading.Thread(target=self._run, name=f"mover {self.name} {n}", daemon=True)
            for n in range(self._carrier.threads + 1)
        ]
        for thread in threads:
            thread.start()
        return threads

    # -- on the mover's threads ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (task := self._take()) is not None:
                begun, part = task
                moved, error = 0, None
                self._count_busy(1)
                try:
                    moved = self._carrier.move(begun.job, part)
                except BaseException as failure:  # the owner of the engine sees it: no failure ends the thread
                    error = failure
                self._count_busy(-1)
                if self._ends(begun, moved, error):
                    self._end(begun)
        except BaseException as defect:
            self._outbox.fail(defect)

    def _count_busy(self, change: int) -> None:
        """A part begins to move (1) or has been moved (-1)."""
        with self._changed:
            now = time.perf_counter()
            if self._moving:
                self.busy_seconds += now - self._counted_until
            self._counted_until, self._moving = now, self._moving + change

    def _take(self) -> tuple[Begun, int] | None:
        """The part to move next; None: closed."""
        with self._changed:
            while (chosen := self._choose()) is None and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            if self._closed or chosen is None:
                return None
            begun = self._begin(chosen) if isinstance(chosen, Job) else chosen
            begun.taken += 1
            begun.moving += 1
            if self._idle and self._choose() is not None:
                self._changed.notify()
            return begun, begun.taken - 1

    def _choose(self) -> Begun | Job | None:
        if sum(begun.moving for begun in self._begun) >= self._carrier.threads:
            return None
        rest = [begun for begun in self._begun if begun.taken < begun.parts]
        for begun in rest:
            if begun.urgent:
                return begun
        if self._demand:
            urgent = sum(begun.urgent for begun in self._begun)
            return self._demand[0] if urgent < self._carrier.depth else None
        begun_first = max(rest, key=lambda begun: begun.job.urgency) if rest else None
        if self._ahead:
            waiting = max(self._ahead.values(), key=lambda job: job.urgency)  # the first queued among equals
            if begun_first is None or waiting.bound < begun_first.job.bound:
                not_overtaken = sum(begun.job.bound <= waiting.bound for begun in self._begun)
                if not_overtaken < self._carrier.depth:
                    return waiting
        return begun_first

    def _begin(self, job: Job) -> Begun:
        if self._demand and self._demand[0] is job:
            self._demand.popleft()
        else:
            del self._ahead[job.expert]
        begun = Begun(job, self._carrier.begin(job))
        self._begun.append(begun)
        return begun

    def _ends(self, begun: Begun, moved: int, error: BaseException | None) -> bool:
        """Book a part; True where it was the job's last. After a failure the parts not yet taken are left out, and
        those that move still fill the slot, so it is given back only after them.
        """
        with self._changed:
            self.bytes_moved += moved
            begun.moving -= 1
            if error is not None:
                begun.error = begun.error or error
                begun.taken = begun.parts
            if begun.moving or begun.taken < begun.parts:
                return False
            self._begun.remove(begun)
            if self._idle and self._choose() is not None:
                self._changed.notify()
            return True

    def _end(self, begun: Begun) -> None:
        job = begun.job
        job.error = begun.error
        try:
            if job.error is None:
                self._carrier.finish(job)
            else:
                self._carrier.drop(job)
        except BaseException as failure:
            job.error = job.error or failure
        self._outbox.post(job)
