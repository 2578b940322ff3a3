"""What is measured and replayed, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.profiling.coe.batch_timing import TimingPlan
from greenroom.profiling.coe.decay_window import INITIAL_PERCENT
from greenroom.profiling.coe.replayed_throughput import SCHEDULINGS

_EACH_UP_TO: Final = 4


@dataclass(frozen=True, slots=True)
class CoeProfileConfig:
    """``memory_bytes``: for experts and intermediates of all executors of a kind. ``executors``: the most that are
    tried. ``requests``: of a replay. ``draws``: take the paper's drawn number of residents, not the best one found.
    """

    memory_bytes: int
    executors: int
    timing: TimingPlan = field(default_factory=TimingPlan)
    requests: int = 2000
    initial_percent: float = INITIAL_PERCENT
    scheduling: str = "coserve"
    draws: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidConfig."""
        if self.scheduling not in SCHEDULINGS:
            raise UnknownName("scheduling", self.scheduling, SCHEDULINGS)
        if not 0 < self.initial_percent <= 100:
            raise InvalidConfig("first window", self.initial_percent, "above 0 and at most 100, in percent of experts")

    @property
    def counts(self) -> list[int]:
        """Numbers of executors that are tried: each up to four, then powers of two and the most."""
        counts = [count for count in range(1, self.executors + 1) if count <= _EACH_UP_TO or count & (count - 1) == 0]
        return counts if counts[-1] == self.executors else [*counts, self.executors]

    def quick(self) -> CoeProfileConfig:
        """A first look, in seconds."""
        return replace(
            self,
            timing=replace(self.timing, largest=min(self.timing.largest, 8), rounds=2, repeats=1),
            requests=min(self.requests, 300),
        )
