"""How far estimated latencies were from the real ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
"""Upper ends of the classes in which the ratio of real to estimated latency is counted. One more class is above."""


@dataclass(slots=True)
class EstimateErrors:
    """The errors of one estimator. Sums in milliseconds: ``longer_ms`` of the requests that took longer than estimated,
    ``shorter_ms`` of those that took less time."""

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
    """The estimates that were made when requests were placed, against the real latencies."""

    def __init__(self) -> None:
        self.by_estimator: dict[str, EstimateErrors] = {}

    def add(self, estimates_ms: Mapping[str, float], real_ms: float) -> None:
        """Of one request, by estimator. A latency of 0, real or estimated, is passed over."""
        for name, estimated in estimates_ms.items():
            if real_ms > 0 and estimated > 0:
                self.by_estimator.setdefault(name, EstimateErrors()).add(estimated, real_ms)

    def summary(self) -> dict[str, dict[str, Any]]:
        return {name: errors.summary() for name, errors in sorted(self.by_estimator.items())}
