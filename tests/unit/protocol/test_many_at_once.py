"""A worker that has many requests and arranges them: its loss counts for what it said it was executing (rule 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greenroom.core.collaboration import InputKind
from greenroom.core.generation import FinishReason
from greenroom.core.inference import InferenceInput
from greenroom.core.messages import Inference, Lost, Task
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.effects import Run, WriteDeadLetter
from greenroom.scheduler.pool_workers import Capacity, WorkerState
from greenroom.scheduler.request_entries import RequestStage
from tests.unit.protocol.pool_bench import DONE, Bench

many = pytest.mark.parametrize("count", [300, pytest.param(2_000, marks=pytest.mark.full)])
CONFIG = PoolConfig(max_waiting=10_000, lease_ms=100, retry_ms=50, reclaim_ms=10_000_000, max_queue_wait_ms=500)


class Many(Bench):
    """With workers that take ten thousand requests and say which they execute."""

    def __init__(self, config: PoolConfig = CONFIG) -> None:
        super().__init__(config)

    def come(self, name: str) -> None:
        self.do(self.pool.worker_reached(name, Capacity(max_running=10_000, max_queued=0, kv_tokens=0), self.now))
        self.executes(name)
        self.do(self.pool.listed(name, [], self.now))

    def executes(self, name: str, *request_ids: str) -> None:
        self.do(self.pool.beat(name, WorkerState(executing=frozenset(request_ids)), self.now))

    def inference(self, name: str, *, deadline_ms: float = 60_000) -> None:
        request = Inference(
            request_id=name,
            pool=0,
            model="board",
            inputs=(InferenceInput(kind=InputKind.IMAGE, data=b"x"),),
            accepted_ms=int(self.now),
            deadline_ms=int(self.now + deadline_ms),
        )
        self.record(Task(request=request, task_type="R0402", source="client"))

    def lose(self, name: str) -> None:
        self.do(self.pool.worker_gone(name, self.now))
        self.land()

    def finish(self, worker: str, request_id: str) -> None:
        self.do(self.pool.result(worker, request_id, self.last_run(request_id).attempt, DONE, self.now))
        self.land()

    def placed_on(self, name: str) -> set[str]:
        return set(self.pool.workers[name].placed)

    def losses(self) -> list[Lost]:
        return [record for record in self.journal if isinstance(record, Lost)]


@many
def test_all_are_placed_at_once_and_those_that_wait_there_return_without_a_loss(count: int) -> None:
    bench = Many()
    bench.come("w1")
    for n in range(count):
        bench.inference(f"r{n}")
    assert len(bench.placed_on("w1")) == count
    bench.executes("w1", "r7", "r8")
    bench.come("w2")
    bench.lose("w1")
    (lost,) = bench.losses()
    assert ([name for name, _ in lost.attempts], lost.unsure) == (["r7", "r8"], False)
    assert len(bench.placed_on("w2")) == count
    assert bench.pool.entries["r7"].losses
    assert not bench.pool.entries["r9"].losses


def test_two_workers_get_a_half_each() -> None:
    bench = Many()
    bench.come("w1")
    bench.come("w2")
    for n in range(100):
        bench.inference(f"r{n}")
    assert (len(bench.placed_on("w1")), len(bench.placed_on("w2"))) == (50, 50)


def test_no_worker_gets_more_than_it_takes() -> None:
    bench = Many()
    bench.do(bench.pool.worker_reached("w", Capacity(max_running=3, max_queued=0, kv_tokens=0), bench.now))
    bench.executes("w")
    bench.do(bench.pool.listed("w", [], bench.now))
    for n in range(5):
        bench.inference(f"r{n}")
    assert bench.placed_on("w") == {"r0", "r1", "r2"}
    bench.finish("w", "r1")
    assert bench.placed_on("w") == {"r0", "r2", "r3"}


@many
def test_three_losses_over_many_that_wait_and_all_are_served(count: int) -> None:
    """Each kill meets another batch. Nothing runs alone, nothing is given up."""
    bench = Many()
    bench.come("w0")
    for n in range(count):
        bench.inference(f"r{n}")
    for kill in range(3):
        bench.executes(f"w{kill}", *(f"r{n}" for n in range(8 * kill, 8 * kill + 8)))
        bench.come(f"w{kill + 1}")
        bench.lose(f"w{kill}")
    assert len(bench.placed_on("w3")) == count
    for n in range(count):
        run = bench.last_run(f"r{n}")
        bench.do(bench.pool.result("w3", f"r{n}", run.attempt, DONE, bench.now))
    bench.land()
    assert {outcome.reason for outcome in bench.outcomes()} == {FinishReason.LENGTH}
    assert len(bench.outcomes()) == count


def test_one_that_has_no_room_is_not_sent_all_that_waits_again_and_again() -> None:
    """Its bytes are taken before its places are. As many are tried as it had, and one more for every 20 ms."""
    bench = Many()
    bench.come("w")
    for n in range(300):
        bench.inference(f"r{n}")
    assert len(bench.placed_on("w")) == 300

    def refuse() -> None:
        for n in range(100, 300):
            if f"r{n}" in bench.placed_on("w"):
                attempt = bench.last_run(f"r{n}").attempt
                bench.do(bench.pool.refused("w", f"r{n}", attempt, bench.now, back_off_ms=20, full=True))

    def pass_20_ms() -> int:
        """How many are sent then."""
        before = len(bench.wanted)
        bench.now += 20
        bench.executes("w")
        bench.do(bench.pool.tick(bench.now))
        return sum(isinstance(effect, Run) for effect in bench.wanted[before:])

    refuse()
    assert len(bench.placed_on("w")) == 100
    assert pass_20_ms() == 2
    refuse()
    for n in range(5):
        bench.finish("w", f"r{n}")
    assert pass_20_ms() == 7
    assert pass_20_ms() == 1, "it refuses no more"
    assert [pass_20_ms() for _ in range(10)] == [1] * 10
    assert len(bench.placed_on("w")) == 113


def test_no_more_is_read_while_inputs_take_what_they_may() -> None:
    bench = Many(replace(CONFIG, read_ahead_bytes=3))
    for n in range(3):
        assert bench.pool.wants_tasks
        bench.inference(f"r{n}")
    assert not bench.pool.wants_tasks
    bench.come("w")
    bench.finish("w", "r0")
    assert bench.pool.wants_tasks


def test_what_ends_every_worker_is_found_and_given_up_and_its_batch_is_not() -> None:
    bench = Many()
    bench.come("w0")
    for name in ("poison", "a", "b", "c"):
        bench.inference(name)
    for life in range(2):
        bench.executes(f"w{life}", "poison", "a")
        bench.come(f"w{life + 1}")
        bench.lose(f"w{life}")
    assert bench.placed_on("w2") == {"b", "c"}, "the suspects wait until the worker is empty"
    bench.finish("w2", "b")
    bench.finish("w2", "c")
    assert bench.placed_on("w2") == {"poison"}, "then each runs alone"
    bench.come("w3")
    assert bench.placed_on("w3") == {"a"}
    bench.finish("w3", "a")
    bench.lose("w2")
    assert [effect.request_id for effect in bench.wanted if isinstance(effect, WriteDeadLetter)] == ["poison"]


def test_where_it_had_named_none_of_them_the_loss_is_unsure_and_nobody_is_given_up_for_it() -> None:
    bench = Many()
    bench.come("w0")
    for n in range(5):
        bench.inference(f"r{n}")
    for kill in range(3):
        assert len(bench.placed_on(f"w{kill}")) == 5, "two unsure losses make no suspect"
        bench.executes(f"w{kill}", "ended long ago")
        bench.come(f"w{kill + 1}")
        bench.lose(f"w{kill}")
    assert [lost.unsure for lost in bench.losses()] == [True] * 3
    assert len(bench.placed_on("w3")) == 1, "three do: each runs alone"
    assert all(entry.stage in (RequestStage.WAITING, RequestStage.PLACED) for entry in bench.pool.entries.values())
    assert not [effect for effect in bench.wanted if isinstance(effect, WriteDeadLetter)]


def test_a_request_that_was_there_by_itself_is_no_unsure_case() -> None:
    bench = Many()
    bench.come("w0")
    bench.inference("r")
    bench.come("w1")
    bench.lose("w0")
    (lost,) = bench.losses()
    assert ([name for name, _ in lost.attempts], lost.unsure) == (["r"], False)


def test_unsure_losses_outlive_the_scheduler() -> None:
    bench = Many()
    bench.come("w0")
    bench.inference("r0")
    bench.inference("r1")
    for kill in range(3):
        bench.come(f"w{kill + 1}")
        bench.lose(f"w{kill}")
    after = Many()
    after.journal, after.tasks = list(bench.journal), 0
    after.pool.take_over(0, 0)
    for offset, record in enumerate(after.journal):
        after.do(after.pool.journal(offset, record, after.now))
    after.do(after.pool.claim(after.now))
    after.land()
    after.do(after.pool.tick(after.now + 200))
    after.come("w")
    after.inference("r0")
    after.inference("r1")
    assert len(after.placed_on("w")) == 1


def test_an_unsure_loss_that_was_not_acknowledged_is_written_again_as_one() -> None:
    bench = Many()
    bench.come("w0")
    bench.inference("r0")
    bench.inference("r1")
    bench.do(bench.pool.worker_gone("w0", bench.now))
    bench.fail()
    bench.pass_ms(200)
    assert [record for record in bench.pending if isinstance(record, Lost) and record.unsure]


def test_those_that_waited_on_a_lost_worker_are_not_shed_for_that_time() -> None:
    bench = Many()
    bench.come("w0")
    bench.inference("r0")
    bench.inference("r1")
    bench.executes("w0", "r0")
    bench.pass_ms(1_000, alive=())
    bench.land()
    assert not bench.outcomes()
    bench.come("w1")
    bench.pass_ms(20)
    assert bench.placed_on("w1") == {"r0", "r1"}
    runs = [effect for effect in bench.wanted if isinstance(effect, Run)]
    assert {run.worker for run in runs if run.task.request.request_id == "r1"} == {"w0", "w1"}
