"""What a server has beside its servicers: health, reflection, TLS, limits, its address."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from greenroom.core.errors import InvalidConfig
from greenroom.fabric.rpc import (
    Context,
    DialerConfig,
    DialerTls,
    GrpcDialer,
    LocalDialer,
    Server,
    ServerConfig,
    ServerTls,
    join_address,
    word_of,
)
from greenroom.fabric.rpc.errors import Status
from greenroom.v1 import predictor_pb2_grpc
from tests.contract.rpc.certificates import NAME, make_signer
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer, EchoStub
from tests.contract.rpc.wires import DEADLINE_S
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Forecaster(predictor_pb2_grpc.PredictorServicer):
    """A generated servicer beside the one of these tests. Its methods are not called."""


def _forecaster() -> Any:
    without_methods: Any = Forecaster  # whose stubs call them abstract
    return without_methods()


async def _asks(stub: Any, service: str = "") -> int:
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
    return int(response.status)


async def test_health_follows_what_the_service_says() -> None:
    server = Server(ServerConfig(), [EchoServicer(), _forecaster()])
    port = await server.start()
    async with GrpcDialer() as dialer:
        stub = dialer.stub(health_pb2_grpc.HealthStub, f"127.0.0.1:{port}")
        for service in ("", "tests.Echo", "greenroom.v1.Predictor"):
            assert await _asks(stub, service) == NOT_SERVING
        server.serving(True)
        for service in ("", "tests.Echo", "greenroom.v1.Predictor"):
            assert await _asks(stub, service) == SERVING
        server.serving(False, "tests.Echo")
        assert await _asks(stub, "tests.Echo") == NOT_SERVING
        assert await _asks(stub) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _asks(stub, "nobody")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    await server.stop(1.0)


async def test_a_watch_of_health_sees_every_change_and_the_end() -> None:
    server = Server(ServerConfig(), [EchoServicer()])
    port = await server.start()
    seen: list[list[int]] = [[], []]
    came = asyncio.Event()

    async with GrpcDialer() as dialer:
        stub: Any = dialer.stub(health_pb2_grpc.HealthStub, f"127.0.0.1:{port}")

        async def watch(into: list[int]) -> None:
            async for response in stub.Watch(health_pb2.HealthCheckRequest(), timeout=3 * DEADLINE_S):
                into.append(int(response.status))
                came.set()

        async def both_have(count: int) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while any(len(statuses) < count for statuses in seen):
                    came.clear()
                    await came.wait()

        watchers = [asyncio.create_task(watch(statuses)) for statuses in seen]
        await both_have(1)
        server.serving(True)
        await both_have(2)
        await server.stop(1.0)
        await asyncio.wait_for(asyncio.gather(*watchers, return_exceptions=True), DEADLINE_S)
    assert seen == [[NOT_SERVING, SERVING, NOT_SERVING]] * 2


async def test_a_caller_that_hears_that_it_stops_is_told_to_call_another() -> None:
    """Not CANCELLED, as what reaches gRPC's core while it shuts down: of that nobody could say whether it was taken."""
    server = Server(ServerConfig(), [EchoServicer()])
    port = await server.start()
    server.serving(True)
    async with GrpcDialer() as dialer:
        address = f"127.0.0.1:{port}"
        health: Any = dialer.stub(health_pb2_grpc.HealthStub, address)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await anext(aiter(watch))).status == SERVING
        stopping = asyncio.create_task(server.stop(1.0))
        assert (await anext(aiter(watch))).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await dialer.stub(EchoStub, address).Unary(Echo(), timeout=DEADLINE_S)
        assert (raised.value.code(), word_of(raised.value)) == (grpc.StatusCode.UNAVAILABLE, "stopping")
        await stopping


async def test_health_is_answered_however_full_the_server_is() -> None:
    class Full(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            await asyncio.Event().wait()
            return request

    server = Server(ServerConfig(max_calls=1), [Full()])
    port = await server.start()
    server.serving(True)
    async with GrpcDialer() as dialer:
        call = dialer.stub(EchoStub, f"127.0.0.1:{port}").Unary(Echo(), timeout=DEADLINE_S)
        health = dialer.stub(health_pb2_grpc.HealthStub, f"127.0.0.1:{port}")
        await until(lambda: server.calls == 1, "the handler runs")
        assert await _asks(health) == SERVING
        call.cancel()
    await server.stop(1.0)


async def test_reflection_lists_the_services() -> None:
    server = Server(ServerConfig(), [_forecaster()])
    port = await server.start()
    async with GrpcDialer() as dialer:
        untyped: Any = reflection_pb2_grpc.ServerReflectionStub
        stub = dialer.stub(untyped, f"127.0.0.1:{port}")
        ask: Any = reflection_pb2.ServerReflectionRequest
        asked = iter([ask(list_services=""), ask(file_containing_symbol="greenroom.v1.Predictor")])
        answers = [answer async for answer in stub.ServerReflectionInfo(asked, timeout=DEADLINE_S)]
        listed = {service.name for service in answers[0].list_services_response.service}
        assert {"greenroom.v1.Predictor", "grpc.health.v1.Health"} <= listed
        assert answers[1].file_descriptor_response.file_descriptor_proto
    await server.stop(1.0)


async def test_a_port_that_is_taken() -> None:
    first = Server(ServerConfig(), [EchoServicer()])
    port = await first.start()
    with pytest.raises(InvalidConfig, match="can not be listened on"):
        await Server(ServerConfig(port=port), [EchoServicer()]).start()
    await first.stop(0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 70_000), ("port", -1), ("max_calls", 0), ("max_message_bytes", 0), ("keep_alive_s", 0.0)],
)
def test_what_a_server_can_not_be(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=field):
        ServerConfig(**{field: value})


