"""An inference is one trace, whichever transport it came by."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from greenroom.embedded import EmbeddedConfig
from greenroom.gateway import GatewayConfig
from greenroom.gateway.service import GatewayService
from greenroom.v1 import open_inference_pb2_grpc
from greenroom.worker.inference_twin import InferenceTwin, twin_card
from tests.otlp_collector import Collector, collecting_over_grpc, text_attributes, traced
from tests.pipeline.embedded import embedded
from tests.pipeline.inferences.conftest import MODEL
from tests.pipeline.inferences.images import png
from tests.pipeline.inferences.test_grpc import request
from tests.pipeline.test_one_trace import CLIENT_SPAN, CLIENT_TRACE, RUN, TRACEPARENT, of_trace
from tests.waiting import DEADLINE_S


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting_over_grpc() as made:
        yield made


async def over_http(gateway: GatewayService) -> None:
    import aiohttp

    from tests.pipeline.inferences.conftest import body

    url = f"http://127.0.0.1:{gateway.port}/v2/models/{MODEL}/infer"
    async with aiohttp.ClientSession() as http, http.post(url, json=body([png()]), headers=dict(TRACEPARENT)) as reply:
        assert reply.status == 200


async def over_grpc(gateway: GatewayService) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway._gateway.grpc_port}") as channel:
        stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.ModelInfer(request([png()]), timeout=DEADLINE_S, metadata=TRACEPARENT)


@pytest.mark.parametrize(
    ("ask", "front"),
    [(over_http, "POST /v2/models/{name}/infer"), (over_grpc, "/inference.GRPCInferenceService/ModelInfer")],
    ids=["http", "grpc"],
)
async def test_every_hop_is_below_the_clients_span(ask, front: str, collector: Collector) -> None:  # type: ignore[no-untyped-def]
    twin = InferenceTwin(twin_card(MODEL))
    config = GatewayConfig(port=0, grpc_port=0, drain_timeout_s=0)
    async with traced(collector), embedded(EmbeddedConfig(), twin, twin.card, None, front=config) as (gateway, _):
        await ask(gateway)
    spans = of_trace(collector, CLIENT_TRACE)
    assert set(spans) == {front, "tasktype", "place", RUN, "outcome"}
    assert spans[front].parent_span_id.hex() == CLIENT_SPAN
    assert text_attributes(spans["outcome"])["reason"] == "stop"
