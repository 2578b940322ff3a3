"""A worker whose engine is a collaboration of experts: runs without tokens, and what it says of those it executes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from greenroom.core.collaboration import InputKind
from greenroom.core.inference import InferenceInput
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.core.messages import Inference, Task
from greenroom.v1 import common_pb2, worker_pb2
from greenroom.worker.inference_engine import InferenceEngine
from greenroom.worker.inference_twin import SPOILED, InferenceTwin, twin_outputs
from tests.pipeline.worker.scripted import Stage, staged, task_of
from tests.waiting import until


def inference(name: str, *, data: bytes = b"x", parameter: str = "U7", reply_to: str | None = "gateway") -> Task:
    request = Inference(
        request_id=name,
        pool=0,
        model="board",
        inputs=(InferenceInput(kind=InputKind.IMAGE, data=data),),
        accepted_ms=1,
        deadline_ms=10**13,
        parameter=parameter,
        reply_to=reply_to,
    )
    return Task(request=request, task_type=parameter, source="client")


@pytest.fixture
def twin() -> InferenceTwin:
    return InferenceTwin(held=True, batch=2)


@pytest.fixture
async def stage(twin: InferenceTwin) -> AsyncIterator[Stage]:
    async with staged(twin, twin.card, max_running=4000) as made:
        await made.gateway()
        yield made


def test_the_twin_is_an_engine(twin: InferenceTwin) -> None:
    assert isinstance(twin, InferenceEngine)


async def test_a_run_ends_with_its_outputs(stage: Stage, twin: InferenceTwin) -> None:
    await stage.lease()
    calls = [stage.run(inference(f"r{n}", data=b"%d" % n), n) for n in range(3)]
    await until(lambda: twin.state().waiting == 3)
    twin.release()
    for n, call in enumerate(calls):
        result = (await call).result
        assert result.reason == common_pb2.END_REASON_STOP
        found = msgspec.msgpack.decode(result.outputs, type=InferenceOutputs)
        assert found == twin_outputs((InferenceInput(kind=InputKind.IMAGE, data=b"%d" % n),), "U7")
    assert twin.batches == [("r0", "r1"), ("r2",)]


async def test_it_says_what_it_executes_as_soon_as_that_changes(stage: Stage, twin: InferenceTwin) -> None:
    lease = await stage.lease()
    calls = [asyncio.ensure_future(stage.run(inference(f"r{n}"), n)) for n in range(3)]
    await until(lambda: twin.state().waiting == 3)
    assert lease.states[-1].arranges
    assert not lease.states[-1].executing
    assert lease.states[-1].max_running == 4000
    twin.begin_batch()
    await until(lambda: list(lease.states[-1].executing) == ["r0", "r1"], "it said so without being asked")
    assert not lease.states[-1].runs, "there is no progress to tell of thousands"
    twin.finish_batch()
    await until(lambda: not lease.states[-1].executing)
    twin.release()
    await asyncio.gather(*calls)


async def test_a_cancelled_run_leaves_the_engine_and_may_come_again(stage: Stage, twin: InferenceTwin) -> None:
    await stage.lease()
    first = asyncio.ensure_future(stage.run(inference("r"), 0))
    await until(lambda: twin.state().waiting == 1)
    twin.begin_batch()
    attempt = common_pb2.Attempt(epoch=stage.epoch, n=0)
    cancel = worker_pb2.CancelRunRequest(epoch=stage.epoch, request_id="r", attempt=attempt, scheduler="scheduler")
    await stage.stub.CancelRun(cancel)
    assert (await first).closed.why == worker_pb2.RunClosed.WHY_RELEASED
    second = asyncio.ensure_future(stage.run(inference("r"), 1))
    await until(lambda: twin.state().waiting == 1)
    twin.finish_batch()  # of the cancelled one: nobody hears of it
    assert not second.done()
    twin.release()
    assert (await second).result.reason == common_pb2.END_REASON_STOP


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (inference("r", parameter="R9"), "no expert is known for 'R9'"),
        (task_of("r"), "takes inferences, not prompts"),
    ],
)
async def test_what_can_never_run_is_refused(stage: Stage, task: Task, reason: str) -> None:
    await stage.lease()
    refused = (await stage.run(task)).refused
    assert refused.why == worker_pb2.RunRefused.WHY_INVALID
    assert reason in refused.message


async def test_inputs_that_it_has_no_memory_for_are_refused_for_now(twin: InferenceTwin) -> None:
    async with staged(twin, twin.card, max_running=4000, max_input_bytes=100) as stage:
        await stage.gateway()
        await stage.lease()
        call = asyncio.ensure_future(stage.run(inference("r0", data=bytes(80))))
        await until(lambda: twin.state().waiting == 1)
        refused = (await stage.run(inference("r1", data=bytes(80)), 1)).refused
        assert refused.why == worker_pb2.RunRefused.WHY_FULL
        assert {name: value for name, _, value in stage.service.gauges()}["input_bytes"] == 80
        twin.release()
        assert (await call).result.reason == common_pb2.END_REASON_STOP


async def test_a_worker_of_text_refuses_an_inference() -> None:
    async with staged() as stage:
        await stage.lease()
        refused = (await stage.run(inference("r"))).refused
        assert refused.why == worker_pb2.RunRefused.WHY_INVALID
        assert "generates text" in refused.message


async def test_a_request_that_is_at_fault_is_told_so(stage: Stage, twin: InferenceTwin) -> None:
    await stage.lease()
    call = asyncio.ensure_future(stage.run(inference("r", data=SPOILED)))
    await until(lambda: twin.state().waiting == 1)
    twin.release()
    result: Any = (await call).result
    assert (result.reason, result.invalid) == (common_pb2.END_REASON_FAILED, True)


async def test_what_is_left_at_the_end_is_given_back(twin: InferenceTwin) -> None:
    async with staged(twin, twin.card) as stage:
        await stage.gateway()
        await stage.lease()
        call = asyncio.ensure_future(stage.run(inference("r")))
        await until(lambda: twin.state().waiting == 1)
        await stage.service.drain(0.0)
        assert (await call).closed.why == worker_pb2.RunClosed.WHY_GIVEN_BACK
        assert twin.state().waiting == 0
