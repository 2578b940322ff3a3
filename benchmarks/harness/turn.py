"""What one turn of an arm is and what it yields: plain values that travel between processes as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Turn:
    """What an arm did with a stream once.

    ``tokens``: generated. ``ids``: by prompt. ``peak_bytes``: largest resident set during the turn. ``bytes_moved``:
    into the device tier's memory by all links, on demand or ahead. ``look_ups`` and ``hits``: as the engine counts
    them. ``link``: mean bytes/s of its disk right before and after. ``inside``: seconds by part, if the turn was
    instrumented.
    """

    seconds: float
    tokens: int
    ids: list[list[int]]
    peak_bytes: int = 0
    bytes_moved: int = 0
    look_ups: int = 0
    hits: int = 0
    prefetches: int = 0
    prefetches_used: int = 0
    stall_seconds: float = 0.0
    steps: int = 0
    link: float | None = None
    trace: Trace | None = None
    inside: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Turn:
        trace = values.pop("trace", None)
        return cls(**values, trace=None if trace is None else Trace(**trace))


@dataclass
class Trace:
    """What follows from the routing of a turn.

    ``belady_bytes``: of the misses of Belady's choice, in a run that is neither the first nor the last, if the stream
    runs over and over in the arm's slots, each size of experts in its own. ``bytes_touched``: of the weights that its
    forwards have to read: once a step the dense ones and each layer's distinct experts.
    """

    accesses: int
    belady_bytes: int
    bytes_touched: int


@contextmanager
def timed() -> Iterator[list[float]]:
    """Yields a list that holds the seconds afterwards."""
    seconds: list[float] = []
    begin = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - begin)
