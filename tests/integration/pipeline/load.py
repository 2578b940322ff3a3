"""Clients of a cluster under chaos: what each of them had, token by token."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import grpc

from greenroom.v1 import inference_pb2, inference_pb2_grpc

GIVE_UP_S = 180.0
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "greenroom.v1.Inference"},
}


@dataclass
class Call:
    """One request as its client saw it. ``indices`` only over gRPC, which has them."""

    number: int
    prompt: str
    way: str
    text: str = ""
    indices: list[int] = field(default_factory=list)
    end: str = ""
    refused: int = 0
    first_s: float = 0.0
    total_s: float = 0.0


class Clients:
    """Sends prompts to gateways that may be gone: a refused request is sent to the next one, an accepted one never
    again. Nor one whose connection was lost before there was an answer, which may have been accepted: it has no
    idempotency key. Over gRPC one channel has all gateways, and watches their health."""

    def __init__(self, urls: Sequence[str], grpc_addresses: Sequence[str], *, max_tokens: int, model: str) -> None:
        self._urls = list(urls)
        self._addresses = list(grpc_addresses)
        self._max_tokens = max_tokens
        self._model = model

    async def __aenter__(self) -> Clients:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        target = f"ipv4:{','.join(self._addresses)}"
        self._channel = grpc.aio.insecure_channel(
            target, options=[("grpc.service_config", json.dumps(_SERVICE_CONFIG))]
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._channel.close()

    async def call(self, number: int, prompt: str, way: str) -> Call:
        """Until it ends, or is refused by all for too long. What was accepted and broke off is an end too."""
        made = Call(number, prompt, way)
        began = time.monotonic()
        while not made.end and time.monotonic() - began < GIVE_UP_S:
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    await (self._http(made) if way == "http" else self._grpc(made))
            except _Refused:
                made.refused += 1
                await asyncio.sleep(0.2)
            except TimeoutError:
                made.end = "timed out"
        made.total_s = time.monotonic() - began
        made.end = made.end or "refused"
        return made

    async def _http(self, made: Call) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": made.prompt}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "stream": True,
        }
        try:
            async with self._session.post(f"{random.choice(self._urls)}/v1/chat/completions", json=body) as response:
                if response.status in (429, 503):
                    raise _Refused
                if response.status != 200:
                    made.end = f"status {response.status}: {await response.text()}"
                    return
                async for line in response.content:
                    if line.startswith(b"data: [DONE]"):
                        made.end = made.end or "no finish reason"
                        return
                    if line.startswith(b"data: "):
                        self._take(made, json.loads(line[6:]))
                made.end = "cut off"
        except aiohttp.ClientConnectorError as error:
            raise _Refused from error
        except aiohttp.ClientError as error:
            made.end = f"connection lost: {error!r}"

    @staticmethod
    def _take(made: Call, event: dict[str, object]) -> None:
        if "error" in event:
            made.end = f"error: {event['error']}"
            return
        for choice in event.get("choices", ()):  # type: ignore[attr-defined]
            made.text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                made.end = choice["finish_reason"]

    async def _grpc(self, made: Call) -> None:
        request = inference_pb2.GenerateRequest(
            chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=made.prompt)]),
            max_tokens=self._max_tokens,
            temperature=0,
        )
        began = False
        try:
            async for event in self._stub.GenerateStream(request):
                began = True
                made.text += event.text
                made.indices += range(event.tokens.start, event.tokens.start + len(event.tokens.ids))
                if event.HasField("end"):
                    made.end = {1: "stop", 2: "length"}.get(event.end.reason, f"reason {event.end.reason}")
        except grpc.aio.AioRpcError as error:
            refused = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
            if refused and not began:
                raise _Refused from error
            made.end = f"{error.code().name}: {error.details()}"

    async def poisson(
        self, prompts: Sequence[str], rate: float, seed: int, *, enough: Callable[[int], bool] | None = None
    ) -> list[Call]:
        """Prompts at random moments, ``rate`` a second, by both ways in turn: each once, or over and over until so many
        are ``enough``."""
        draw = random.Random(seed)
        tasks: list[asyncio.Task[Call]] = []
        async with asyncio.TaskGroup() as group:
            while not (enough(len(tasks)) if enough is not None else len(tasks) == len(prompts)):
                number = len(tasks)
                way = ("http", "grpc")[number % 2]
                tasks.append(group.create_task(self.call(number, prompts[number % len(prompts)], way)))
                await asyncio.sleep(draw.expovariate(rate))
        return [task.result() for task in tasks]


def check(calls: Sequence[Call], expected: Mapping[str, str]) -> None:
    """Each came to its end with the text that its prompt has, and over gRPC with every token once."""
    for call in calls:
        assert call.end in ("stop", "length"), f"request {call.number} ({call.way}) ended with {call.end!r}"
        assert call.text == expected[call.prompt], f"request {call.number} ({call.way}) has another text"
        assert call.indices == list(range(len(call.indices))), f"request {call.number}: {call.indices}"


class _Refused(Exception):
    """It was not accepted; another may."""
