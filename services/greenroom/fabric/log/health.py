"""Whether a log acknowledges appends, and how far this machine's clock is from the log's: from acknowledgements alone.

Decisions without I/O; `greenroom.fabric.log_monitor` measures, in every process the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from greenroom.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Milliseconds. ``silent_ms``: without an acknowledgement for so long the process takes no new work.
    ``warn_skew_ms``: a larger difference of clocks is logged. ``most_skew_ms``: beyond it a process does not start,
    since the protocol allows for no more (a minute, rule 4). Raises InvalidConfig, naming the field."""

    silent_ms: float = 15_000.0
    warn_skew_ms: float = 2_000.0
    most_skew_ms: float = 60_000.0

    def __post_init__(self) -> None:
        for name in ("silent_ms", "warn_skew_ms", "most_skew_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(name, getattr(self, name), "it is a number of milliseconds above 0")


class Skew(Enum):
    """How serious a difference of clocks is."""

    FINE = "fine"
    WARN = "warn"
    TOO_MUCH = "too much"


class LogHealth:
    """The log's health by its acknowledgements so far. Times in Unix milliseconds, on a clock that never jumps."""

    def __init__(self, config: HealthConfig | None = None, *, now: float) -> None:
        self.config = config or HealthConfig()
        self.skew_ms = 0.0
        """The least that this machine's clock is ahead of the log's; below 0: behind."""
        self._answered = now

    def acknowledged(self, sent: float, stamp: float, now: float) -> None:
        """A record sent at ``sent`` was stamped ``stamp`` by the log, and acknowledged ``now``."""
        self._answered = max(self._answered, now)
        self.skew_ms = clock_skew_ms(sent, stamp, now)

    def silent_ms(self, now: float) -> float:
        """For how long nothing has been acknowledged."""
        return max(0.0, now - self._answered)

    def silent(self, now: float) -> bool:
        return self.silent_ms(now) >= self.config.silent_ms

    def trouble(self, now: float) -> str | None:
        """Why no new work is to be taken; None: the log answers."""
        if not self.silent(now):
            return None
        return f"the log has acknowledged nothing for {self.silent_ms(now) / 1000:.0f} s"

    @property
    def skew(self) -> Skew:
        if abs(self.skew_ms) > self.config.most_skew_ms:
            return Skew.TOO_MUCH
        return Skew.WARN if abs(self.skew_ms) > self.config.warn_skew_ms else Skew.FINE

    def told_skew(self) -> str:
        return f"this machine's clock is {told_ms(abs(self.skew_ms))} {_side(self.skew_ms)} the log's"


def clock_skew_ms(sent: float, stamp: float, acknowledged: float) -> float:
    """The least that our clock is ahead of the stamping clock; below 0: behind. The stamp was made between sending and
    acknowledgement, so the skew is 0 where it lies between them."""
    if stamp < sent:
        return sent - stamp
    return acknowledged - stamp if stamp > acknowledged else 0.0


def expired_early(began: float, timeout_ms: float, now: float) -> bool:
    """Whether a request was ended as expired long before its time by our clock, which accepted it. Then it was judged
    by a clock that is ahead of ours."""
    return now - began < timeout_ms - _EARLY_MS


_EARLY_MS = 1_000.0


def told_ms(ms: float) -> str:
    """A time for people, in the unit that fits."""
    if ms >= 5_400_000:
        return f"{ms / 3_600_000:.1f} hours"
    return f"{ms / 60_000:.1f} minutes" if ms >= 120_000 else f"{ms / 1000:.1f} s"


def _side(ms: float) -> str:
    return "ahead of" if ms > 0 else "behind"
