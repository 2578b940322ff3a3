"""Calls that are made again: when, how often, and not past their deadline."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from greenroom.fabric.rpc import Budget, Context, Refused, RetryConfig, call
from tests.contract.rpc.echo_pb2_grpc import Echo, EchoServicer
from tests.contract.rpc.wires import DEADLINE_S, Wire

QUICK = RetryConfig(first_pause_s=0.001, longest_pause_s=0.002)


class Flaky(EchoServicer):
    """Fails ``times`` with ``code``, then goes well."""

    def __init__(self, times: int, code: grpc.StatusCode, retry_after_s: float | None = None) -> None:
        self.left = times
        self.calls = 0
        self._code = code
        self._retry_after_s = retry_after_s

    async def Unary(self, request: Echo, context: Context) -> Echo:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise Refused(self._code, "not now", word="not_now", retry_after_s=self._retry_after_s)
        return request


async def test_unavailable_is_tried_again(wire: Wire) -> None:
    await wire.serve(servicer := Flaky(2, grpc.StatusCode.UNAVAILABLE))
    response = await call(wire.stub().Unary, Echo(value=b"a"), timeout_s=DEADLINE_S, retries=Budget(QUICK))
    assert response.value == b"a"
    assert servicer.calls == 3


async def test_without_a_budget_nothing_is_tried_again(wire: Wire) -> None:
    await wire.serve(servicer := Flaky(1, grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(grpc.aio.AioRpcError):
        await call(wire.stub().Unary, Echo(), timeout_s=DEADLINE_S)
    assert servicer.calls == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_other_ends_are_final_unless_they_are_named(wire: Wire, code: grpc.StatusCode) -> None:
    await wire.serve(servicer := Flaky(1, code))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(wire.stub().Unary, Echo(), timeout_s=DEADLINE_S, retries=Budget(QUICK))
    assert raised.value.code() is code
    assert servicer.calls == 1
    servicer.left = 1
    await call(wire.stub().Unary, Echo(), timeout_s=DEADLINE_S, retries=Budget(QUICK), on={code})
    assert servicer.calls == 3


async def test_a_call_has_so_many_attempts(wire: Wire) -> None:
    await wire.serve(servicer := Flaky(100, grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(grpc.aio.AioRpcError):
        await call(wire.stub().Unary, Echo(), timeout_s=DEADLINE_S, retries=Budget(QUICK))
    assert servicer.calls == QUICK.attempts


async def test_an_empty_budget_ends_retries_for_all(wire: Wire) -> None:
    await wire.serve(servicer := Flaky(1000, grpc.StatusCode.UNAVAILABLE))
    budget = Budget(RetryConfig(tokens=5, earned_by_call=0.1, first_pause_s=0.001, longest_pause_s=0.002))
    stub = wire.stub()
    for _ in range(20):
        with pytest.raises(grpc.aio.AioRpcError):
            await call(stub.Unary, Echo(), timeout_s=DEADLINE_S, retries=budget)
    assert 20 + 5 <= servicer.calls <= 20 + 5 + 2


async def test_never_past_the_deadline(wire: Wire) -> None:
    await wire.serve(servicer := Flaky(1000, grpc.StatusCode.UNAVAILABLE))
    patient = Budget(RetryConfig(tokens=1000, attempts=1000, first_pause_s=0.05, longest_pause_s=0.05))
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(wire.stub().Unary, Echo(), timeout_s=0.3, retries=patient)
    assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert time.monotonic() - began < 2.0
    assert servicer.calls > 1


async def test_all_attempts_share_one_deadline(wire: Wire) -> None:
    class Slow(Flaky):
        async def Unary(self, request: Echo, context: Context) -> Echo:
            response = await super().Unary(request, context)
            await asyncio.Event().wait()
            return response

    await wire.serve(Slow(1, grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(wire.stub().Unary, Echo(), timeout_s=0.3, retries=Budget(QUICK))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_pause_that_the_server_asked_for_is_kept_or_the_call_given_up(wire: Wire) -> None:
    await wire.serve(servicer := Flaky(1, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=30))
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError):
        await call(
            wire.stub().Unary,
            Echo(),
            timeout_s=DEADLINE_S,
            retries=Budget(QUICK),
            on={grpc.StatusCode.RESOURCE_EXHAUSTED},
        )
    assert time.monotonic() - began < DEADLINE_S / 2
    assert servicer.calls == 1
