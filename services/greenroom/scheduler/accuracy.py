"""How far estimated latencies were from the real ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
"""Upper ends of the classes that real over estimated latency is counted in; above the last is one more."""


@dataclass(slots=True)
class Errors:
    """Of one estimator. Sums in milliseconds; ``longer_ms`` less ``shorter_ms`` is how much longer it really took."""

    requests: int = 0
    longer_ms: float = 0.0
    shorter_ms: float = 0.0
    share: float = 0.0
    """Sum of |real - estimated| / real."""
    ratio: float = 0.0
    """Sum of real / estimated."""
    classes: list[int] = field(default_factory=lambda: [0] * (len(RATIOS) + 1))

    def add(self, estimated_ms: float, real_ms: float) -> None:
        self.requests += 1
        self.longer_ms += max(0.0, real_ms - estimated_ms)
        self.shorter_ms += max(0.0, estimated_ms - real_ms)
        self.share += abs(real_ms - estimated_ms) / real_ms
        self.ratio += real_ms / estimated_ms
        self.classes[bisect_left(RATIOS, real_ms / estimated_ms)] += 1

    @property
    def absolute_ms(self) -> float:
        return self.longer_ms + self.shorter_ms

    def summary(self) -> dict[str, Any]:
        count = max(1, self.requests)
        return {
            "requests": self.requests,
            "mean_absolute_ms": self.absolute_ms / count,
            "mean_longer_ms": (self.longer_ms - self.shorter_ms) / count,
            "mean_absolute_share": self.share / count,
            "mean_ratio": self.ratio / count,
        }


class Accuracy:
    """Estimates that were made when requests were placed, against what it came to."""

    def __init__(self) -> None:
        self.by_estimator: dict[str, Errors] = {}

    def add(self, estimates_ms: Mapping[str, float], real_ms: float) -> None:
        """Of one request, by estimator. What took no time, or was to take none, says nothing."""
        for name, estimated in estimates_ms.items():
            if real_ms > 0 and estimated > 0:
                self.by_estimator.setdefault(name, Errors()).add(estimated, real_ms)

    def summary(self) -> dict[str, dict[str, Any]]:
        return {name: errors.summary() for name, errors in sorted(self.by_estimator.items())}
