"""When requests are sent: processes with a mean rate, recorded traffic, or all at once.

Every process is a description without state; ``times`` draws from the given random numbers, so the same seed gives the
same arrivals. Rates are requests a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from greenroom.core.errors import InvalidConfig
from greenroom_load.traces import Recorded


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to be sent at ``at_s`` seconds after the start; None: as soon as there is room.

    Lengths are in tokens, where a trace has recorded them.
    """

    at_s: float | None
    input_tokens: int | None = None
    output_tokens: int | None = None


class Arrivals(Protocol):
    @property
    def rate(self) -> float:
        """Requests a second in the long run; infinite where nothing is waited for."""
        ...

    def times(self, rng: Random) -> Iterator[Arrival]:
        """Arrivals in order; endless, but for a trace."""
        ...

    def at_rate(self, rate: float) -> Arrivals:
        """The same process at another mean rate."""
        ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent exponential gaps: many users who know nothing of each other."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, rng: Random) -> Iterator[Arrival]:
        at = 0.0
        while True:
            at += rng.expovariate(self.rate)
            yield Arrival(at)

    def at_rate(self, rate: float) -> Poisson:
        return Poisson(rate)

    def __str__(self) -> str:
        return f"Poisson, {self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps of shape ``burstiness``: below 1 in bursts, 1 is Poisson, above 1 more even.

    The gaps' coefficient of variation is 1/√burstiness.
    """

    rate: float
    burstiness: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not 0 < self.burstiness < math.inf:
            raise InvalidConfig("burstiness", self.burstiness, "a number above 0; 1 is Poisson")

    def times(self, rng: Random) -> Iterator[Arrival]:
        at, scale = 0.0, 1 / (self.rate * self.burstiness)
        while True:
            at += rng.gammavariate(self.burstiness, scale)
            yield Arrival(at)

    def at_rate(self, rate: float) -> Gamma:
        return replace(self, rate=rate)

    def __str__(self) -> str:
        return f"gamma with burstiness {self.burstiness:g}, {self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Constant:
    """Equal gaps, the first request at 0."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, rng: Random) -> Iterator[Arrival]:
        number = 0
        while True:
            yield Arrival(number / self.rate)
            number += 1

    def at_rate(self, rate: float) -> Constant:
        return Constant(rate)

    def __str__(self) -> str:
        return f"constant, {self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded traffic once through. Recorded gaps are multiplied by ``time_scale``: 0.1 is ten times as fast."""

    recorded: tuple[Recorded, ...]
    time_scale: float = 1.0
    name: str = "trace"

    def __post_init__(self) -> None:
        if not 0 < self.time_scale < math.inf:
            raise InvalidConfig("time_scale", self.time_scale, "a number above 0; 0.1 is ten times as fast as recorded")

    @property
    def rate(self) -> float:
        length = self.recorded[-1].at_s * self.time_scale
        return (len(self.recorded) - 1) / length if length > 0 else math.inf

    def times(self, rng: Random) -> Iterator[Arrival]:
        for one in self.recorded:
            yield Arrival(one.at_s * self.time_scale, one.input_tokens, one.output_tokens)

    def at_rate(self, rate: float) -> Trace:
        _check_rate(rate)
        if math.isinf(self.rate):
            raise InvalidConfig("request_rate", rate, "nothing for this trace: all of its requests have the same time")
        return replace(self, time_scale=self.time_scale * self.rate / rate)

    def __str__(self) -> str:
        return f"{self.name} × {self.time_scale:g}, {self.rate:.3g}/s"


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Nothing is waited for but room under the bound on concurrency: the closed loop."""

    @property
    def rate(self) -> float:
        return math.inf

    def times(self, rng: Random) -> Iterator[Arrival]:
        while True:
            yield Arrival(None)

    def at_rate(self, rate: float) -> Poisson:
        return Poisson(rate)

    def __str__(self) -> str:
        return "as soon as there is room"


def _check_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise InvalidConfig("request_rate", rate, "a number of requests a second above 0, or inf with --arrivals unset")
