"""One queue a link: what a layer waits for comes first, parts of several jobs move at once, nothing moves twice."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.experts.copying import mover as mover_module
from greenroom.experts.copying.mover import Job, Landing, Mover, Outbox
from greenroom.policies.base.events import Reason, Tier
from tests.examples import examples
from tests.waiting import until_others

DEADLINE_S = 20.0


class Carrying:
    """A carrier whose parts wait at a gate until they are let through; notes what it was asked."""

    def __init__(self, *, threads: int = 1, depth: int = 1, parts: int = 1, fail: frozenset[int] = frozenset()) -> None:
        self.threads, self.depth, self.parts, self.fail = threads, depth, parts, fail
        self.log: list[tuple[int, int]] = []
        self.finished: list[int] = []
        self.dropped: list[int] = []
        self.moving: Counter[int] = Counter()
        self.most_at_once = 0
        self.most_jobs = 0
        self.closed = False
        self.at_once = False
        self._changed = threading.Condition()
        self._permits = 0
        self._open = False

    def begin(self, job: Job) -> int:
        return self.parts

    def move(self, job: Job, part: int) -> int:
        with self._changed:
            self.log.append((job.expert, part))
            self.moving[job.expert] += 1
            self.most_at_once = max(self.most_at_once, self.moving.total())
            self.most_jobs = max(self.most_jobs, len(+self.moving))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._open or self._permits, DEADLINE_S)
            self._permits -= 1
            self.moving[job.expert] -= 1
            if job.expert in self.fail and part == 1:
                raise OSError(5, "broken")
            return 10

    def ends_at_once(self, job: Job) -> bool:
        return self.at_once

    def finish(self, job: Job) -> None:
        self.finished.append(job.expert)

    def drop(self, job: Job) -> None:
        assert not self.moving[job.expert], "a slot is given back while a part still fills it"
        self.dropped.append(job.expert)

    def close(self) -> None:
        self.closed = True

    def let(self, parts: int = 1) -> None:
        """Let so many parts through, which begin now or later."""
        with self._changed:
            self._permits += parts
            self._changed.notify_all()

    def let_all(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_begun(self, parts: int) -> None:
        """Until so many parts have begun in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.log) >= parts, DEADLINE_S), self.log


@contextmanager
def moving(carrier: Carrying) -> Iterator[tuple[Mover, Outbox]]:
    outbox = Outbox()
    mover = Mover("test", carrier, outbox)
    try:
        yield mover, outbox
    finally:
        carrier.let_all()
        mover.close()


def job(expert: int, reason: Reason = Reason.ON_DEMAND, priority: float = 0.0) -> Job:
    return Job(expert, Tier.DISK, Tier.DEVICE, -1, expert, reason, priority)


def ended(outbox: Outbox, count: int) -> list[Job]:
    jobs: list[Job] = []
    while len(jobs) < count:
        assert outbox.wait(DEADLINE_S)
        for message in outbox.collect():
            assert isinstance(message, Job)
            jobs.append(message)
    return jobs


def test_what_a_layer_waits_for_overtakes_all_prefetches() -> None:
    carrier = Carrying()
    with moving(carrier) as (mover, outbox):
        mover.put(job(0))
        carrier.wait_begun(1)
        mover.put(job(1, Reason.PREFETCH, 5))
        mover.put(job(2, Reason.PREFETCH, 9))
        mover.put(job(3, Reason.PREFETCH, 5))
        mover.put(job(4))
        mover.put(job(5))
        mover.reprioritise(3, 7)
        assert mover.promote(1)
        carrier.let_all()
        assert [job.expert for job in ended(outbox, 6)] == [0, 4, 5, 1, 2, 3]
    assert carrier.closed


def test_an_on_demand_fetch_cuts_in_between_two_parts_of_a_prefetch() -> None:
    carrier = Carrying(parts=3)
    with moving(carrier) as (mover, outbox):
        mover.put(job(0, Reason.PREFETCH))
        carrier.wait_begun(1)
        mover.put(job(1))
        carrier.let_all()
        assert [job.expert for job in ended(outbox, 2)] == [1, 0]
    assert carrier.log == [(0, 0), (1, 0), (1, 1), (1, 2), (0, 1), (0, 2)]


