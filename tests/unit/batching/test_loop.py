"""The thread that owns the model: its queue, its idleness, its end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from greenroom.core.errors import InvalidRequest, Saturated
from greenroom.core.generation import Event, Finished, FinishReason
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.batch_loop import BatchLoop, LoopStopped
from greenroom.moe.batch.completions import complete
from greenroom.policies.batching.batch_policy import BatchDecision, BatchPolicy, BatchState
from greenroom.policies.batching.fcfs import FcfsBatching
from tests.contract.batching.harness import request
from tests.unit.batching.fake_model import FakeModel, continuation


class Client:
    """Takes events on the loop's thread; asked on the test's."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def take(self, event: Event) -> None:
        self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=30)

    def rest(self) -> tuple[tuple[int, ...], Finished]:
        """Everything up to the last event, and that nothing follows it."""
        ids: list[int] = []
        while not isinstance(event := self.next(), Finished):
            ids.append(event.token_id)
        assert self.events.empty()
        return tuple(ids), event


@contextmanager
def running(model: FakeModel, **options: Any) -> Iterator[BatchLoop]:
    engine_options = {key: options.pop(key) for key in ("policy", "observer", "eos_token_ids") if key in options}
    engine = BatchEngine(model.as_ragged(), BatchConfig(1 << 20, **options), **engine_options)
    loop = BatchLoop(engine).start()
    try:
        yield loop
    finally:
        model.gate.set()
        loop.stop()
    assert loop.unfinished == 0
    assert engine.snapshot().audit_failures == 0
    engine.audit()


