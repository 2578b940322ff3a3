"""One link between two tiers, and the threads that move experts over it.

Waiting jobs are ordered: on-demand fetches first, in the order in which they were queued; then prefetches to the device
by priority; then those that go no further than the host tier; last the first fill, in the order in which it was queued.
Only the engine's thread queues, promotes and withdraws jobs. The mover's threads take the first job, move it part by
part, and post the result for the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from greenroom.core.errors import ModelBroken
from greenroom.policies.base.events import Reason, Tier

JOIN_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Job:
    """One expert to be moved by one hop. ``target_slot`` is reserved for it. ``priority``: higher is sooner.

    ``target``: where this hop takes it; ``bound``: the tier where it ends. ``part_bytes``: set by a carrier that splits
    the job into parts.
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
    def kind(self) -> tuple[bool, Tier]:
        """Orders the kinds of jobs, the most urgent first: bound for the device, for the host, and so of the first
        fill."""
        return self.reason is Reason.FILL, self.bound

    @property
    def urgency(self) -> tuple[bool, int, float]:
        """Orders jobs that no layer waits for: by kind, then by priority."""
        return self.reason is not Reason.FILL, -self.bound, self.priority


class MovedBytes(NamedTuple):
    """Bytes that a link has moved: ``on_demand`` for layers that waited by then, ``prefetched`` for none."""

    on_demand: int = 0
    prefetched: int = 0

    @property
    def total(self) -> int:
        return self.on_demand + self.prefetched


class Landing(NamedTuple):
    """Posted before the end of a job: work on the expert may be queued now, and the device lets it wait for the bytes.

    Whether the bytes arrived is only known when the job is posted. Until then nothing that was computed with them
    counts, and the source's memory is in use.
    """

    job: Job


