"""A worker's service between a scheduler, gateways and an engine that follows a script, all in one process."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Token
from greenroom.core.messages import MemberKind
from greenroom.fabric.wire import from_attempt
from greenroom.v1 import common_pb2, worker_pb2
from greenroom.worker.service import WorkerFailed
from greenroom.worker.service_config import StreamConfig
from tests.pipeline.worker.scripted import LEASE_MS, SCHEDULER, Stage, answer, staged, until

pytestmark = pytest.mark.usefixtures("net")
Closed = worker_pb2.RunClosed
Refused = worker_pb2.RunRefused
PROMPT = (1, 2, 3)


def ids(response: worker_pb2.RunResponse) -> tuple[int, ...]:
    assert response.WhichOneof("end") == "result", response
    return tuple(response.result.token_ids)


async def begun(stage: Stage, count: int = 1) -> None:
    """So many were begun, and the gateways of all runs have answered."""
    await until(
        lambda: len(stage.engine.begun) >= count and all(run.wanted for run in stage.service.table.runs.values())
    )


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    code: grpc.StatusCode = caught.value.code()
    return code


# -- a run ---------------------------------------------------------------------------------------------------


async def test_a_run_from_its_call_to_its_result() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a"))
        await begun(stage)
        _, request = stage.engine.begun[0]
        assert (request.prompt_ids, request.prefix, request.task_type) == (PROMPT, (), "converse")
        await stage.step(6)
        result = (await call).result
        assert tuple(result.token_ids) == answer(PROMPT, 6)
        assert (result.reason, result.prompt_tokens) == (common_pb2.END_REASON_LENGTH, 3)
        await until(lambda: len(gateway.got["a"]) == 6)
        assert tuple(gateway.got["a"]) == answer(PROMPT, 6)
        assert gateway.messages <= 6, "a message a step"
        attempt = common_pb2.Attempt(epoch=5, n=0)
        await stage.stub.CancelRun(
            worker_pb2.CancelRunRequest(epoch=5, scheduler=SCHEDULER, request_id="a", attempt=attempt)
        )
        assert not stage.service.table.runs


@pytest.mark.parametrize("steps", [0, 3, 6])
async def test_it_generates_while_it_asks_and_tells_nothing_before_the_answer(steps: int) -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        gateway.answering.clear()
        call = stage.run(stage.task("a"))
        await until(lambda: gateway.calls == 1)
        assert len(stage.engine.begun) == 1
        await stage.step(steps)
        [progress] = (await stage.service.state()).runs
        assert (progress.generated, gateway.messages, call.done()) == (0, 0, False)
        gateway.answering.set()
        await until(lambda: stage.service.table.runs["a"].wanted)
        await stage.step(6 - steps)
        assert ids(await call) == answer(PROMPT, 6)
        await until(lambda: tuple(gateway.got["a"]) == answer(PROMPT, 6))
        assert len(stage.engine.begun) == 1
        assert stage.service.counters.prefill_rows_for_nothing == 0


@pytest.mark.parametrize("steps", [0, 3, 6])
async def test_of_a_run_that_begins_anew_nothing_is_learnt_and_its_prefill_is_counted(steps: int) -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        had = (9, 9, 9)
        gateway.expect("a", *had)
        gateway.answering.clear()
        call = stage.run(stage.task("a"))
        await until(lambda: gateway.calls == 1)
        await stage.step(steps)
        gateway.answering.set()
        await begun(stage, 2)
        assert [token.token_id for token in stage.engine.begun[1][1].prefix] == [*had]
        await stage.step(3)
        assert ids(await call) == (*had, *answer(PROMPT, 6)[3:])
        counters = stage.service.counters
        await until(
            lambda: counters.traces > 0 and ("traces_waiting", 0) in {(n, v) for n, _, v in stage.service.gauges()}
        )
        assert counters.traces == 1
        assert (counters.results, counters.prefill_rows_for_nothing) == (1, len(PROMPT) if steps else 0)
        assert counters.tokens == 3
        assert not stage.service._unheard
        assert not stage.service._ends


@pytest.mark.parametrize("steps", [0, 3, 6])
async def test_a_run_that_nobody_wants_leaves_nothing(steps: int) -> None:
    """Its request has ended elsewhere meanwhile."""
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        gateway.book.forget("a")
        gateway.answering.clear()
        call = stage.run(stage.task("a"))
        await until(lambda: gateway.calls == 1)
        await stage.step(steps)
        gateway.answering.set()
        assert (await call).closed.why == Closed.WHY_UNWANTED
        await until(lambda: not stage.service._unheard)
        counters = stage.service.counters
        gauges = {name: value for name, _, value in stage.service.gauges()}
        assert counters.prefill_rows_for_nothing == (len(PROMPT) if steps else 0)
        assert (counters.traces, gauges["traces_waiting"], counters.results) == (0, 0, 0)
        assert not stage.service._ends


async def test_what_the_client_has_had_is_the_prefix() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a", *answer(PROMPT, 4))
        call = stage.run(stage.task("a"))
        await begun(stage, 2)
        assert [token.token_id for token in stage.engine.begun[1][1].prefix] == list(answer(PROMPT, 4))
        await stage.step(2)
        assert ids(await call) == answer(PROMPT, 6)
        await until(lambda: len(gateway.got["a"]) == 6)
        assert tuple(gateway.got["a"]) == answer(PROMPT, 6)
        assert stage.service.counters.prefix_tokens == 4


async def test_many_requests_are_one_message_a_step() -> None:
    async with staged(max_running=20) as stage:
        gateway = await stage.gateway()
        await stage.lease()
        calls = []
        for number in range(20):
            gateway.expect(f"r{number}")
            calls.append(stage.run(stage.task(f"r{number}", length=10), number))
        await begun(stage, 20)
        await stage.step(10)
        results = await asyncio.gather(*calls)
        assert {ids(result) for result in results} == {answer(PROMPT, 10)}
        await until(lambda: all(len(got) == 10 for got in gateway.got.values()))
        assert gateway.messages <= 10
        assert gateway.calls == 1


async def test_a_request_that_can_never_run_is_refused_with_the_reason_for_its_client() -> None:
    async with staged() as stage:
        await stage.gateway()
        response = await stage.run(stage.task("a", prompt=range(1000)))
        assert (response.refused.why, response.refused.message) == (Refused.WHY_INVALID, "too long")
        broken = await stage.stub.Run(
            worker_pb2.RunRequest(epoch=5, scheduler=SCHEDULER, worker="worker-1", task=b"\xc1")
        )
        assert broken.refused.why == Refused.WHY_INVALID
        assert "can not be read" in broken.refused.message
        assert not stage.service.table.runs


async def test_as_many_runs_as_there_is_room_for() -> None:
    async with staged(max_running=2, max_queued=1) as stage:
        await stage.lease()
        calls = [stage.run(stage.task(f"r{number}", reply_to=None), number) for number in range(3)]
        await begun(stage, 3)
        refused = await stage.run(stage.task("late", reply_to=None), 9)
        assert refused.refused.why == Refused.WHY_FULL
        await stage.step(6)
        for call in calls:
            assert ids(await call) == answer(PROMPT, 6)


# -- calls again ---------------------------------------------------------------------------------------------


async def test_the_same_call_twice_is_one_run_and_both_have_its_result() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        calls = [stage.run(stage.task("a")) for _ in range(2)]
        await begun(stage)
        await stage.step(6)
        assert [ids(await call) for call in calls] == [answer(PROMPT, 6)] * 2
        assert len(stage.engine.begun) == 1
        again = await stage.run(stage.task("a"))
        assert ids(again) == answer(PROMPT, 6), "the result is kept until it is released"


async def test_a_higher_attempt_takes_the_run_over() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        first = stage.run(stage.task("a"), 0)
        await begun(stage)
        await stage.step(2)
        await stage.lease(epoch=9)
        second = stage.run(stage.task("a"), 0, epoch=9)
        assert (await first).closed.why == Closed.WHY_SUPERSEDED
        await until(lambda: gateway.opened == 2)
        await stage.step(4)
        assert ids(await second) == answer(PROMPT, 6)
        await until(lambda: len(gateway.got["a"]) == 6)
        assert tuple(gateway.got["a"]) == answer(PROMPT, 6)
        assert len(stage.engine.begun) == 1
        again = await stage.run(stage.task("a"), 5, epoch=9)
        assert ids(again) == answer(PROMPT, 6)
        lower = await stage.run(stage.task("a"), 2, epoch=9)
        assert lower.refused.why == Refused.WHY_STALE


async def test_what_runs_is_listed() -> None:
    async with staged() as stage:
        await stage.lease()
        done = stage.run(stage.task("done", reply_to=None, length=1), 3)
        running = stage.run(stage.task("running", reply_to=None), 4)
        await begun(stage, 2)
        await stage.step(1)
        await done
        listed = await stage.stub.ListRuns(worker_pb2.ListRunsRequest(epoch=5, scheduler=SCHEDULER, worker="worker-1"))
        found = {run.request_id: (from_attempt(run.attempt), run.finished) for run in listed.runs}
        assert found == {"done": (Attempt(5, 3), True), "running": (Attempt(5, 4), False)}
        running.cancel()


async def test_a_run_outlives_its_call_and_is_attached_to() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        first = stage.run(stage.task("a"))
        await begun(stage)
        first.cancel()
        await stage.step(6)
        await until(lambda: len(gateway.got["a"]) == 6)
        second = await stage.run(stage.task("a"), 1)
        assert ids(second) == answer(PROMPT, 6)
        assert len(stage.engine.begun) == 1


async def test_a_run_without_a_call_is_dropped_after_the_grace_period() -> None:
    async with staged(grace_ms=5_000) as stage:
        await stage.lease()
        call = stage.run(stage.task("a", reply_to=None))
        await begun(stage)
        call.cancel()
        await until(lambda: stage.service.table.runs["a"].alone_since is not None)
        stage.clock.pass_(4_000)
        await asyncio.sleep(0.12)  # more than a tick
        assert "a" in stage.service.table.runs
        stage.clock.pass_(1_500)
        await until(lambda: not stage.service.table.runs)
        assert stage.engine.cancelled == [0]
        assert stage.service.counters.forgotten == 1


async def test_a_cancel_ends_the_run_of_its_attempt_or_a_lower_one() -> None:
    async with staged() as stage:
        await stage.lease()
        call = stage.run(stage.task("a", reply_to=None), 4)
        await begun(stage)
        cancel = worker_pb2.CancelRunRequest(epoch=5, scheduler=SCHEDULER, request_id="a", attempt={"epoch": 5, "n": 3})  # type: ignore[arg-type]
        await stage.stub.CancelRun(cancel)
        assert stage.engine.cancelled == []
        cancel.attempt.n = 4
        await stage.stub.CancelRun(cancel)
        assert (await call).closed.why == Closed.WHY_RELEASED
        assert stage.engine.cancelled == [0]
        await stage.stub.CancelRun(cancel)


# -- epochs and instances ------------------------------------------------------------------------------------


async def test_an_epoch_that_is_over_is_refused_by_every_call() -> None:
    async with staged() as stage:
        await stage.lease(epoch=9)
        late = {"epoch": 8, "n": 99}
        assert await code_of(stage.run(stage.task("a"), epoch=8)) is grpc.StatusCode.FAILED_PRECONDITION
        listing = stage.stub.ListRuns(worker_pb2.ListRunsRequest(epoch=8, worker="worker-1"))
        assert await code_of(listing) is grpc.StatusCode.FAILED_PRECONDITION
        cancel = worker_pb2.CancelRunRequest(epoch=8, request_id="a", attempt=late)  # type: ignore[arg-type]
        assert await code_of(stage.stub.CancelRun(cancel)) is grpc.StatusCode.FAILED_PRECONDITION
        lease = await stage.lease(epoch=8)
        assert await lease.ended is grpc.StatusCode.FAILED_PRECONDITION
        assert not stage.service.table.runs


async def test_calls_for_another_instance_are_told_so() -> None:
    async with staged() as stage:
        assert await code_of(stage.run(stage.task("a"), worker="worker-0")) is grpc.StatusCode.NOT_FOUND
        listing = stage.stub.ListRuns(worker_pb2.ListRunsRequest(epoch=5, worker="worker-0"))
        assert await code_of(listing) is grpc.StatusCode.NOT_FOUND


# -- gateways ------------------------------------------------------------------------------------------------


async def test_without_a_reply_address_it_goes_on_without_a_stream() -> None:
    async with staged() as stage:
        await stage.lease()
        call = stage.run(stage.task("a", reply_to=None))
        await begun(stage)
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)


async def test_an_unknown_gateway_is_waited_for_and_then_gone() -> None:
    async with staged() as stage:
        await stage.lease()
        call = stage.run(stage.task("a", reply_to="nobody"))
        await until(lambda: stage.service.streams.gateways == 1)
        stage.clock.pass_(9_000)
        await stage.step(6)
        assert not call.done()
        assert not stage.service.table.runs["a"].reported
        stage.clock.pass_(2_000)
        assert ids(await call) == answer(PROMPT, 6)


async def test_a_gateway_that_announces_itself_late_is_found() -> None:
    async with staged() as stage:
        await stage.lease()
        call = stage.run(stage.task("a"))
        await until(lambda: stage.service.streams.gateways == 1)
        stage.clock.pass_(5_000)
        gateway = await stage.gateway()
        gateway.expect("a", *answer(PROMPT, 2))
        await begun(stage)
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)
        await until(lambda: tuple(gateway.got["a"]) == answer(PROMPT, 6))


async def test_a_gateway_that_has_left_is_gone_at_once() -> None:
    async with staged() as stage:
        stage.members.certainly_gone.add("gateway")
        await stage.lease()
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)


async def test_another_gateway_at_its_address_means_that_it_is_gone() -> None:
    async with staged() as stage:
        gateway = await stage.gateway("newer")
        stage.members.add("gateway", gateway.address)
        await stage.lease()
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)
        assert stage.service.counters.gateways_gone == 1
        assert gateway.calls == 0


async def test_a_gateway_that_can_not_be_reached_may_have_clients_all_the_same() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await gateway.kill()
        await stage.lease()
        gateway.expect("a", *answer(PROMPT, 3))
        call = stage.run(stage.task("a"))
        await until(lambda: stage.service.counters.gateway_calls >= 3)
        stage.clock.pass_(60_000)
        await stage.step(2)
        assert not stage.service.table.runs["a"].wanted
        await gateway.serve()
        await begun(stage, 2)
        assert len(stage.engine.begun[1][1].prefix) == 3
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)


async def test_silence_and_no_connection_together_are_certainty() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await gateway.kill()
        await stage.lease()
        call = stage.run(stage.task("a"))
        await until(lambda: stage.service.counters.gateway_calls >= 2)
        await stage.step(6)
        assert not call.done()
        stage.members.certainly_gone.add("gateway")
        assert ids(await call) == answer(PROMPT, 6)


async def test_a_stream_that_breaks_is_opened_anew_without_gap_or_repeat() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a", length=9))
        await begun(stage)
        await stage.step(3)
        await until(lambda: len(gateway.got["a"]) == 3)
        await gateway.kill()
        await stage.step(3)
        assert len(gateway.got["a"]) == 3
        await gateway.serve()
        await until(lambda: gateway.opened == 2)
        await stage.step(3)
        assert ids(await call) == answer(PROMPT, 9)
        await until(lambda: len(gateway.got["a"]) == 9)
        assert tuple(gateway.got["a"]) == answer(PROMPT, 9)
        assert len(stage.engine.begun) == 1


async def test_a_result_waits_for_a_gateway_that_may_have_had_another_text() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(2)
        await gateway.kill()
        await stage.step(4)
        await until(lambda: not stage.engine.running)
        assert not call.done()
        await gateway.serve()
        assert ids(await call) == answer(PROMPT, 6)


async def test_a_run_that_the_client_has_another_text_of_begins_anew_behind_that() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(1)
        await until(lambda: len(gateway.got["a"]) == 1)
        await gateway.kill()
        stream = object()  # meanwhile another attempt has had the client's ear
        gateway.book.open("a", Attempt(5, 0), stream)
        gateway.book.add("a", stream, [Token(1, 777)])
        await gateway.serve()
        await begun(stage, 2)
        assert [token.token_id for token in stage.engine.begun[1][1].prefix] == [answer(PROMPT, 1)[0], 777]
        assert stage.engine.cancelled == [0]
        await stage.step(6)
        assert ids(await call)[:2] == (answer(PROMPT, 1)[0], 777)


async def test_a_client_that_has_its_end_ends_the_run() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(1)
        gateway.book.forget("a")
        await stage.step(1)
        assert (await call).closed.why == Closed.WHY_UNWANTED
        assert stage.engine.cancelled == [0]


async def test_a_run_that_its_gateway_disowns_goes_on_to_its_end() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(1)
        gateway.book.disown("a")
        await stage.step(5)
        assert ids(await call) == answer(PROMPT, 6)
        assert stage.engine.cancelled == []


async def test_a_run_that_its_gateway_does_not_know_goes_on_without_a_stream() -> None:
    async with staged() as stage:
        await stage.gateway()
        await stage.lease()
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)


async def test_tokens_that_do_not_join_on_are_sent_again_from_where_the_gateway_is() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(3)
        await until(lambda: len(gateway.got["a"]) == 3)
        del gateway.book._deliveries["a"].tokens[1:]
        del gateway.got["a"][1:]
        await stage.step(3)
        assert ids(await call) == answer(PROMPT, 6)
        await until(lambda: len(gateway.got["a"]) == 6)
        assert tuple(gateway.got["a"]) == answer(PROMPT, 6)


# What a connection takes before it stalls is some ten kilobytes over gRPC: that many tokens would take long here.
silent_stalls_early = pytest.mark.parametrize(
    ("net", "says_taken"), [("local", True), ("grpc", True), ("local", False)], indirect=["net"]
)


async def asked_and_overdue(stage: Stage) -> None:
    """Takes two steps. The second asks whether the gateway has taken it in. Then the time for the answer passes."""
    for _ in range(2):
        sent = stage.service.counters.messages_sent
        stage.clock.pass_(10)
        await stage.step()
        await until(lambda: stage.service.counters.messages_sent > sent)  # noqa: B023
    stage.clock.pass_(6)


@silent_stalls_early
async def test_a_slow_gateway_loses_its_call_and_holds_up_no_other(says_taken: bool) -> None:
    async with staged(streams=StreamConfig(slow_gateway_ms=2_000)) as stage:
        slow, quick = await stage.gateway("slow"), await stage.gateway("quick")
        slow.says_taken = says_taken
        await stage.lease()
        slow.expect("s")
        quick.expect("q")
        held = stage.run(stage.task("s", reply_to="slow", length=200), 0)
        free = stage.run(stage.task("q", reply_to="quick", length=100), 1)
        await begun(stage, 2)
        slow.reading.clear()
        await asked_and_overdue(stage)
        await stage.step(98)
        assert ids(await free) == answer(PROMPT, 100)
        await until(lambda: len(quick.got["q"]) == 100)
        assert len(slow.got["s"]) < 100
        stage.clock.pass_(3_000)
        await until(lambda: stage.service.counters.gateways_dropped == 1)
        await stage.step(50)
        slow.reading.set()
        await until(lambda: slow.opened == 2)
        await stage.step(50)
        assert ids(await held) == answer(PROMPT, 200)
        await until(lambda: len(slow.got["s"]) == 200)
        assert tuple(slow.got["s"]) == answer(PROMPT, 200)


@silent_stalls_early
async def test_what_waits_for_a_gateway_is_bounded(says_taken: bool) -> None:
    async with staged(streams=StreamConfig(most_pending=20)) as stage:
        slow = await stage.gateway("slow")
        slow.says_taken = says_taken
        await stage.lease()
        slow.expect("s")
        call = stage.run(stage.task("s", reply_to="slow", length=200))
        await begun(stage)
        slow.reading.clear()
        await asked_and_overdue(stage)
        await stage.step(98)
        await until(lambda: stage.service.counters.gateways_dropped >= 1)
        await until(lambda: stage.service.streams.pending <= 20)
        slow.reading.set()
        await stage.step(100)
        assert ids(await call) == answer(PROMPT, 200)


async def test_what_comes_while_a_gateway_is_busy_goes_to_it_in_one_message() -> None:
    async with staged(streams=StreamConfig(ask_every_ms=10, overdue_ms=5)) as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a", length=50))
        await begun(stage)
        gateway.reading.clear()
        await asked_and_overdue(stage)
        sent = stage.service.counters.messages_sent
        await until(lambda: len(gateway.got["a"]) == 1)  # it was waiting for that one; the other is on its way
        await stage.step(48)
        assert stage.service.counters.messages_sent == sent
        gateway.reading.set()
        assert ids(await call) == answer(PROMPT, 50)
        await until(lambda: len(gateway.got["a"]) == 50)
        assert tuple(gateway.got["a"]) == answer(PROMPT, 50)
        assert gateway.messages == 3


async def test_a_gateway_is_asked_at_most_so_often() -> None:
    async with staged(streams=StreamConfig(ask_every_ms=10)) as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a", length=50))
        await begun(stage)
        asked = gateway.asked
        for place in range(50):
            stage.clock.pass_(1)
            stage.engine.step()
            await until(lambda: len(gateway.got["a"]) == place + 1)  # noqa: B023
        assert ids(await call) == answer(PROMPT, 50)
        assert gateway.messages == 50
        assert 4 <= gateway.asked - asked <= 5


async def test_a_gateway_that_does_not_answer_when_asked_gets_every_step() -> None:
    async with staged(streams=StreamConfig(ask_every_ms=10, overdue_ms=5)) as stage:
        gateway = await stage.gateway()
        gateway.says_taken = False
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a", length=20))
        await begun(stage)
        for place in range(20):
            stage.clock.pass_(20)
            stage.engine.step()
            await until(lambda: len(gateway.got["a"]) == place + 1)  # noqa: B023
        assert ids(await call) == answer(PROMPT, 20)
        assert gateway.messages == 20
        assert gateway.asked == 1, "it has never answered: nothing is gained by asking it again"


async def test_a_defect_in_a_link_costs_a_second_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        known = stage.members.get
        left = [1]

        def get(instance: str) -> Any:
            if left and instance == gateway.instance:
                left.clear()
                raise RuntimeError("a defect")
            return known(instance)

        monkeypatch.setattr(stage.members, "get", get)
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)


async def test_an_idle_call_is_hung_up_and_made_again_when_it_is_needed() -> None:
    async with staged(streams=StreamConfig(idle_gateway_ms=1_000)) as stage:
        gateway = await stage.gateway()
        await stage.lease()
        for number in range(2):
            gateway.expect(f"r{number}")
            call = stage.run(stage.task(f"r{number}", length=1), number)
            await begun(stage, number + 1)
            await stage.step(1)
            assert ids(await call) == answer(PROMPT, 1)
            stage.service.cancel(f"r{number}", Attempt(5, number))
            await asyncio.sleep(0.12)  # a tick sees it idle
            stage.clock.pass_(2_000)
            await until(lambda: stage.service.streams.gateways == 0)
        assert gateway.calls == 2


# -- the lease -----------------------------------------------------------------------------------------------


async def test_without_a_lease_nothing_is_sent_and_with_one_all_of_it() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        lease = await stage.lease(LEASE_MS)
        gateway.expect("a")
        call = stage.run(stage.task("a", length=8))
        await begun(stage)
        await stage.step(2)
        await until(lambda: len(gateway.got["a"]) == 2)
        lease.granting = False
        stage.clock.pass_(LEASE_MS + 1)
        await stage.step(4)
        assert len(gateway.got["a"]) == 2
        await until(lambda: stage.service.counters.lease_lapses == 1)
        await stage.lease(LEASE_MS)
        await until(lambda: len(gateway.got["a"]) == 6)
        await stage.step(2)
        assert ids(await call) == answer(PROMPT, 8)
        await until(lambda: len(gateway.got["a"]) == 8)
        assert tuple(gateway.got["a"]) == answer(PROMPT, 8)


async def test_a_lease_counts_from_when_it_was_asked_for() -> None:
    async with staged() as stage:
        lease = await stage.lease(1_000)
        lease.granting = False
        asked = len(lease.states)
        stage.service.leases.changed()
        await until(lambda: len(lease.states) > asked)
        stage.clock.pass_(900)
        lease.grant(len(lease.states))
        await until(lambda: stage.service.counters.lease_renewals >= 2)
        assert stage.service.may_emit()
        stage.clock.pass_(101)
        assert not stage.service.may_emit()


async def test_a_grant_that_comes_after_a_pause_is_worth_nothing() -> None:
    async with staged() as stage:
        lease = await stage.lease(1_000)
        lease.granting = False
        asked = len(lease.states)
        stage.service.leases.changed()
        await until(lambda: len(lease.states) > asked)
        stage.clock.pass_(10_000)  # asleep between asking and being told
        lease.grant(len(lease.states))
        await until(lambda: stage.service.counters.lease_renewals >= 2)
        assert not stage.service.may_emit()


async def test_a_newer_scheduler_ends_the_older_ones_session() -> None:
    async with staged() as stage:
        older = await stage.lease()
        newer = await stage.lease(epoch=9)
        assert await older.ended is grpc.StatusCode.OK
        assert not newer.ended.done()
        await until(lambda: stage.service.epoch == 9)


async def test_what_a_scheduler_is_told_of_the_worker() -> None:
    async with staged(max_running=3, max_queued=2) as stage:
        lease = await stage.lease()
        call = stage.run(stage.task("a", reply_to=None))
        await begun(stage)
        await stage.step(2)
        stage.service.leases.changed()
        await until(lambda: lease.states[-1].runs)
        state = lease.states[-1]
        assert (state.worker, state.max_running, state.max_queued, state.draining) == ("worker-1", 3, 2, False)
        assert (state.kv_tokens, state.kv_tokens_free, state.running) == (4096, 4000, 1)
        assert (state.experts, state.expert_load_ms) == (6, 2.0)
        assert [(run.request_id, run.generated) for run in state.runs] == [("a", 2)]
        call.cancel()


# -- the end -------------------------------------------------------------------------------------------------


async def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    async with staged() as stage:
        lease = await stage.lease()
        call = stage.run(stage.task("a", reply_to=None))
        await begun(stage)
        told: list[bool] = []
        stage.service.changed = lambda: told.append(stage.service.member().draining)
        draining = asyncio.create_task(stage.service.drain(30.0))
        await until(lambda: lease.states[-1].draining)
        assert told == [True]
        assert stage.service.unready == "draining"
        refused = await stage.run(stage.task("b", reply_to=None), 1)
        assert refused.refused.why == Refused.WHY_DRAINING
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)
        assert not draining.done()
        stage.service.cancel("a", Attempt(5, 0))  # the scheduler has the result in the journal
        await draining
        assert stage.service.counters.given_back == 0


async def test_what_does_not_end_in_time_is_given_back() -> None:
    async with staged() as stage:
        gateway = await stage.gateway()
        await stage.lease()
        gateway.expect("a")
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(2)
        await stage.service.drain(0.01)
        assert (await call).closed.why == Closed.WHY_GIVEN_BACK
        assert stage.engine.cancelled == [0]
        assert stage.service.counters.given_back == 1
        await until(lambda: tuple(gateway.got["a"]) == answer(PROMPT, 2))


async def test_a_model_that_fails_ends_the_service_and_no_request() -> None:
    async with staged() as stage:
        await stage.lease()
        call = stage.run(stage.task("a", reply_to=None))
        await begun(stage)
        failing = asyncio.create_task(stage.service.failed())
        stage.engine.alive = False
        await stage.step(6)
        assert isinstance(await failing, WorkerFailed)
        assert stage.service.unready == "the model has failed"
        await stage.service.stop()
        assert not call.done(), "no answer is what makes it a loss"
        call.cancel()


async def test_a_defect_on_the_way_of_the_tokens_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged() as stage:
        await stage.lease()
        call = stage.run(stage.task("a", reply_to=None))
        await begun(stage)
        failing = asyncio.create_task(stage.service.failed())

        def broken(*_: Any) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(stage.service.table, "token", broken)
        await stage.step(1)
        assert isinstance(await failing, KeyError)
        call.cancel()


# -- faults --------------------------------------------------------------------------------------------------


async def test_faults_come_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[str] = []
    monkeypatch.setattr("greenroom.worker.faults.kill_self", lambda: died.append("now"))
    async with staged(fault="worker:after-token:5") as stage:
        await stage.lease()
        call = stage.run(stage.task("a", reply_to=None))
        await begun(stage)
        await stage.step(4)
        assert died == []
        await stage.step(1)
        assert died
        call.cancel()
    died.clear()
    async with staged(fault="worker:poison:nightshade") as stage:
        await stage.lease()
        calls = [stage.run(stage.task("a", reply_to=None, text="tea"), 0)]
        await begun(stage)
        assert died == []
        calls.append(stage.run(stage.task("b", reply_to=None, text="a cup of nightshade tea"), 1))
        await begun(stage, 2)
        assert died == ["now"]
        for call in calls:
            call.cancel()


async def test_a_large_epoch_of_a_stranger_does_not_depose_the_scheduler() -> None:
    """A call raises the epoch only if `members` names its caller as a scheduler of this pool."""
    async with staged() as stage:
        await stage.gateway()
        await stage.lease()
        stage.members.add("a gateway", "", MemberKind.GATEWAY)
        stage.members.add("another pool's", "", MemberKind.SCHEDULER, pool=1)
        attempt = common_pb2.Attempt(epoch=2**62, n=0)
        for name in ("", "nobody", "a gateway", "another pool's"):
            calls: list[Any] = [
                stage.stub.ListRuns(
                    worker_pb2.ListRunsRequest(epoch=2**62, scheduler=name, worker=stage.service.instance)
                ),
                stage.stub.CancelRun(worker_pb2.CancelRunRequest(epoch=2**62, scheduler=name, attempt=attempt)),
                stage.stub.Run(
                    worker_pb2.RunRequest(
                        epoch=2**62, scheduler=name, worker=stage.service.instance, attempt=attempt, task=b""
                    )
                ),
            ]
            for call in calls:
                assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
        assert stage.service.table.epoch == 5
        call = stage.run(stage.task("a"))
        await begun(stage)
        await stage.step(6)
        assert ids(await call) == answer(PROMPT, 6)


@pytest.mark.parametrize("hello", [2**62, 5])
async def test_a_lease_of_a_stranger_does_not_depose_the_scheduler(hello: int) -> None:
    """Its hello has a large epoch, or its grant has one after a hello with the present epoch."""
    async with staged() as stage:
        await stage.lease()
        intruder = await stage.lease(epoch=hello, granted=2**62, by="nobody")
        assert await intruder.ended is grpc.StatusCode.FAILED_PRECONDITION
        assert stage.service.table.epoch == 5
        again = await stage.lease()
        assert not again.ended.done()


async def test_a_new_scheduler_raises_the_epoch_as_it_asks_for_the_runs() -> None:
    """This is before its first lease. The scheduler of the epoch before starts nothing more (rule 3)."""
    async with staged() as stage:
        await stage.lease()
        stage.members.add("next", "", MemberKind.SCHEDULER)
        await stage.stub.ListRuns(worker_pb2.ListRunsRequest(epoch=9, scheduler="next", worker=stage.service.instance))
        assert await code_of(stage.run(stage.task("a"))) is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_journal_made_anew_is_begun_with_once_the_lease_is_over() -> None:
    async with staged() as stage:
        await stage.gateway()
        lease = await stage.lease(1_000)
        call = stage.run(stage.task("a"))
        await begun(stage)

        def listing(journal: str, epoch: int) -> Any:
            return stage.stub.ListRuns(
                worker_pb2.ListRunsRequest(
                    epoch=epoch, scheduler=SCHEDULER, journal=journal, worker=stage.service.instance
                )
            )

        assert len((await listing("first", 5)).runs) == 1
        assert await code_of(listing("anew", 0)) is grpc.StatusCode.FAILED_PRECONDITION
        await lease.hang_up()
        stage.clock.now += 1_000
        assert len((await listing("anew", 0)).runs) == 0
        assert (await call).closed.why == Closed.WHY_FORGOTTEN
        assert (stage.service.table.epoch, stage.engine.cancelled) == (0, [0])