def test_requests_from_many_threads_are_answered() -> None:
    with running(FakeModel(), max_running=4) as loop:
        answers: dict[int, tuple[int, ...]] = {}

        def ask(place: int) -> None:
            client = Client()
            loop.submit(request(f"r{place}", (place, 3), 5), client.take, wait_s=30)
            answers[place] = client.rest()[0]

        threads = [threading.Thread(target=ask, args=(place,)) for place in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert answers == {place: continuation((place, 3), 5) for place in range(12)}


def test_a_full_queue_refuses_and_takes_again_when_one_has_left() -> None:
    model = FakeModel()
    model.gate.clear()
    with running(model, max_running=1, max_waiting=2) as loop:
        clients = [Client() for _ in range(3)]
        numbers = [loop.submit(request(f"r{i}", (i,), 2), client.take) for i, client in enumerate(clients)]
        with pytest.raises(Saturated, match="3 requests wait or run, and there is room for 3"):
            loop.submit(request("late", (9,), 2), Client().take)
        with pytest.raises(Saturated):
            loop.submit(request("late", (9,), 2), Client().take, wait_s=0.01)
        assert loop.unfinished == 3
        late = Client()
        loop.cancel(numbers[2])
        model.gate.set()
        loop.submit(request("late", (9,), 2), late.take, wait_s=30)
        assert late.rest()[0] == continuation((9,), 2)
        assert clients[2].rest()[1].reason is FinishReason.CANCELLED


def test_ids_are_unique_among_the_unfinished_and_free_with_the_last_event() -> None:
    model = FakeModel()
    model.gate.clear()
    with running(model) as loop:
        client = Client()
        loop.submit(request("same", (1,), 1), client.take)
        with pytest.raises(InvalidRequest, match="running already") as caught:
            loop.submit(request("same", (2,), 1), Client().take)
        assert caught.value.code == "duplicate_request"
        model.gate.set()
        client.rest()
        again = Client()
        loop.submit(request("same", (2,), 1), again.take)
        assert again.rest()[0] == continuation((2,), 1)


def test_what_can_never_be_served_is_refused_where_it_is_asked() -> None:
    with running(FakeModel()) as loop:
        with pytest.raises(InvalidRequest, match="no tokens"):
            loop.submit(request("a", ()), Client().take)
        assert loop.unfinished == 0


def test_cancelling_reaches_waiting_and_running_requests_and_none_twice() -> None:
    model = FakeModel()
    model.gate.clear()
    with running(model, max_running=1) as loop:
        first, second = Client(), Client()
        a = loop.submit(request("a", (1,), 50), first.take)
        b = loop.submit(request("b", (2,), 50), second.take)
        assert model.entered.wait(30)
        for number in (b, a, a, 12345):
            loop.cancel(number)
        model.gate.set()
        ids, finished = first.rest()
        assert finished.reason is FinishReason.CANCELLED
        assert ids == continuation((1,), 50)[: len(ids)]
        assert second.rest() == ((), Finished(FinishReason.CANCELLED, 1, 0))
        assert loop.wait_idle(30)
        loop.cancel(a)


def test_an_idle_loop_audits_itself_and_sleeps() -> None:
    model = FakeModel()
    with running(model) as loop:
        client = Client()
        loop.submit(request("a", (1,), 3), client.take)
        client.rest()
        assert loop.wait_idle(30)
        stats = loop.stats()
        assert stats.audits >= 1
        assert stats.steps == 3
        before = time.process_time()
        loop.engine.stats.audits = 0
        assert not threading.Event().wait(0.3)
        assert time.process_time() - before < 0.2, "an idle loop is busy"
        assert loop.stats().audits == 0


def test_an_audit_that_fails_is_counted_and_serving_goes_on() -> None:
    model = FakeModel()
    engine = BatchEngine(model.as_ragged(), BatchConfig(1 << 20))
    engine.kv.reserved_bytes = 1
    loop = BatchLoop(engine).start()
    assert loop.wait_idle(30)
    client = Client()
    loop.submit(request("a", (1,), 3), client.take)
    assert client.rest()[0] == continuation((1,), 3)
    loop.stop()
    assert loop.stats().audit_failures >= 1


def test_stopping_drains_what_is_there() -> None:
    model = FakeModel()
    model.gate.clear()
    with running(model, max_running=1) as loop:
        clients = [Client() for _ in range(3)]
        for i, client in enumerate(clients):
            loop.submit(request(f"r{i}", (i,), 4), client.take)
        stopper = threading.Thread(target=loop.stop, args=(30.0,))
        stopper.start()
        deadline = time.monotonic() + 30
        while loop.ready and time.monotonic() < deadline:
            stopper.join(0.001)
        with pytest.raises(LoopStopped, match="shutting down"):
            loop.submit(request("late", (9,), 2), Client().take)
        model.gate.set()
        stopper.join(30)
        assert [client.rest()[0] for client in clients] == [continuation((i,), 4) for i in range(3)]
        assert not loop.alive


def test_stopping_at_once_cancels_what_is_there() -> None:
    model = FakeModel()
    model.gate.clear()
    with running(model, max_running=1) as loop:
        clients = [Client() for _ in range(3)]
        for i, client in enumerate(clients):
            loop.submit(request(f"r{i}", (i,), 40), client.take)
        assert model.entered.wait(30)

        def open_once_told() -> None:
            while loop.ready:
                threading.Event().wait(0.001)
            model.gate.set()

        opener = threading.Thread(target=open_once_told)
        opener.start()
        loop.stop(0.0)
        opener.join()
        assert [client.rest()[1].reason for client in clients] == [FinishReason.CANCELLED] * 3


def test_a_forward_that_hangs_does_not_hang_its_stopper() -> None:
    model = FakeModel()
    model.gate.clear()
    with running(model) as loop:
        loop.submit(request("a", (1,), 2), Client().take)
        assert model.entered.wait(30)
        with pytest.raises(TimeoutError, match="still in a step"):
            loop.stop(0.0, join_s=0.05)


def test_stopping_what_never_started_or_has_stopped_is_nothing() -> None:
    loop = BatchLoop(BatchEngine(FakeModel().as_ragged(), BatchConfig(1 << 20)))
    assert not loop.ready
    with pytest.raises(LoopStopped):
        loop.submit(request("a", (1,), 2), Client().take)
    loop.stop()
    other = BatchLoop(BatchEngine(FakeModel().as_ragged(), BatchConfig(1 << 20))).start()
    other.stop()
    other.stop()


class Wrong(BatchPolicy):
    def decide(self, state: BatchState) -> BatchDecision:
        raise ArithmeticError("a policy's own fault")


def test_when_the_loop_itself_fails_no_request_waits_for_ever() -> None:
    loop = BatchLoop(BatchEngine(FakeModel().as_ragged(), BatchConfig(1 << 20), Wrong())).start()
    client = Client()
    loop.submit(request("a", (1,), 2), client.take)
    assert client.rest() == ((), Finished(FinishReason.FAILED, 1, 0, "the model has failed"))
    with pytest.raises(ArithmeticError):
        loop.stop()
    assert not loop.ready
    assert loop.unfinished == 0
    with pytest.raises(LoopStopped, match="has failed"):
        loop.submit(request("b", (1,), 2), client.take)


def test_what_arrives_while_the_loop_fails_gets_its_end_too() -> None:
    model = FakeModel()

    def exits(chunks: Sequence[Chunk]) -> None:
        raise SystemExit("torn down in the middle of a forward")

    model.before = exits
    model.gate.clear()
    loop = BatchLoop(BatchEngine(model.as_ragged(), BatchConfig(1 << 20))).start()
    first, second = Client(), Client()
    loop.submit(request("a", (1,), 2), first.take)
    assert model.entered.wait(30)
    loop.submit(request("b", (1,), 2), second.take)
    model.gate.set()
    for client in (first, second):
        assert client.rest() == ((), Finished(FinishReason.FAILED, 1, 0, "the model has failed"))
    with pytest.raises(SystemExit):
        loop.stop()
    assert loop.unfinished == 0


class Hesitating(BatchPolicy):
    """Waits for something of its own: moves only every third time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, state: BatchState) -> BatchDecision:
        self.asked += 1
        return FcfsBatching().decide(state) if self.asked % 3 == 0 else BatchDecision()


def test_a_policy_that_hesitates_is_asked_again() -> None:
    policy = Hesitating()
    with running(FakeModel(), policy=policy) as loop:
        client = Client()
        loop.submit(request("a", (1,), 3), client.take)
        assert client.rest()[0] == continuation((1,), 3)
        assert policy.asked < 30, "asked without a pause"


def test_complete_answers_in_order_more_than_fit_at_once() -> None:
    tokens: list[tuple[int, int]] = []
    ends: list[int] = []
    with running(FakeModel(), max_running=2, max_waiting=1) as loop:
        answers = complete(
            loop,
            (request(f"r{i}", (i, 4), 3, logprobs=1) for i in range(9)),
            on_token=lambda place, token: tokens.append((place, token.index)),
            on_finished=lambda place, finished: ends.append(place),
        )
        assert [answer.token_ids for answer in answers] == [continuation((i, 4), 3) for i in range(9)]
        assert all(len(answer.logprobs) == 3 for answer in answers)
        assert sorted(tokens) == [(place, index) for place in range(9) for index in range(3)]
        assert sorted(ends) == list(range(9))
        assert loop.wait_idle(30)


def test_complete_cancels_what_it_asked_for_when_one_is_refused() -> None:
    model = FakeModel()
    model.gate.clear()
    with running(model) as loop:
        with pytest.raises(InvalidRequest):
            complete(loop, [request("good", (1,), 500), request("bad", ())])
        model.gate.set()
        assert loop.wait_idle(30)
        assert loop.stats().finished[FinishReason.CANCELLED] == 1


def test_complete_gives_back_what_there_is_when_its_time_is_up() -> None:
    model = FakeModel()

    def slow(chunks: Sequence[Chunk]) -> None:
        if len(model.forwards) > 3:
            threading.Event().wait(0.01)

    model.before = slow
    with running(model, max_running=1, max_waiting=0) as loop:
        first, second = complete(loop, [request("long", (1,), 900), request("never", (2,), 900)], timeout_s=0.3)
        assert first.finished.reason is FinishReason.CANCELLED
        assert len(first.token_ids) < 900
        assert first.token_ids == continuation((1,), len(first.token_ids))
        assert second == type(second)((), (), Finished(FinishReason.CANCELLED, 1, 0))
