"""Requests to a real server: which, when, and what came of them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp

from benchmarks.emoe.measured_profile import MAX_TOKENS
from benchmarks.emoe.scheduling.jobs import SLO_MULTIPLES
from greenroom.demo.tasks import TASKS, sample
from greenroom_load.arrivals import Poisson

SEED = 77_000
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Sent:
    """One request to be sent. ``at_s`` from the start of its run."""

    at_s: float
    task: str
    prompt: str
    slo_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Came:
    """Its answer. ``why``: what it was told instead."""

    tokens_in: int = 0
    tokens_out: int = 0
    end_s: float | None = None
    why: str = ""


def plan(rate: float, count: int, seed: int, alone_ms: Mapping[str, float]) -> list[Sent]:
    rng = random.Random(f"{SEED}/{seed}")
    times = Poisson(rate).times(random.Random(f"{seed}/gaps"))
    found = []
    for number, arrival in zip(range(count), times, strict=False):
        task = rng.choice(TASKS)
        drawn = sample(task, seed=SEED + seed, index=number, split="heldout")
        slo = rng.choice(SLO_MULTIPLES) * alone_ms[task] if alone_ms else None
        found.append(Sent(arrival.at_s or 0.0, task, drawn.prompt, slo))
    return found


async def send(url: str, model: str, sent: Sequence[Sent], *, at_once: int = 0) -> tuple[list[Came], float]:
    """As planned, or ``at_once`` at a time; with how many seconds all of it took."""
    places = asyncio.Semaphore(at_once or len(sent))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = time.perf_counter()

        async def one(planned: Sent) -> Came:
            async with places:
                due = began + planned.at_s
                if not at_once:
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                return await _call(session, f"{url}/v1/chat/completions", model, planned, began)

        came = list(await asyncio.gather(*(one(planned) for planned in sent)))
        return came, time.perf_counter() - began


async def _call(session: aiohttp.ClientSession, url: str, model: str, planned: Sent, began: float) -> Came:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": planned.prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "task_type": planned.task,
    }
    headers = {} if planned.slo_ms is None else {"x-slo-e2e-ms": f"{planned.slo_ms:.3f}"}
    try:
        async with session.post(url, json=body, headers=headers) as response:
            answer = json.loads(await response.read())
            if response.status != 200:
                return Came(why=str(answer["error"]["code"]))
    except (aiohttp.ClientError, TimeoutError) as error:
        return Came(why=type(error).__name__)
    usage = answer["usage"]
    return Came(usage["prompt_tokens"], usage["completion_tokens"], time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Requests that came one after another, or all at once, and how long all of them took."""

    asked: tuple[Sent, ...]
    came: tuple[Came, ...]
    seconds: float


def alone_requests(task: str, times: int) -> list[list[Sent]]:
    """The first is to warm up."""
    drawn = [sample(task, seed=SEED - 1, index=number, split="heldout") for number in range(times)]
    return [[Sent(0.0, task, one.prompt)] for one in drawn]


def all_at_once(count: int, seed: int) -> list[Sent]:
    return [replace(one, at_s=0.0) for one in plan(1.0, count, seed=-1 - seed, alone_ms={})]


async def crowd(url: str, model: str, asked: Sequence[Sent], *, at_once: int = 0) -> Crowd:
    """With ``at_once`` more wait than can run: answers come as fast as they can."""
    came, seconds = await send(url, model, asked, at_once=at_once)
    pairs = [(one, got) for one, got in zip(asked, came, strict=True) if got.end_s is not None]
    if not pairs:
        raise RuntimeError(f"the server answered none of {len(asked)} requests: {came[0].why}")
    return Crowd(tuple(one for one, _ in pairs), tuple(got for _, got in pairs), seconds)
