"""Records, plans and a server without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from greenroom_load.arrivals import Arrivals, Constant
from greenroom_load.lengths import Lengths
from greenroom_load.mix import ShiftingMix, TaskMix
from greenroom_load.plan import Bounds, Plan
from greenroom_load.prompts import Ask, Prompt, TemplatedPrompts, Turn
from greenroom_load.reply_record import Exchange, Failure, FailureKind, Record, clock
from greenroom_load.runner import Outcome
from greenroom_load.transport import Prepared

DEADLINE_S = 20.0


def record(index: int = 0, **given: Any) -> Record:
    """Sent when intended, 0.1 s to the first token, three more every 0.02 s."""
    at = float(given.pop("at", index))
    fields: dict[str, Any] = {
        "intended_s": at,
        "sent_s": at,
        "first_s": at + 0.1,
        "end_s": at + 0.16,
        "gaps_s": (0.02, 0.02, 0.02),
        "task": "question",
        "prompt_tokens": 10,
        "output_tokens": 4,
        "finish": "stop",
        "text": "yes",
    }
    return Record(index=index, **{**fields, **given})


def failed(index: int = 0, kind: FailureKind = FailureKind.LIMITED, reason: str = "saturated", **given: Any) -> Record:
    whole = record(index, **given)
    return replace(whole, first_s=None, gaps_s=(), output_tokens=0, finish=None, text="", failure=Failure(kind, reason))


def outcome(*records: Record, **given: Any) -> Outcome:
    ends = [one.end_s for one in records if one.end_s is not None]
    sent = [one.sent_s for one in records if one.sent_s is not None]
    fields: dict[str, Any] = {
        "sending_s": max(sent, default=0.0),
        "duration_s": max(ends, default=0.0),
        "started": 1_700_000_000.0,
        "interrupted": False,
        "peak_in_flight": 2,
        "lags_s": (0.0005, 0.001),
        "cpu_share": 0.1,
    }
    return Outcome(records=records, **{**fields, **given})


def plan(arrivals: Arrivals | None = None, **given: Any) -> Plan:
    """Ten requests at 100/s without a warm-up; ``given`` are bounds, or fields of Plan."""
    bounds = {name: given.pop(name) for name in list(given) if name in Bounds.__slots__}
    if not bounds.keys() & {"num_requests", "duration_s"}:
        bounds["num_requests"] = 10
    fields: dict[str, Any] = {
        "arrivals": arrivals or Constant(100.0),
        "bounds": Bounds(**{"warmup_requests": 0, **bounds}),
        "prompts": TemplatedPrompts(0),
        "mix": ShiftingMix(TaskMix({"question": 1.0})),
        "output": Lengths("fixed", (8.0,)),
    }
    return Plan(**{**fields, **given})


ASK = Ask(Prompt((Turn("user", "Where does Ida live?"),), "question", "q-1", "Ida lives in Rome."), 8)
Behaviour = Callable[[Exchange], Any]


class FakeServer:
    """A transport whose server does what ``behaviour`` does; by default one token at once."""

    kind = "fake"
    address = "fake://here"

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or reply
        self.sent: list[tuple[float, str]] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def wait_ready(self, timeout_s: float) -> None: ...

    async def model(self) -> str:
        return "fake-model"

    def prepare(self, ask: Ask, model: str, request_id: str) -> Prepared:
        return Prepared(request_id, ())

    async def send(self, prepared: Prepared, exchange: Exchange) -> None:
        self.sent.append((clock(), prepared.payload))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.behaviour(exchange)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


async def reply(exchange: Exchange) -> None:
    exchange.heard("yes", clock())
    exchange.used(5, 1)
    exchange.ended("stop", clock())


def after(seconds: float) -> Behaviour:
    """A reply that takes so long."""

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(seconds)
        await reply(exchange)

    return slow