def test_a_begun_prefetch_that_is_promoted_goes_on_before_other_prefetches() -> None:
    carrier = Carrying(depth=2, parts=2)
    with moving(carrier) as (mover, outbox):
        first = job(0, Reason.PREFETCH, 1)
        mover.put(first)
        carrier.wait_begun(1)
        mover.put(job(1, Reason.PREFETCH, 9))
        first.reason = Reason.ON_DEMAND
        assert not mover.promote(0), "it has begun"
        carrier.let_all()
        assert [job.expert for job in ended(outbox, 2)] == [0, 1]


class OneByOne(Carrying):
    """Lets through the experts that it is told of."""

    def __init__(self) -> None:
        super().__init__(threads=2, depth=2)
        self.gates = [threading.Event(), threading.Event()]

    def move(self, job: Job, part: int) -> int:
        with self._changed:
            self.log.append((job.expert, part))
            self._changed.notify_all()
        assert self.gates[job.expert].wait(DEADLINE_S)
        return 10


def test_the_busy_time_counts_a_long_move_whole_though_a_short_one_ends_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(mover_module, "time", SimpleNamespace(perf_counter=lambda: now))
    carrier = OneByOne()
    with moving(carrier) as (mover, outbox):
        mover.put(job(0))
        carrier.wait_begun(1)
        now = 4.0
        mover.put(job(1))
        carrier.wait_begun(2)
        now = 5.0
        carrier.gates[1].set()
        assert [job.expert for job in ended(outbox, 1)] == [1]
        now = 10.0
        carrier.gates[0].set()
        assert [job.expert for job in ended(outbox, 1)] == [0]
        assert mover.busy_seconds == 10.0
        now = 20.0
        mover.put(job(0))
        ended(outbox, 1)
        assert mover.busy_seconds == 10.0, "the time between two moves is idle"


def to_host(expert: int, priority: float = 0.0) -> Job:
    return Job(expert, Tier.DISK, Tier.HOST, -1, expert, Reason.PREFETCH, priority, bound=Tier.HOST)


def test_what_stays_on_the_host_comes_after_all_that_goes_to_the_device() -> None:
    carrier = Carrying()
    with moving(carrier) as (mover, outbox):
        mover.put(job(0))
        carrier.wait_begun(1)
        mover.put(to_host(1, 9))
        mover.put(to_host(2, 99))
        mover.put(job(3, Reason.TARGET))
        mover.put(job(4, Reason.PREFETCH, 1))
        mover.put(job(5))
        assert mover.waiting_prefetches == 2, "bound for the device"
        assert mover.least_urgent(lambda _: True) == 3, "of those that hold a slot there"
        carrier.let_all()
        assert [job.expert for job in ended(outbox, 6)] == [0, 5, 4, 3, 2, 1]


def test_jobs_are_counted_while_others_begin() -> None:
    """A collection of garbage may come at any allocation, and then the mover's threads may have their turn."""
    carrier = Carrying()
    with moving(carrier) as (mover, _):
        waiting = {number: job(number, Reason.PREFETCH) for number in range(64)}

        def begin_one(phase: str, info: dict[str, int]) -> None:
            if waiting:
                waiting.popitem()

        began, thresholds = mover._prefetches, gc.get_threshold()
        gc.callbacks.append(begin_one)
        try:
            mover._prefetches = waiting
            gc.set_threshold(1)
            for _ in range(20):
                assert 0 <= mover.waiting_prefetches <= 64
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(begin_one)
            mover._prefetches = began


def test_what_goes_to_the_device_cuts_in_between_two_parts_of_what_stays_on_the_host() -> None:
    carrier = Carrying(parts=3)
    with moving(carrier) as (mover, outbox):
        mover.put(to_host(0, 9))
        carrier.wait_begun(1)
        mover.put(to_host(1, 99))
        mover.put(job(2, Reason.PREFETCH))
        carrier.let_all()
        assert [job.expert for job in ended(outbox, 3)] == [2, 0, 1]
    assert carrier.log == [(0, 0), *((2, part) for part in range(3)), (0, 1), (0, 2), *((1, part) for part in range(3))]


