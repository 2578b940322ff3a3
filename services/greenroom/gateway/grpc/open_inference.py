"""inference.GRPCInferenceService: the Open Inference Protocol, version 2, as Triton's and KServe's clients speak it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from greenroom.core import bytes_tensors
from greenroom.core.errors import InvalidRequest
from greenroom.fabric.rpc import Context
from greenroom.gateway.doors.doorkeeper import Doorkeeper
from greenroom.gateway.errors import too_large
from greenroom.gateway.grpc.calls import CallDoor, headers_of, patience_s
from greenroom.gateway.metrics import GatewayMetrics
from greenroom.gateway.replies.output_tensors import TensorKind, output_tensors
from greenroom.gateway.replies.reply_headers import REPLY_ID_HEADER
from greenroom.gateway.requests.call_headers import call_headers
from greenroom.gateway.requests.inferences.infer_call import (
    BINARY_OUTPUT,
    CONTENT_TYPE,
    MAX_ID,
    MAX_TENSORS,
    InferCall,
    InputTensor,
    ParameterValue,
    binary_output,
    check_came,
    checked_output,
    count_of,
    decoded,
)
from greenroom.gateway.requests.inferences.prepare_inferences import PreparedInferences, prepare_inferences
from greenroom.gateway.requests.inferences.server_info import (
    EXTENSIONS,
    PLATFORM,
    SERVER,
    VERSION,
    check_version,
    inputs_of,
    outputs_of,
    server_version,
)
from greenroom.gateway.requests.request_handler import RequestHandler
from greenroom.v1 import open_inference_pb2 as pb
from greenroom.v1 import open_inference_pb2_grpc

_SERVICE = "inference.GRPCInferenceService"
_QUIET = frozenset({"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata"})
_CONTENTS = "bytes_contents"
_Input = pb.ModelInferRequest.InferInputTensor


class OpenInferenceApi(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Checks and inferences are those of /v2 over HTTP. Whether the server lives and is ready needs no key."""

    def __init__(self, requests: RequestHandler, doorkeeper: Doorkeeper, metrics: GatewayMetrics) -> None:
        self._requests = requests
        self._door = CallDoor(_SERVICE, doorkeeper, metrics, quiet=_QUIET)

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        with self._door.noted("ServerLive"):
            return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        with self._door.noted("ServerReady"):
            return pb.ServerReadyResponse(ready=self._requests.unready is None)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        with self._door.noted("ModelReady") as note:
            self._door.admit(context, note)
            self._requests.collaboration_named(request.name)
            check_version(request.version)
            return pb.ModelReadyResponse(ready=self._requests.unready is None)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        with self._door.noted("ServerMetadata") as note:
            self._door.admit(context, note)
            return pb.ServerMetadataResponse(name=SERVER, version=server_version(), extensions=EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        with self._door.noted("ModelMetadata") as note:
            self._door.admit(context, note)
            model, card = self._requests.collaboration_named(request.name)
            check_version(request.version)
            return pb.ModelMetadataResponse(
                name=model.name,
                versions=[VERSION],
                platform=PLATFORM,
                inputs=_metadata(inputs_of(card)),
                outputs=_metadata(outputs_of(model)),
            )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        arrived = time.monotonic()
        with self._door.noted("ModelInfer") as note:
            caller = self._door.admit(context, note)
            call = call_headers(headers_of(context), caller, patience_s=patience_s(context))
            note.request_id = call.base
            await context.send_initial_metadata(((REPLY_ID_HEADER.lower(), call.base),))
            size, config = request.ByteSize(), self._requests.config
            with self._requests.enter(call), self._requests.hold_bytes() as held:
                held.add(size)
                if size > config.max_infer_body_bytes:
                    raise too_large(config.max_infer_body_bytes)
                model, card = self._requests.collaboration_named(request.model_name)
                check_version(request.model_version)

                def prepare() -> PreparedInferences:
                    asked = infer_call_of(request, config.max_choices)
                    return prepare_inferences(asked, model, card, call=call, config=config)

                prepared = await self._requests.prepare(size, prepare)
                found = await self._requests.infer(prepared, call, arrived, held)
            tensors = output_tensors(prepared.outputs, found)
            return pb.ModelInferResponse(
                model_name=model.name,
                model_version=VERSION,
                id=request.id,
                outputs=[
                    pb.ModelInferResponse.InferOutputTensor(
                        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
                    )
                    for tensor in tensors
                ],
                raw_output_contents=[tensor.raw() for tensor in tensors],
            )


def infer_call_of(request: pb.ModelInferRequest, most: int) -> InferCall:
    """``most``: elements of a batch. Raises InvalidRequest, naming the input or parameter."""
    if len(request.id) > MAX_ID:
        raise InvalidRequest(f"id has at most {MAX_ID} characters", param="id")
    for field, some in (("inputs", len(request.inputs)), ("outputs", len(request.outputs))):
        if some > MAX_TENSORS:
            raise InvalidRequest(f"{field} has {some} tensors; at most {MAX_TENSORS} are allowed", param=field)
    parts = len(request.raw_input_contents)
    if parts not in (0, len(request.inputs)):
        raise InvalidRequest(
            f"raw_input_contents has {parts} parts for {len(request.inputs)} inputs; send one for each",
            param="raw_input_contents",
        )
    raws: list[bytes | None] = list(request.raw_input_contents) or [None] * len(request.inputs)
    inputs = [_input(tensor, raw, most) for tensor, raw in zip(request.inputs, raws, strict=True)]
    outputs = [checked_output(one.name, _parameters(one.parameters)) for one in request.outputs]
    for output in outputs:
        _check_form(output.binary, f"outputs.{output.name}.parameters.binary_data")
    parameters = _parameters(request.parameters)
    _check_form(binary_output(parameters), f"parameters.{BINARY_OUTPUT}")
    parameters.pop(BINARY_OUTPUT, None)
    return InferCall(tuple(inputs), tuple(outputs), parameters, request.id, binary=True)


def _check_form(binary: bool | None, where: str) -> None:
    """``binary``: the form of outputs that is asked for at ``where``. Raises InvalidRequest where it is not the only
    one that there is here."""
    if binary is False:
        raise InvalidRequest(
            f"{where.rpartition('.')[2]} can not be false over gRPC: all outputs are in raw_output_contents",
            param=where,
            code="unsupported_field",
        )


def _input(tensor: _Input, raw: bytes | None, most: int) -> InputTensor:
    where = f"inputs.{tensor.name}"
    unknown = tensor.parameters.keys() - {CONTENT_TYPE}
    if unknown:
        name = min(unknown)
        message = f"{name!r} is not known as a parameter of an input"
        raise InvalidRequest(message, param=f"{where}.parameters.{name}", code="unknown_field")
    parameters = _parameters(tensor.parameters)
    if raw is not None and tensor.HasField("contents"):
        raise InvalidRequest(f"the input {tensor.name!r} has contents and raw contents; send one of them", param=where)
    count, shape = count_of(tensor.name, tensor.datatype, tensor.shape, most), tuple(tensor.shape)
    others = [field.name for field, _ in tensor.contents.ListFields() if field.name != _CONTENTS]
    if others:
        raise InvalidRequest(
            f"the input {tensor.name!r} has contents.{others[0]}; the elements of BYTES are in contents.{_CONTENTS}",
            param=f"{where}.contents.{others[0]}",
            code="unsupported_field",
        )
    elements: Sequence[bytes] = tensor.contents.bytes_contents
    if raw is not None:
        try:
            elements = bytes_tensors.split(raw, count)
        except ValueError as error:
            raise InvalidRequest(f"the input {tensor.name!r} can not be read: {error}", param=where) from error
    check_came(tensor.name, shape, count, len(elements))
    return InputTensor(tensor.name, shape, tuple(decoded(elements, parameters, where)))


def _parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, ParameterValue]:
    values: dict[str, Any] = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"the parameter {name!r:.80} has no value", param=f"parameters.{name:.64}")
        values[name] = getattr(parameter, kind)
    return values


def _metadata(kinds: Iterable[TensorKind]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=kind.name, datatype=kind.datatype, shape=kind.shape)
        for kind in kinds
    ]
