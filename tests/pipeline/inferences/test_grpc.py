"""inference.GRPCInferenceService by a plain client of the generated stubs: the same inferences as over HTTP."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from greenroom.core import bytes_tensors
from greenroom.v1 import inference_pb2, inference_pb2_grpc, open_inference_pb2_grpc
from greenroom.v1 import open_inference_pb2 as pb
from greenroom.worker.inference_twin import InferenceTwin, twin_card
from tests.pipeline.inferences.conftest import MODEL, Served, body
from tests.pipeline.inferences.images import png
from tests.pipeline.inferences.test_infer import images, said
from tests.waiting import DEADLINE_S, until

SERVICE = "inference.GRPCInferenceService"
Input = pb.ModelInferRequest.InferInputTensor


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(served.grpc_address) as made:
        yield made


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(some: list[bytes], component: str = "U7", *, raw: bool = True, **more: Any) -> pb.ModelInferRequest:
    image = Input(name="image", datatype="BYTES", shape=[len(some)])
    if not raw:
        image.contents.bytes_contents.extend(some)
    return pb.ModelInferRequest(
        model_name=more.pop("model_name", MODEL),
        inputs=[image],
        raw_input_contents=[bytes_tensors.join(some)] if raw else [],
        parameters={"component": pb.InferParameter(string_param=component), **more.pop("parameters", {})},
        **more,
    )


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await call
    error = caught.value
    return error.code(), error.details() or "", dict(error.trailing_metadata() or ())


@pytest.mark.parametrize("raw", [True, False])
async def test_a_batch_is_judged(stub: Any, raw: bool) -> None:
    some = images(3)
    wanted = [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in ("label", "score")]
    reply = await stub.ModelInfer(request(some, raw=raw, id="mine", outputs=wanted))
    assert (reply.model_name, reply.model_version, reply.id) == (MODEL, "1", "mine")
    assert [(one.name, one.datatype, list(one.shape)) for one in reply.outputs] == [
        ("label", "BYTES", [3]),
        ("score", "FP32", [3]),
    ]
    labels, scores = reply.raw_output_contents
    assert bytes_tensors.split(labels) == [str(said(image).label).encode() for image in some]
    assert struct.unpack("<3f", scores) == pytest.approx([said(image).score for image in some])


async def test_what_it_says_of_itself(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL))).ready
    server = await stub.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, list(server.extensions)) == ("greenroom", ["binary_tensor_data"])
    model = await stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL, version="1"))
    assert (model.name, list(model.versions)) == (MODEL, ["1"])
    assert [one.name for one in model.inputs] == ["image", "component"]
    assert "label" in [one.name for one in model.outputs]


async def test_reflection_and_health_include_it(channel: grpc.aio.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status == serving
    stubs: Any = reflection_pb2_grpc
    reflection = stubs.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in reflection.ServerReflectionInfo(iter([ask])):
        assert SERVICE in [one.name for one in answer.list_services_response.service]
        break


BAD = {
    "unknown model": (request(images(1), model_name="other"), grpc.StatusCode.NOT_FOUND, "model_not_found"),
    "unknown version": (request(images(1), model_version="7"), grpc.StatusCode.NOT_FOUND, "model_not_found"),
    "unknown component": (request(images(1), "R0412"), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
    "no image": (request([b"text"]), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
    "broken tensor": (
        pb.ModelInferRequest(
            model_name=MODEL,
            inputs=[Input(name="image", datatype="BYTES", shape=[1])],
            raw_input_contents=[b"\x09\x00\x00\x00short"],
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "invalid_value",
    ),
    "raw parts missing": (
        pb.ModelInferRequest(
            model_name=MODEL,
            inputs=[Input(name="image", datatype="BYTES", shape=[1]), Input(name="component", datatype="BYTES")],
            raw_input_contents=[b""],
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "invalid_value",
    ),
    "unknown content_type": (
        pb.ModelInferRequest(
            model_name=MODEL,
            inputs=[
                Input(
                    name="image",
                    datatype="BYTES",
                    shape=[1],
                    parameters={"content_type": pb.InferParameter(string_param="np")},
                )
            ],
            raw_input_contents=[bytes_tensors.join(images(1))],
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "invalid_value",
    ),
    "unknown parameter": (
        request(images(1), parameters={"sequence_id": pb.InferParameter(int64_param=3)}),
        grpc.StatusCode.INVALID_ARGUMENT,
        "unknown_field",
    ),
    "a parameter without a value": (
        request(images(1), parameters={"timeout": pb.InferParameter()}),
        grpc.StatusCode.INVALID_ARGUMENT,
        "invalid_value",
    ),
}


Output = pb.ModelInferRequest.InferRequestedOutputTensor
NO, YES = pb.InferParameter(bool_param=False), pb.InferParameter(bool_param=True)


def with_contents(field: str, value: Any, *, elements: int = 1) -> pb.ModelInferRequest:
    asked = request(images(elements), raw=False)
    getattr(asked.inputs[0].contents, field).append(value)
    return asked


WITHOUT_EFFECT: dict[str, tuple[pb.ModelInferRequest, str, str]] = {
    "an output that is not binary": (
        request(images(1), outputs=[Output(name="score"), Output(name="label", parameters={"binary_data": NO})]),
        "unsupported_field",
        "binary_data can not be false over gRPC",
    ),
    "no output binary": (
        request(images(1), parameters={"binary_data_output": NO}),
        "unsupported_field",
        "binary_data_output can not be false over gRPC",
    ),
    "a form that is none": (
        request(images(1), parameters={"binary_data_output": pb.InferParameter(string_param="yes")}),
        "invalid_type",
        "binary_data_output is true or false",
    ),
    **{
        f"{field} beside bytes_contents": (
            with_contents(field, value),
            "unsupported_field",
            f"the input 'image' has contents.{field}",
        )
        for field, value in {
            "bool_contents": False,
            "int_contents": 0,
            "int64_contents": 1,
            "uint_contents": 7,
            "uint64_contents": 7,
            "fp32_contents": 0.5,
            "fp64_contents": 0.5,
        }.items()
    },
    "no bytes_contents": (
        with_contents("uint_contents", 7, elements=0),
        "unsupported_field",
        "elements of BYTES are in contents.bytes_contents",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
async def test_what_would_be_without_effect_is_refused_by_name(stub: Any, name: str) -> None:
    asked, word, reason = WITHOUT_EFFECT[name]
    status, details, trailing = await refusal(stub.ModelInfer(asked))
    assert (status, trailing["greenroom-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, word)
    assert reason in details


async def test_binary_outputs_may_be_asked_for_though_there_are_no_others(stub: Any) -> None:
    wanted = [Output(name="label", parameters={"binary_data": YES})]
    reply = await stub.ModelInfer(request(images(1), outputs=wanted, parameters={"binary_data_output": YES}))
    assert [one.name for one in reply.outputs] == ["label"]
    assert bytes_tensors.split(reply.raw_output_contents[0]) == [str(said(images(1)[0]).label).encode()]


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused(stub: Any, name: str) -> None:
    asked, code, word = BAD[name]
    status, details, trailing = await refusal(stub.ModelInfer(asked))
    assert (status, trailing["greenroom-code"]) == (code, word), details


async def test_text_to_it_names_the_path(channel: grpc.aio.Channel) -> None:
    text = inference_pb2_grpc.InferenceStub(channel)
    status, details, trailing = await refusal(text.Generate(inference_pb2.GenerateRequest(text="hello")))
    assert (status, trailing["greenroom-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "takes_inferences")
    assert f"/v2/models/{MODEL}/infer" in details


class TestHeld:
    @pytest.fixture
    def twin(self) -> InferenceTwin:
        return InferenceTwin(twin_card(MODEL), held=True)

    async def test_a_cancelled_call_cancels_its_requests(self, stub: Any, twin: InferenceTwin) -> None:
        call = stub.ModelInfer(request([png(tail=b"1"), png(tail=b"2")]))
        await until(lambda: twin.state().waiting == 2)
        call.cancel()
        await until(lambda: len(twin.cancelled) == 2)

    async def test_the_calls_deadline_is_the_requests(self, stub: Any, twin: InferenceTwin) -> None:
        status, _, _ = await refusal(stub.ModelInfer(request([png()]), timeout=0.3))
        assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(twin.cancelled) == 1)

    async def test_an_idempotency_key_is_one_request_over_both(
        self, served: Served, stub: Any, twin: InferenceTwin
    ) -> None:
        first = asyncio.create_task(served.post(body([png()]), headers={"Idempotency-Key": "k"}))
        await until(lambda: twin.state().waiting == 1)
        second = stub.ModelInfer(request([png()]), metadata=(("idempotency-key", "k"),))
        twin.release()
        assert (await first)[0] == 200
        assert (await second).model_name == MODEL
        assert sum(map(len, twin.batches)) == 1