def test_what_stays_on_the_host_never_makes_more_jobs_begin_than_each_kind_may() -> None:
    carrier = Carrying(threads=8, depth=2)
    with moving(carrier) as (mover, outbox):
        for expert in range(4):
            mover.put(to_host(expert))
        carrier.wait_begun(2)
        for expert in range(4, 8):
            mover.put(job(expert, Reason.PREFETCH))
        carrier.wait_begun(4)
        for expert in range(8, 12):
            mover.put(job(expert))
        carrier.wait_begun(6)
        assert sorted(carrier.moving) == [0, 1, 4, 5, 8, 9]
        carrier.let_all()
        assert len(ended(outbox, 12)) == 12


@pytest.mark.parametrize(("threads", "depth", "parts"), [(1, 1, 1), (2, 1, 4), (3, 2, 2), (4, 4, 1), (2, 3, 5)])
def test_no_more_moves_at_once_than_was_asked_for(threads: int, depth: int, parts: int) -> None:
    carrier = Carrying(threads=threads, depth=depth, parts=parts)
    with moving(carrier) as (mover, outbox):
        for expert in range(8):
            mover.put(job(expert))
        carrier.wait_begun(min(threads, depth * parts))  # that many do move at once
        carrier.let_all()
        jobs = ended(outbox, 8)
    assert sorted(job.expert for job in jobs) == list(range(8))
    assert sorted(carrier.log) == [(expert, part) for expert in range(8) for part in range(parts)], "each part once"
    assert carrier.most_at_once <= threads
    assert carrier.most_jobs <= depth
    assert mover.bytes_moved == 8 * parts * 10


def test_a_failed_job_ends_only_when_none_of_its_parts_moves_any_more() -> None:
    carrier = Carrying(threads=2, depth=1, parts=4, fail=frozenset({0}))
    with moving(carrier) as (mover, outbox):
        mover.put(job(0))
        mover.put(job(1))
        carrier.wait_begun(2)
        carrier.let_all()
        jobs = ended(outbox, 2)
    by_expert = {job.expert: job for job in jobs}
    assert isinstance(by_expert[0].error, OSError)
    assert by_expert[1].error is None
    assert carrier.dropped == [0]
    assert carrier.finished == [1]


def test_the_check_of_one_job_does_not_keep_the_next_from_the_link() -> None:
    class Slow(Carrying):
        checking = threading.Event()
        checked = threading.Event()

        def finish(self, job: Job) -> None:
            if job.expert == 0:
                self.checking.set()
                assert self.checked.wait(DEADLINE_S)
            super().finish(job)

    carrier = Slow()
    with moving(carrier) as (mover, outbox):
        mover.put(job(0))
        mover.put(job(1))
        carrier.let()
        assert carrier.checking.wait(DEADLINE_S)
        carrier.wait_begun(2)
        carrier.let_all()
        assert [job.expert for job in ended(outbox, 1)] == [1]
        carrier.checked.set()
        assert [job.expert for job in ended(outbox, 1)] == [0]
    assert carrier.most_at_once == 1


def test_where_a_job_ends_at_once_the_thread_that_moved_it_moves_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    carrier = Carrying()
    carrier.at_once = True
    with moving(carrier) as (mover, outbox):
        notify = mover._changed.notify

        def counted(threads: int = 1) -> None:
            woken.append(threads)
            notify(threads)

        monkeypatch.setattr(mover._changed, "notify", counted)
        until_others(lambda: mover._idle == 2, "both threads wait")
        for expert in range(50):
            mover.put(job(expert))
        carrier.wait_begun(1)
        carrier.let_all()
        assert [one.expert for one in ended(outbox, 50)] == list(range(50))
        assert len(woken) == 1, "one part moves at a time: no other thread is of use"
        until_others(lambda: mover._idle == 2, "both threads wait")
        mover.put(job(50))
        assert [one.expert for one in ended(outbox, 1)] == [50]
        assert len(woken) == 2


