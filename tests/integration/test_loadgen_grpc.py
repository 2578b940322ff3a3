"""The load generator over gRPC, against a servicer whose every delay is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from greenroom.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from greenroom_load.arrivals import Constant
from greenroom_load.lengths import Lengths
from greenroom_load.mix import ShiftingMix
from greenroom_load.plan import Bounds, Plan
from greenroom_load.prompts import TemplatedPrompts
from greenroom_load.report import Report
from greenroom_load.session import Session
from greenroom_load.targets import Targets, TargetsByTask
from greenroom_load.transport import Style, transport_for
from greenroom_load.transport.base import NotReady
from tests.integration.loadgen_stub import certificate
from tests.waiting import DEADLINE_S

TTFT_S, ITL_S, TOKENS = 0.04, 0.01, 5
STOP = common_pb2.END_REASON_STOP


class Inference(inference_pb2_grpc.InferenceServicer):
    """Tokens at their times; ``fail`` by the number of a request, which its id ends in."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.arrived: dict[int, float] = {}
        self.writes: dict[int, list[float]] = {}
        self.fail: dict[int, str] = {}
        self.cancelled = 0
        self.ended = asyncio.Event()

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        metadata = dict(context.invocation_metadata() or ())
        number = int(str(metadata["x-request-id"]).rpartition("-")[2])
        self.arrived[number] = due = time.monotonic()
        self.requests.append(request)
        self.metadata.append(metadata)
        due += TTFT_S
        fail = self.fail.get(number)
        try:
            if fail == "saturated":
                context.set_trailing_metadata((("greenroom-code", "saturated"), ("retry-after", "2")))
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            if fail == "invalid":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such field")
            if fail == "hang":
                await asyncio.sleep(DEADLINE_S)
            for token in range(TOKENS):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.writes.setdefault(number, []).append(time.monotonic())
                tokens = common_pb2.TokenRun(start=token, ids=[token])
                event = inference_pb2.GenerateEvent(request_id=f"id-{number}", text=f" w{token}", tokens=tokens)
                if token == TOKENS - 1:
                    if fail == "no end":
                        return
                    reason = common_pb2.END_REASON_SHED if fail == "shed" else STOP
                    usage = inference_pb2.Usage(prompt_tokens=11, completion_tokens=TOKENS, approximated=0.25)
                    event.end.CopyFrom(inference_pb2.End(reason=reason, usage=usage))
                yield event
                if fail == "internal" and token == 2:
                    context.set_trailing_metadata((("greenroom-code", "generation_failed"),))
                    await context.abort(grpc.StatusCode.INTERNAL, "an expert could not be read")
                if fail == "cancelled" and token == 2:
                    await context.abort(grpc.StatusCode.CANCELLED, "the server is stopping")
                due += ITL_S
        except asyncio.CancelledError:
            self.cancelled += 1
            self.ended.set()
            raise

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.GenerateResponse:
        raise NotImplementedError

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.CancelResponse:
        raise NotImplementedError

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.Model:
        return inference_pb2.Model(name="grpc-model", max_model_len=100)


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[tuple[Inference, str]]:
    servicer, server = Inference(), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    if credentials is None:
        url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        url = f"grpcs://127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    yield servicer, url
    await server.stop(None)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Inference, str]]:
    async with serving() as made:
        yield made


def plan(**bounds: Any) -> Plan:
    prompts = TemplatedPrompts(0)
    return Plan(
        arrivals=Constant(40.0),
        bounds=Bounds(**{"warmup_requests": 0, "drain_timeout_s": 5.0, "request_timeout_s": 20.0, **bounds}),
        prompts=prompts,
        mix=ShiftingMix(prompts.mix),
        output=Lengths("fixed", (8.0,)),
        targets=TargetsByTask(others=Targets(ttft_ms=1000, tpot_ms=0.5)),
    )


