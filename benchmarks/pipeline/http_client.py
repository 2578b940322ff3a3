"""The pipeline's HTTP API, as a client that streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import aiohttp

from benchmarks.pipeline.schedule import Measured, Planned


async def run(
    url: str, model: str, plan: Sequence[Planned], *, at_once: int = 0, timeout_s: float = 300
) -> list[Measured]:
    """``at_once`` 0: as planned, however many that makes. Each request has a connection, kept alive."""
    places = asyncio.Semaphore(at_once or len(plan) or 1)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = time.perf_counter()

        async def one(planned: Planned) -> Measured:
            async with places:
                due = max(began + planned.at, time.perf_counter()) if at_once else began + planned.at
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                return await _call(session, f"{url}/v1/chat/completions", model, planned, due)

        return list(await asyncio.gather(*(one(planned) for planned in plan)))


async def _call(session: aiohttp.ClientSession, url: str, model: str, planned: Planned, due: float) -> Measured:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": planned.prompt}],
        "temperature": 0,
        "max_tokens": planned.tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = 0.0
    tokens = 0
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                answer = json.loads(await response.read())["error"]
                retry = response.headers.get("Retry-After", "")
                return Measured(refused=f"{response.status} {answer['code']}{' retry-after' if retry else ''}",
                                total=time.perf_counter() - due)  # fmt: skip
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                part = json.loads(line[6:])
                if "error" in part:
                    return Measured(refused=str(part["error"]["code"]), total=now - due)
                if part.get("usage"):
                    tokens = part["usage"]["completion_tokens"]
                elif any(choice["delta"].get("content") for choice in part["choices"]):
                    last = now
                    first = first or now
    except (aiohttp.ClientError, TimeoutError) as error:
        return Measured(refused=type(error).__name__, total=time.perf_counter() - due)
    return Measured(first - due, (last - first) / max(1, tokens - 1), tokens, last - due)
