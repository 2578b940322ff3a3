"""A list of requests, served when they come, and how long each took: for benchmarks and the profiler."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from greenroom.coe.computing.inputs import Input
from greenroom.coe.serving.engine import ServingEngine
from greenroom.coe.serving.outcomes import Outcome
from greenroom.core.errors import ModelBroken

_LOOKS_S = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """``arrives_ms``: after the first one's begin. ``value``: the router's parameter."""

    arrives_ms: float
    given: Input = field(repr=False)
    value: str = ""


@dataclass(frozen=True, slots=True)
class Answers:
    """``outcomes[i]``, ``latencies_ms[i]``: of the i-th call, to the end of its last stage. ``total_ms``: from the
    first arrival to the last end."""

    outcomes: tuple[Outcome, ...] = field(repr=False)
    latencies_ms: tuple[float, ...]
    total_ms: float

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return 1000.0 * len(self.latencies_ms) / self.total_ms


def serve_calls(engine: ServingEngine, calls: Sequence[Call], *, timeout_s: float = 600.0) -> Answers:
    """``calls`` in the order of their arrival. Latencies count from when a call is due, so one that is late counts too.

    Raises what ``submit`` raises, ModelBroken if the engine ends, TimeoutError if not all have ended in time.
    """
    changed = threading.Condition()
    ended: dict[int, tuple[float, Outcome]] = {}

    def on_end(place: int, outcome: Outcome) -> None:
        with changed:
            ended[place] = time.perf_counter(), outcome
            changed.notify()

    begun = time.perf_counter()
    pause = threading.Event()
    for place, call in enumerate(calls):
        early_s = begun + call.arrives_ms / 1000.0 - time.perf_counter()
        if early_s > 0:
            pause.wait(early_s)
        engine.submit(f"call {place}", call.given, call.value, on_end=functools.partial(on_end, place))
    deadline = time.perf_counter() + timeout_s
    with changed:
        while len(ended) < len(calls):
            changed.wait_for(lambda: len(ended) == len(calls), _LOOKS_S)
            if not engine.alive:
                raise ModelBroken("the collaboration has ended") from engine.failure
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{len(calls) - len(ended)} of {len(calls)} calls have not ended in {timeout_s:g} s")
    due = [begun + call.arrives_ms / 1000.0 for call in calls]
    return Answers(
        tuple(ended[place][1] for place in range(len(calls))),
        tuple(1000.0 * (ended[place][0] - at) for place, at in enumerate(due)),
        1000.0 * (max(at for at, _ in ended.values()) - min(due)),
    )