class Outbox:
    """Messages from all movers to the engine's thread, the only one that collects them.

    ``on_posted``: called on a mover's thread after each, for an owner that waits for other things too.
    """

    def __init__(self) -> None:
        self.on_posted: Callable[[], object] | None = None
        self._posted: SimpleQueue[Job | Landing | None] = SimpleQueue()  # None only wakes; bounded by the jobs
        self._first: Job | Landing | None = None  # of the next ``collect``: what ``wait`` has taken out
        self._defect: BaseException | None = None

    def post(self, message: Job | Landing) -> None:
        self._posted.put(message)
        if self.on_posted is not None:
            self.on_posted()

    def fail(self, defect: BaseException) -> None:
        """A mover has died of a defect: the next ``collect`` raises."""
        self._defect = defect
        self._posted.put(None)
        if self.on_posted is not None:
            self.on_posted()

    def collect(self) -> list[Job | Landing]:
        """The messages since the last call, in order. Does not wait. Raises ModelBroken if a mover has died."""
        if self._defect is not None:
            raise ModelBroken("a mover has died") from self._defect
        posted: list[Job | Landing] = [] if self._first is None else [self._first]
        self._first = None
        while not self._posted.empty():
            message = self._posted.get_nowait()
            if message is not None:
                posted.append(message)
        return posted

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message. False: the time ran out."""
        if self._first is not None or self._defect is not None:
            return True
        try:
            self._first = self._posted.get(timeout=max(0.0, timeout_s))
        except Empty:
            return False
        return True


class Carrier(Protocol):
    """Moves the jobs of one link. Called on the mover's threads, for several parts at once.

    ``threads``: how many parts move at once. ``depth``: how many jobs are under way at once, not counting those of a
    less urgent kind. So an on-demand fetch does not wait for prefetches that have begun, nor a prefetch to the device
    for one to the host. The first fill counts among the prefetches: one may wait for a record of it that has begun.
    """

    @property
    def threads(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def begin(self, job: Job) -> int:
        """Into how many parts the job is split. Must not wait."""
        ...

    def move(self, job: Job, part: int) -> int:
        """Move one part. Returns its bytes, and raises if it can not be moved."""
        ...

    def ends_at_once(self, job: Job) -> bool:
        """Whether ``finish`` has next to nothing to do. Must not wait."""
        ...

    def finish(self, job: Job) -> None:
        """Every part has been moved. Raises if the record is wrong."""
        ...

    def drop(self, job: Job) -> None:
        """A part could not be moved, and no other part is moving."""
        ...

    def close(self) -> None:
        """All threads of the mover have ended."""
        ...


@dataclass(slots=True, eq=False)
class Begun:
    """A job under way: ``taken`` of its parts were given to threads, and ``moving`` of these are not done."""

    job: Job
    parts: int
    taken: int = 0
    moving: int = 0
    error: BaseException | None = None

    @property
    def urgent(self) -> bool:
        return self.job.reason is Reason.ON_DEMAND


class Mover:
    """The threads of one link.

    A free thread takes the next part of an on-demand fetch that has begun, else begins the next on-demand fetch, else
    does the same for prefetches. So an on-demand fetch overtakes a prefetch between two parts, both overtake jobs that
    stay on the host, and all overtake the first fill.
    """

    def __init__(self, name: str, carrier: Carrier, outbox: Outbox) -> None:
        self.name = name
        self._moved = MovedBytes()
        self.busy_seconds = 0.0
        """For how long at least one part was moving. A simulated link does not count it, because it knows its rate."""
        self._moving = 0
        self._counted_until = 0.0
        self._carrier = carrier
        self._outbox = outbox
        self._changed = threading.Condition(threading.Lock())
        self._idle = 0  # threads that wait and were not woken
        self._woken = 0  # threads that were woken and have not looked yet
        self._on_demand: deque[Job] = deque()
        self._prefetches: dict[int, Job] = {}
        self._fill: dict[int, Job] = {}  # kept apart: it may be long, and needs no search
        self._begun: list[Begun] = []
        self._closed = False
        self._threads = self._start()

    @property
    def depth(self) -> int:
        """How many jobs are under way at once: see Carrier."""
        return self._carrier.depth

    @property
    def waiting_prefetches(self) -> int:
        """Queued jobs bound for the device that no layer waits for, without the first fill.

        Needs no lock, because ``dict.copy`` is atomic; at worst a job that begins meanwhile is still counted. Iterating
        over the values would not be atomic: a garbage collection in between may let another thread run.
        """
        return sum(job.bound is Tier.DEVICE for job in self._prefetches.copy().values())

    def moved(self) -> MovedBytes:
        """By now, the same object until more has moved. A part counts once all of it has moved, as what its job was
        then."""
        return self._moved

    @property
    def bytes_moved(self) -> int:
        return self.moved().total

    def seconds(self, nbytes: int) -> float | None:
        """How long ``nbytes`` take at the rate of everything moved so far. None: nothing was moved."""
        moved, busy = self.bytes_moved, self.busy_seconds
        return busy * nbytes / moved if moved and busy else None

    def put(self, job: Job) -> None:
        """Queue a job. The queue is bounded, because each job holds a slot of its target."""
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the mover {self.name} is closed")
            if job.reason is Reason.ON_DEMAND:
                self._on_demand.append(job)
            elif job.reason is Reason.FILL:
                self._fill[job.expert] = job
            else:
                self._prefetches[job.expert] = job
            self._wake_one()

    def promote(self, expert: int) -> bool:
        """Make a queued job on-demand, because a layer waits for it. False: it has begun or ended."""
        with self._changed:
            job = self._unqueue(expert)
            if job is None:
                return False
            self._on_demand.append(job)
            self._wake_one()
            return True

    def reprioritise(self, expert: int, priority: float) -> None:
        """Change the priority of a job, if it is still queued."""
        with self._changed:
            if expert in self._prefetches:
                self._prefetches[expert].priority = priority

    def withdraw(self, expert: int) -> Job | None:
        """Take back a job that no layer waits for. None: it has begun."""
        with self._changed:
            return self._unqueue(expert)

    def least_urgent(self, among: Callable[[int], bool]) -> int | None:
        """Of the queued prefetches to the device, ``among`` these experts, the one with the lowest priority."""
        with self._changed:
            jobs = [job for job in self._prefetches.values() if job.bound is Tier.DEVICE and among(job.expert)]
            return min(jobs, key=lambda job: job.priority).expert if jobs else None

    def close(self) -> None:
        """Stop after the parts that move now, and drop all other work. Raises TimeoutError if a part does not end."""
        with self._changed:
            self._closed = True
            self._on_demand.clear()
            self._prefetches.clear()
            self._fill.clear()
            self._woken += self._idle
            self._idle = 0
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        if any(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"the mover {self.name} did not stop within {JOIN_TIMEOUT_S:.0f} s")
        self._carrier.close()

    def _unqueue(self, expert: int) -> Job | None:
        """A job that no layer waits for and that has not begun."""
        job = self._prefetches.pop(expert, None)
        return self._fill.pop(expert, None) if job is None else job

    def _start(self) -> list[threading.Thread]:
        """One thread more than parts move at once. So the work after a job's last part, such as its checksum, does not
        delay the next part. Where there is none, the same thread goes on. A simulated link has no threads.
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
                except BaseException as failure:  # reported with the job, so that no failure ends the thread
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
        """The part to move next. None: the mover is closed."""
        with self._changed:
            while (chosen := self._choose()) is None and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._woken -= 1  # whoever woke it has counted so
            if self._closed or chosen is None:
                return None
            begun = self._begin(chosen) if isinstance(chosen, Job) else chosen
            begun.taken += 1
            begun.moving += 1
            self._wake_one()
            return begun, begun.taken - 1

    def _wake_one(self) -> None:
        """If one is idle and there is something for it beside those that were woken before.

        To wake a thread takes some ten microseconds on a virtual machine, and more of the interpreter, which it shares
        with the engine's thread. One that was woken wakes the next if there is more than it takes itself.
        """
        if self._idle and self._moving_parts() + self._woken < self._carrier.threads and self._choose() is not None:
            self._idle -= 1
            self._woken += 1
            self._changed.notify()

    def _choose(self) -> Begun | Job | None:
        if self._moving_parts() >= self._carrier.threads:
            return None
        rest = [begun for begun in self._begun if begun.taken < begun.parts]
        for begun in rest:
            if begun.urgent:
                return begun
        if self._on_demand:
            urgent = sum(begun.urgent for begun in self._begun)
            return self._on_demand[0] if urgent < self._carrier.depth else None
        begun_first = max(rest, key=lambda begun: begun.job.urgency) if rest else None
        waiting = self._first_waiting()
        if waiting is not None and (begun_first is None or waiting.kind < begun_first.job.kind):
            not_overtaken = sum(begun.job.bound <= waiting.bound for begun in self._begun)
            if not_overtaken < self._carrier.depth:
                return waiting
        return begun_first

    def _moving_parts(self) -> int:
        return sum(begun.moving for begun in self._begun)

    def _first_waiting(self) -> Job | None:
        """Of those that no layer waits for; of equals the first that was queued."""
        if self._prefetches:
            return max(self._prefetches.values(), key=lambda job: job.urgency)
        return next(iter(self._fill.values()), None)

    def _begin(self, job: Job) -> Begun:
        if self._on_demand and self._on_demand[0] is job:
            self._on_demand.popleft()
        else:
            self._unqueue(job.expert)
        begun = Begun(job, self._carrier.begin(job))
        self._begun.append(begun)
        return begun

    def _ends(self, begun: Begun, moved: int, error: BaseException | None) -> bool:
        """Book a part that has ended. True: it was the job's last.

        After a failure no further part is taken. The parts that still move fill the slot, so the job ends after them.
        """
        with self._changed:
            on_demand, prefetched = self._moved
            if begun.urgent:
                self._moved = MovedBytes(on_demand + moved, prefetched)
            else:
                self._moved = MovedBytes(on_demand, prefetched + moved)
            begun.moving -= 1
            if error is not None:
                begun.error = begun.error or error
                begun.taken = begun.parts
            if begun.moving or begun.taken < begun.parts:
                return False
            self._begun.remove(begun)
            if not self._carrier.ends_at_once(begun.job):  # else this thread takes the next part as soon as another
                self._wake_one()
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