async def run(url: str, load: Plan, *, ready_timeout_s: float = 10.0, **style: Any) -> Report:
    made = Style(**style)
    session = Session(
        transport=transport_for(url, made), style=made, model=None, command=(), shown=False,
        ready_timeout_s=ready_timeout_s,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        return await session.run(load)


async def test_the_report_is_what_the_server_did(served: tuple[Inference, str]) -> None:
    servicer, url = served
    report = await run(url, plan(num_requests=110))
    timed = report.found.whole.latencies
    firsts = [writes[0] - servicer.arrived[number] for number, writes in servicer.writes.items()]
    gaps = np.concatenate([np.diff(writes) for writes in servicer.writes.values()])
    within = 3 + report.found.loop_lag.percentiles[99]

    assert (report.found.whole.completed, report.setup.model) == (110, "grpc-model")
    assert timed.ttft.median == pytest.approx(np.median(firsts) * 1e3, abs=within)
    assert timed.itl.n == 110 * (TOKENS - 1)
    assert timed.itl.mean == pytest.approx(np.mean(gaps) * 1e3, abs=within / 4)
    assert timed.tpot.median == pytest.approx(ITL_S * 1e3, abs=within)
    assert (report.found.whole.input_tokens, report.found.whole.output_tokens) == (110 * 11, 110 * TOKENS)
    assert report.found.whole.approximated == 0.25
    assert report.outcome.records[3].request_id == "id-3"
    assert report.outcome.records[3].text == " w0 w1 w2 w3 w4"


async def test_how_requests_fail_is_told_apart(served: tuple[Inference, str]) -> None:
    servicer, url = served
    servicer.fail = dict(enumerate(["saturated", "invalid", "hang", "no end", "shed", "internal", "cancelled"]))
    report = await run(url, plan(num_requests=8, request_timeout_s=1.0))

    assert report.found.whole.failures == {
        "429: saturated": 1,
        "4xx: invalid_argument": 1,
        "timeout: after 1 s": 1,
        "stream cut: in the reply": 1,
        "429: shed": 1,
        "stream error: generation_failed": 1,
        "stream error: cancelled": 1,
    }
    limited = report.outcome.records[0].failure
    assert limited is not None
    assert (limited.status, limited.message, limited.retry_after_s) == ("RESOURCE_EXHAUSTED", "full", 2.0)
    async with asyncio.timeout(DEADLINE_S):
        await servicer.ended.wait()
    assert servicer.cancelled == 1, "a request that is given up is cancelled at the server"


async def test_what_is_sent_is_what_was_asked_for(served: tuple[Inference, str]) -> None:
    servicer, url = served
    told: dict[str, Any] = {"send_task_type": True, "api_key": "k-1", "ignore_eos": True}
    report = await run(url, plan(num_requests=1), send_slo="headers", **told)
    await run(url, plan(num_requests=1), send_slo="fields", api="completions")
    first, second = servicer.requests
    metadata = servicer.metadata[0]

    assert first.task_type == report.outcome.records[0].task
    assert (first.model, first.max_tokens, first.temperature, first.ignore_eos) == ("grpc-model", 8, 0.0, True)
    assert first.HasField("temperature")
    assert first.chat.messages[0].role == "user"
    assert (metadata["authorization"], metadata["x-slo-ttft-ms"], metadata["x-slo-tpot-ms"]) == (
        "Bearer k-1", "1000", "0.5"
    )  # fmt: skip
    assert (second.slo.ttft_ms, second.slo.tpot_ms, second.slo.HasField("e2e_ms")) == (1000, 0.5, False)
    assert second.text


async def test_a_certificate_is_judged_by_the_ones_given(tmp_path: Path) -> None:
    made, key = certificate(tmp_path)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), made.read_bytes())])
    async with serving(credentials) as (_, url):
        assert (await run(url, plan(num_requests=1), ca_file=made)).found.whole.completed == 1
        with pytest.raises(NotReady, match="UNAVAILABLE"):
            await run(url, plan(num_requests=1), ready_timeout_s=0.3)


async def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(NotReady, match=r"grpc://127.0.0.1:9 was not ready within 0.3 s: UNAVAILABLE"):
        await run("grpc://127.0.0.1:9", plan(num_requests=1), ready_timeout_s=0.3)
