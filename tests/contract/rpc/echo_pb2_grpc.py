"""A service with one method of each kind, in the shape of generated stubs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import BytesValue

from greenroom.fabric.rpc import Context

Echo = BytesValue
_SERVICE = "tests.Echo"
_CODEC: dict[str, Any] = {
    "request_serializer": BytesValue.SerializeToString,
    "response_deserializer": BytesValue.FromString,
    "_registered_method": True,
}


class EchoStub:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.Unary: grpc.aio.UnaryUnaryMultiCallable[BytesValue, BytesValue] = channel.unary_unary(
            f"/{_SERVICE}/Unary", **_CODEC
        )
        self.Down: grpc.aio.UnaryStreamMultiCallable[BytesValue, BytesValue] = channel.unary_stream(
            f"/{_SERVICE}/Down", **_CODEC
        )
        self.Up: grpc.aio.StreamUnaryMultiCallable[BytesValue, BytesValue] = channel.stream_unary(
            f"/{_SERVICE}/Up", **_CODEC
        )
        self.Both: grpc.aio.StreamStreamMultiCallable[BytesValue, BytesValue] = channel.stream_stream(
            f"/{_SERVICE}/Both", **_CODEC
        )
        self.Missing: grpc.aio.UnaryUnaryMultiCallable[BytesValue, BytesValue] = channel.unary_unary(
            f"/{_SERVICE}/Missing", **(_CODEC | {"_registered_method": False})
        )


class EchoServicer:
    """Gives back what it gets; tests override what they look at."""

    async def Unary(self, request: BytesValue, context: Context) -> BytesValue:
        return request

    async def Down(self, request: BytesValue, context: Context) -> AsyncIterator[BytesValue]:
        for byte in request.value:
            yield BytesValue(value=bytes([byte]))

    async def Up(self, request_iterator: AsyncIterator[BytesValue], context: Context) -> BytesValue:
        return BytesValue(value=b"".join([request.value async for request in request_iterator]))

    async def Both(self, request_iterator: AsyncIterator[BytesValue], context: Context) -> AsyncIterator[BytesValue]:
        async for request in request_iterator:
            yield request


def add_EchoServicer_to_server(servicer: EchoServicer, server: Any) -> None:
    made: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler,
        "Down": grpc.unary_stream_rpc_method_handler,
        "Up": grpc.stream_unary_rpc_method_handler,
        "Both": grpc.stream_stream_rpc_method_handler,
    }
    handlers = {
        name: make(
            getattr(servicer, name),
            request_deserializer=BytesValue.FromString,
            response_serializer=BytesValue.SerializeToString,
        )
        for name, make in made.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    server.add_registered_method_handlers(_SERVICE, handlers)
