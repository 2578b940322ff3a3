"""When requests come: a part of a recorded hour where there is one, else bursts like those of real users."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

from greenroom_load.arrivals import Gamma
from greenroom_load.traces import read_trace

BURSTINESS = 0.4
"""Shape of the gaps where nothing was recorded; 1 would be Poisson."""


def recorded_arrivals() -> Path | None:
    """The Azure trace of conversations of 2023, where GREENROOM_DATA has it."""
    folder = os.environ.get("GREENROOM_DATA")
    found = Path(folder) / "arrivals" / "azure-llm-2023-conversation.csv" if folder else None
    return found if found is not None and found.exists() else None


def burst_times(count: int, rate: float, seed: int, trace: Path | None) -> list[float]:
    """``count`` ascending arrivals in seconds, the first at 0, ``rate`` a second in the mean.

    The same seed has the same gaps at every rate, only longer or shorter ones.
    """
    random = Random(f"arrivals/{seed}")
    drawn = list(islice(_drawn(random), count)) if trace is None else _part(trace, count, random)
    length = drawn[-1] - drawn[0]
    scale = (count - 1) / rate / length if length else 0.0
    return [scale * (at - drawn[0]) for at in drawn]


def _drawn(random: Random) -> Iterator[float]:
    for arrival in Gamma(1.0, BURSTINESS).times(random):
        yield arrival.at_s or 0.0


def _part(trace: Path, count: int, random: Random) -> list[float]:
    """So many in a row, from anywhere."""
    whole = _times_of(trace)
    first = random.randrange(len(whole) - count + 1)
    return list(whole[first : first + count])


@cache
def _times_of(trace: Path) -> tuple[float, ...]:
    return tuple(one.at_s for one in read_trace(trace))