def test_what_a_whole_job_lacks_is_an_error_of_the_job() -> None:
    class Refusing(Carrying):
        def finish(self, job: Job) -> None:
            raise ValueError("altered")

    carrier = Refusing()
    carrier.let_all()
    with moving(carrier) as (mover, outbox):
        mover.put(job(0))
        mover.put(job(1))
        assert [str(job.error) for job in ended(outbox, 2)] == ["altered", "altered"], "the thread goes on"


def test_a_defect_in_the_mover_is_raised_where_transfers_are_collected() -> None:
    class Broken(Carrying):
        def begin(self, job: Job) -> int:
            raise ZeroDivisionError

    with moving(Broken()) as (mover, outbox):
        mover.put(job(0))
        assert outbox.wait(DEADLINE_S)
        with pytest.raises(RuntimeError, match="died"):
            outbox.collect()


def test_queued_ones_can_be_taken_back_and_begun_ones_can_not() -> None:
    carrier = Carrying()
    with moving(carrier) as (mover, outbox):
        mover.put(job(0, Reason.PREFETCH, 1))
        carrier.wait_begun(1)
        mover.put(job(1, Reason.PREFETCH, 3))
        mover.put(job(2, Reason.PREFETCH, 2))
        assert mover.waiting_prefetches == 2
        assert mover.least_urgent(lambda _: True) == 2
        assert mover.least_urgent(lambda expert: expert != 2) == 1
        assert mover.withdraw(0) is None
        taken = mover.withdraw(2)
        assert taken is not None
        assert taken.expert == 2
        carrier.let_all()
        assert [job.expert for job in ended(outbox, 2)] == [0, 1]


def test_closing_drops_what_waits_and_joins_every_thread() -> None:
    carrier = Carrying(threads=3, depth=3)
    outbox = Outbox()
    mover = Mover("test", carrier, outbox)
    for expert in range(6):
        mover.put(job(expert))
    carrier.wait_begun(3)
    closer = threading.Thread(target=mover.close)
    closer.start()
    carrier.let_all()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert not any(thread.name.startswith("mover test") for thread in threading.enumerate())
    assert carrier.closed
    assert len(carrier.log) <= 4, "at most one more was taken before the mover saw that it is closed"
    with pytest.raises(RuntimeError, match="closed"):
        mover.put(job(7))


def test_a_message_wakes_the_waiting_thread_and_nothing_waits_for_a_tick() -> None:
    outbox = Outbox()
    assert not outbox.wait(0.0)
    woken = threading.Event()

    def wait() -> None:
        if outbox.wait(DEADLINE_S):
            woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    outbox.post(Landing(job(3)))
    waiter.join(DEADLINE_S)
    assert woken.is_set()
    assert outbox.collect() == [Landing(job(3))]


@given(
    threads=st.integers(1, 4),
    depth=st.integers(1, 4),
    parts=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=examples(40), deadline=None)
def test_any_traffic_moves_each_job_once_or_takes_it_back(threads: int, depth: int, parts: int, seed: int) -> None:
    noise = random.Random(seed)
    carrier = Carrying(
        threads=threads, depth=depth, parts=parts, fail=frozenset(e for e in range(30) if noise.random() < 0.2)
    )
    withdrawn: set[int] = set()
    with moving(carrier) as (mover, outbox):
        jobs = [job(e, noise.choice([Reason.ON_DEMAND, Reason.PREFETCH]), noise.random()) for e in range(30)]
        for queued in jobs:
            mover.put(queued)
            other = noise.randrange(30)
            match noise.randrange(5):
                case 0:
                    carrier.let(noise.randrange(4))
                case 1:
                    mover.promote(other)
                case 2:
                    mover.reprioritise(other, noise.random())
                case 3 if mover.withdraw(other) is not None:
                    withdrawn.add(other)
        carrier.let_all()
        done = ended(outbox, 30 - len(withdrawn))
        assert not mover.waiting_prefetches
    assert {job.expert for job in done} | withdrawn == set(range(30))
    assert len(set(carrier.log)) == len(carrier.log), "no part moves twice"
    whole = [job.expert for job in done if job.error is None]
    assert sorted(carrier.finished) == sorted(whole)
    assert all(sum(e == expert for e, _ in carrier.log) == parts for expert in whole)
    assert {job.expert for job in done if job.error} == set(carrier.dropped)
    assert carrier.most_at_once <= threads