def test_addresses() -> None:
    assert join_address("127.0.0.1", 80) == "127.0.0.1:80"
    assert join_address("::1", 80) == "[::1]:80"
    assert join_address("[::1]", 80) == "[::1]:80"


async def test_an_object_that_is_no_servicer() -> None:
    with pytest.raises(TypeError, match="no servicer"):
        await Server(ServerConfig(), [object()]).start()
    with pytest.raises(TypeError, match="no servicer"):
        LocalDialer().serve("here", [object()])


async def test_an_address_is_served_once() -> None:
    dialer = LocalDialer()
    dialer.serve("here", [EchoServicer()])
    with pytest.raises(ValueError, match="served already"):
        dialer.serve("here", [EchoServicer()])


async def test_messages_have_a_largest_size() -> None:
    server = Server(ServerConfig(max_message_bytes=1000), [EchoServicer()])
    port = await server.start()
    async with GrpcDialer() as dialer:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await dialer.stub(EchoStub, f"127.0.0.1:{port}").Unary(Echo(value=bytes(2000)), timeout=DEADLINE_S)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(1.0)


async def test_errors_may_have_a_shape_of_their_own() -> None:
    class Fails(EchoServicer):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            raise KeyError("a")

    def shape(error: Exception) -> Status | None:
        return Status(grpc.StatusCode.NOT_FOUND, "not here", "gone") if isinstance(error, KeyError) else None

    server = Server(ServerConfig(), [Fails()], shape=shape)
    port = await server.start()
    async with GrpcDialer() as dialer:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await dialer.stub(EchoStub, f"127.0.0.1:{port}").Unary(Echo(), timeout=DEADLINE_S)
    assert raised.value.details() == "not here"
    await server.stop(1.0)


_ELSEWHERE = """
import asyncio
from greenroom.fabric.rpc import Server, ServerConfig
from tests.contract.rpc.echo_pb2_grpc import EchoServicer

async def serve():
    server = Server(ServerConfig(), [EchoServicer()])
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.fixture
def elsewhere() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, "-c", _ELSEWHERE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


async def test_callers_give_up_a_frozen_server(
    elsewhere: tuple[subprocess.Popen[str], int],
) -> None:
    """Its machine still answers for it; only the ping on the connection tells."""
    process, port = elsewhere
    async with GrpcDialer(DialerConfig(keep_alive_s=0.5, keep_alive_timeout_s=0.5)) as dialer:
        call = dialer.stub(EchoStub, f"127.0.0.1:{port}").Both()
        await call.write(Echo(value=b"a"))
        await call.read()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(call.read(), 3 * DEADLINE_S)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


# -- TLS ---------------------------------------------------------------------------------------------------------


async def _call(tls: DialerTls | None, port: int) -> bytes:
    async with GrpcDialer(DialerConfig(tls=tls)) as dialer:
        stub = dialer.stub(EchoStub, f"127.0.0.1:{port}")
        return (await stub.Unary(Echo(value=b"a"), timeout=DEADLINE_S)).value


async def test_tls(tmp_path: Path) -> None:
    signer = make_signer(tmp_path)
    certificate, key = signer.sign("server")
    server = Server(ServerConfig(tls=ServerTls(certificate=certificate, key=key)), [EchoServicer()])
    port = await server.start()
    assert await _call(DialerTls(ca=signer.ca, server_name=NAME), port) == b"a"
    other = make_signer(tmp_path, "other")
    for wrong in (DialerTls(ca=other.ca, server_name=NAME), DialerTls(ca=signer.ca, server_name="else.test"), None):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _call(wrong, port)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(1.0)


async def test_tls_on_both_sides(tmp_path: Path) -> None:
    signer, other = make_signer(tmp_path), make_signer(tmp_path, "other")
    certificate, key = signer.sign("server")
    tls = ServerTls(certificate=certificate, key=key, client_ca=signer.ca)
    server = Server(ServerConfig(tls=tls), [EchoServicer()])
    port = await server.start()
    mine, my_key = signer.sign("caller")
    theirs, their_key = other.sign("stranger")
    known = DialerTls(ca=signer.ca, server_name=NAME, certificate=mine, key=my_key)
    assert await _call(known, port) == b"a"
    for wrong in (
        DialerTls(ca=signer.ca, server_name=NAME),
        DialerTls(ca=signer.ca, server_name=NAME, certificate=theirs, key=their_key),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _call(wrong, port)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(1.0)


async def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    tls = ServerTls(certificate=tmp_path / "none.crt", key=tmp_path / "none.key")
    with pytest.raises(InvalidConfig, match=r"tls_(key|certificate).*none"):
        await Server(ServerConfig(tls=tls), [EchoServicer()]).start()
    with pytest.raises(InvalidConfig, match="tls_ca"):
        GrpcDialer(DialerConfig(tls=DialerTls(ca=tmp_path / "none.pem")))
    with pytest.raises(InvalidConfig, match="come together"):
        DialerTls(key=tmp_path / "none.key")
