"""What a run sends and how long it goes on: all of it decided before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from greenroom.core.errors import InvalidConfig
from greenroom_load.arrivals import Arrivals, AtOnce
from greenroom_load.lengths import Lengths
from greenroom_load.mix import ShiftingMix
from greenroom_load.prompts import Ask, Prompts
from greenroom_load.targets import TargetsByTask

LONGEST_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """When a run ends, and what it holds at most.

    Sending ends after ``num_requests`` or ``duration_s``, whichever comes first; at least one is given.
    ``max_concurrency``: requests in flight that a closed loop keeps to; None is the open loop, in which a request is
    sent when its time comes whatever became of the others. ``max_outstanding``: the open loop's own bound, beyond which
    requests count as not sent. ``drain_timeout_s``: how long the last replies are waited for.
    """

    num_requests: int | None = None
    duration_s: float | None = None
    max_concurrency: int | None = None
    max_outstanding: int = 10_000
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 60.0
    warmup_requests: int = 5

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise InvalidConfig("num_requests", None, "a number of requests, unless there is a --duration")
        for name, least in (
            ("num_requests", 1),
            ("max_concurrency", 1),
            ("max_outstanding", 1),
            ("warmup_requests", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidConfig(name, value, f"a number from {least}")
        for name in ("duration_s", "request_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= LONGEST_S:
                raise InvalidConfig(name, value, f"a number of seconds above 0 and at most {LONGEST_S:g}")


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a plan. ``at_s``: seconds after the start, None: as soon as there is room."""

    index: int
    at_s: float | None
    ask: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run before it is run. Arrivals, tasks and lengths have random numbers of their own, all from ``seed``: so
    changing one of them leaves the others as they were."""

    arrivals: Arrivals
    bounds: Bounds
    prompts: Prompts
    mix: ShiftingMix
    output: Lengths
    input: Lengths | None = None
    targets: TargetsByTask = field(default_factory=TargetsByTask)
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = self.bounds
        if isinstance(self.arrivals, AtOnce) and bounds.max_concurrency is None and bounds.num_requests is None:
            raise InvalidConfig("request_rate", "inf", "used with --max-concurrency or --num-requests")

    def requests(self) -> Iterator[Planned]:
        """In the order of their times. Prompts are taken from ``prompts`` as it goes."""
        arriving, choosing, sizing = (Random(f"{self.seed}/{what}") for what in ("arrivals", "tasks", "lengths"))
        bounds = self.bounds
        for index, arrival in enumerate(self.arrivals.times(arriving)):
            if bounds.num_requests is not None and index >= bounds.num_requests:
                return
            if bounds.duration_s is not None and arrival.at_s is not None and arrival.at_s >= bounds.duration_s:
                return
            task = self.mix.draw(choosing, self._progress(index, arrival.at_s))
            wanted = None if self.input is None else self.input.draw(sizing, arrival.input_tokens)
            limit = self.output.draw(sizing, arrival.output_tokens)
            prompt = self.prompts.draw(task, wanted)
            limit = limit if prompt.max_tokens is None else prompt.max_tokens
            yield Planned(index, arrival.at_s, Ask(prompt, limit, self.targets.of(prompt.task)))

    def warmup(self) -> Iterator[Ask]:
        """Requests whose figures nobody looks at: from the same prompts, before the others."""
        choosing, sizing = (Random(f"{self.seed}/warm-up/{what}") for what in ("tasks", "lengths"))
        for _ in range(self.bounds.warmup_requests):
            prompt = self.prompts.draw(self.mix.draw(choosing, 0.0), None)
            limit = 32 if self.output.kind == "trace" else self.output.draw(sizing, None)
            yield Ask(prompt, prompt.max_tokens or limit, self.targets.of(prompt.task))

    def _progress(self, index: int, at_s: float | None) -> float:
        by_time = by_count = 0.0
        if self.bounds.duration_s is not None and at_s is not None:
            by_time = at_s / self.bounds.duration_s
        if self.bounds.num_requests is not None:
            by_count = index / self.bounds.num_requests
        return max(by_time, by_count)
