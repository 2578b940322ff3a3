"""Calls as services make them: with a deadline, with the request's id and trace, and retried only within a budget."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

import grpc

from greenroom.core.errors import InvalidConfig
from greenroom.fabric.rpc.errors import retry_after_of
from greenroom.fabric.rpc.metadata import Pairs, outgoing

Q = TypeVar("Q")
R = TypeVar("R")
UNREACHED = frozenset({grpc.StatusCode.UNAVAILABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """``tokens``: retries that may be made at once. ``earned_by_call``: how many tokens each call adds: of many calls
    at most this share is retried. ``attempts``: of one call, the first included. ``first_pause_s``,
    ``longest_pause_s``: bounds of the pauses. A pause doubles each time, and is drawn evenly from half of it to all of
    it. Raises InvalidConfig, naming the field."""

    tokens: float = 10.0
    earned_by_call: float = 0.1
    attempts: int = 4
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.tokens >= 0:
            raise InvalidConfig("tokens", self.tokens, "it is a number from 0 (no retries)")
        if not 0 <= self.earned_by_call <= 1:
            raise InvalidConfig("earned_by_call", self.earned_by_call, "it is a share from 0 to 1")
        if self.attempts < 1:
            raise InvalidConfig("attempts", self.attempts, "it is a number from 1 (no retries)")
        if not 0 < self.first_pause_s <= self.longest_pause_s:
            raise InvalidConfig("first_pause_s", self.first_pause_s, f"above 0, at most {self.longest_pause_s:g}")


class Budget:
    """A retry budget, shared by callers of the same servers: when all calls fail, few are retried.

    ``draw`` gives numbers from 0 to 1.
    """

    def __init__(self, config: RetryConfig | None = None, *, draw: Callable[[], float] = random.random) -> None:
        self.config = config or RetryConfig()
        self._draw = draw
        self._tokens = self.config.tokens

    @property
    def tokens(self) -> float:
        return self._tokens

    def called(self) -> None:
        """A call begins."""
        self._tokens = min(self.config.tokens, self._tokens + self.config.earned_by_call)

    def take(self) -> bool:
        """Take a token for one retry. False where there is none."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def pauses(self) -> Iterator[float]:
        """Seconds before the second attempt, the third, and so on."""
        pause = self.config.first_pause_s
        for _ in range(self.config.attempts - 1):
            yield pause * (0.5 + self._draw() / 2)
            pause = min(pause * 2, self.config.longest_pause_s)


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[Q, R],
    request: Q,
    *,
    timeout_s: float,
    retries: Budget | None = None,
    on: Collection[grpc.StatusCode] = UNREACHED,
    metadata: Pairs = (),
) -> R:
    """The response of ``method`` (a stub's, with one request and one response), within ``timeout_s``.

    Carries the present request's id and trace. With ``retries``, a call that ends with a code of ``on`` is made again
    after a pause, as long as budget and deadline allow. Name only codes after which the server has done nothing. A
    pause that the server asked for is kept. Raises AioRpcError: that of the last attempt.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    pauses = retries.pauses() if retries is not None else iter(())
    if retries is not None:
        retries.called()
    sent = outgoing(metadata)
    while True:
        try:
            return await method(request, timeout=max(0.0, deadline - loop.time()), metadata=sent)
        except grpc.aio.AioRpcError as error:
            pause = next(pauses, None) if error.code() in on else None
            if pause is None:
                raise
            pause = max(pause, retry_after_of(error) or 0.0)
            if loop.time() + pause >= deadline or retries is None or not retries.take():
                raise
        await asyncio.sleep(pause)


@contextlib.asynccontextmanager
async def reading(
    call: grpc.aio.UnaryStreamCall[Q, R] | grpc.aio.StreamStreamCall[Q, R],
) -> AsyncIterator[AsyncIterator[R]]:
    """The responses of a streaming call, which is cancelled on the way out: dropping its iterator does not do that."""
    try:
        yield aiter(call)
    finally:
        call.cancel()
