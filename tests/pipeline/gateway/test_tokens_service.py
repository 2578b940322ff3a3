"""The gateway's end of the workers' calls, over gRPC and its twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.generation import Token
from greenroom.fabric.wire import to_attempt, to_token_run
from greenroom.gateway.pipeline.in_flight import InFlightRequests
from greenroom.gateway.pipeline.stream_book import StreamBook
from greenroom.gateway.pipeline.tokens_service import INSTANCE_KEY, TokensService
from greenroom.v1 import tokens_pb2, tokens_pb2_grpc
from tests.pipeline.worker.scripted import NETS
from tests.waiting import DEADLINE_S


@pytest.mark.parametrize("kind", sorted(NETS))
async def test_asked_it_says_when_it_has_taken_a_message_in(kind: str) -> None:
    in_flight = InFlightRequests(StreamBook(), keep_bytes=1000)
    running = in_flight.begin("a", b"", keyed=False)
    net = NETS[kind]()
    sending: asyncio.Queue[tokens_pb2.FromWorker | None] = asyncio.Queue()

    async def messages() -> AsyncIterator[tokens_pb2.FromWorker]:
        while (message := await sending.get()) is not None:
            yield message

    try:
        address = await net.serve("gateway", TokensService("gateway-1", in_flight))
        stub: tokens_pb2_grpc.TokensStub = net.dialer.stub(tokens_pb2_grpc.TokensStub, address)
        call = stub.Deliver(messages(), metadata=((INSTANCE_KEY, "gateway-1"),))
        replies = aiter(call)

        async def told() -> tokens_pb2.FromGateway:
            return await asyncio.wait_for(anext(replies), DEADLINE_S)

        opening = tokens_pb2.OpenStream(stream=1, request_id="a", attempt=to_attempt(Attempt(0, 0)))
        sending.put_nowait(tokens_pb2.FromWorker(open=[opening]))
        first = await told()
        assert not first.taken
        assert [reply.WhichOneof("reply") for reply in first.replies] == ["delivered"]
        for place in range(5):
            step = tokens_pb2.StreamTokens(stream=1, tokens=to_token_run([Token(place, 7)]))
            sending.put_nowait(tokens_pb2.FromWorker(tokens=[step], ask=place == 4))
        answer = await told()
        assert answer.taken
        assert not answer.replies
        assert [token.index for token in running.tokens] == list(range(5))
        sending.put_nowait(None)
        with pytest.raises(StopAsyncIteration):
            await told()
    finally:
        await net.close()
