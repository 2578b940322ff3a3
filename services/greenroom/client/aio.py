"""The client for asyncio."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from greenroom.client.errors import read_failure
from greenroom.client.messages import Joiner, to_metadata, to_model, to_reply, to_request
from greenroom.client.plan import Plan, Route
from greenroom.client.settings import Settings, Tls, as_addresses
from greenroom.client.types import ModelInfo, Options, Part, Reply
from greenroom.v1 import inference_pb2, inference_pb2_grpc

T = TypeVar("T")


class AsyncClient:
    """As ``Client``, on one event loop: to be made, used and closed there.

    async with AsyncClient("localhost:8001", api_key=key) as client:
        reply = await client.generate("Once upon a time", max_tokens=64)
        async for part in client.stream("Once upon a time"):
            print(part.text, end="")
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "127.0.0.1:8001",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        self._settings = Settings(
            addresses=as_addresses(addresses), api_key=api_key, tls=tls, timeout_s=timeout_s, max_retries=max_retries
        )
        self._route = Route(self._settings.addresses)
        credentials = None if tls is None else tls.credentials()
        options = self._settings.options()
        self._channels = [
            grpc.aio.insecure_channel(address, options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options)
            for address in self._settings.addresses
        ]
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls."""
        for channel in self._channels:
            await channel.close()

    async def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Reply:
        """The whole answer. Cancelling the task ends the request, unless it has an idempotency key. Raises
        ClientError, InvalidRequest.

            (await client.generate("2 + 2 =", max_tokens=4, temperature=0)).text
        """
        request, metadata = to_request(prompt, options), to_metadata(self._settings, options)
        return to_reply(
            await self._call(
                self._plan(options), lambda stub, left_s: stub.Generate(request, timeout=left_s, metadata=metadata)
            )
        )

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it comes. Leave it early by ``close``, or by using it in an ``async with``: that ends the
        request, unless it has an idempotency key. Raises InvalidRequest, and ClientError when it is read.

            async with client.stream(messages=[{"role": "user", "content": "Hello!"}]) as parts:
                async for part in parts:
                    print(part.text, end="")
        """
        request, metadata = to_request(prompt, options), to_metadata(self._settings, options)

        def begin(place: int, left_s: float) -> Any:
            return self._stubs[place].GenerateStream(request, timeout=left_s, metadata=metadata)

        return AsyncStream(self._route, self._plan(options), begin)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """End a request by its id, as a reply or a part has it. Nothing happens where it has ended. Raises ClientError.

        It reaches the gateway that answers first; others know the request only in the pipeline.
        """
        request = inference_pb2.CancelRequest(request_id=request_id)
        metadata = to_metadata(self._settings, {})
        await self._call(
            self._plan({} if timeout_s is None else {"timeout_s": timeout_s}, keyed=True),
            lambda stub, left_s: stub.Cancel(request, timeout=left_s, metadata=metadata),
        )

    async def model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """What is served. Raises ClientError."""
        metadata = to_metadata(self._settings, {})
        return to_model(
            await self._call(
                self._plan({} if timeout_s is None else {"timeout_s": timeout_s}, keyed=True),
                lambda stub, left_s: stub.GetModel(inference_pb2.GetModelRequest(), timeout=left_s, metadata=metadata),
            )
        )

    def _plan(self, options: Options, *, keyed: bool = False) -> Plan:
        timeout_s = options.get("timeout_s", self._settings.timeout_s)
        return Plan(
            self._route.order(),
            time.monotonic() + timeout_s,
            keyed=keyed or "idempotency_key" in options,
            retries=self._settings.max_retries,
        )

    async def _call(self, plan: Plan, call: Callable[[Any, float], Awaitable[T]]) -> T:
        while True:
            try:
                answer = await call(self._stubs[plan.place], plan.deadline - time.monotonic())
            except grpc.RpcError as error:
                failure = read_failure(error)
                wait_s = plan.after(failure, time.monotonic(), chance=random.random())
                if wait_s is None:
                    raise failure.error() from error
                await asyncio.sleep(wait_s)
            else:
                self._route.answered(plan.place)
                return answer


class AsyncStream:
    """The parts of one answer; an async iterator and context manager. ``request_id`` once the first part is there."""

    def __init__(self, route: Route, plan: Plan, begin: Callable[[int, float], Any]) -> None:
        self._route = route
        self._plan = plan
        self._begin = begin
        self._joiner = Joiner()
        self._call: Any = None
        self._done = False
        self.request_id = ""

    def __aiter__(self) -> AsyncIterator[Part]:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __anext__(self) -> Part:
        while not self._done:
            part = await self._next()
            if part is not None:
                self.request_id = part.request_id
                self._done = part.reason is not None
                return part
        raise StopAsyncIteration

    async def _next(self) -> Part | None:
        plan = self._plan
        try:
            if self._call is None:
                self._call = self._begin(plan.place, plan.deadline - time.monotonic())
            event = await self._call.read()
            if event is grpc.aio.EOF:
                self._done = True  # without an end: a server of another version
                return None
            self._route.answered(plan.place)
            return self._joiner.push(event)
        except grpc.RpcError as error:
            failure = read_failure(error)
            wait_s = plan.after(failure, time.monotonic(), began=self._joiner.began, chance=random.random())
            if wait_s is None:
                self._done = True
                raise failure.error() from error
            self._call = None
            self._joiner.again()
            await asyncio.sleep(wait_s)
            return None

    def close(self) -> None:
        """Leaves it. Safe at any time."""
        self._done = True
        if self._call is not None:
            self._call.cancel()
