"""Which task type comes next: a multinomial, which may move from one mix to another over the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from greenroom.core.errors import InvalidConfig, UnknownName

_ALLOWED = "write it as summarise=0.4,question=0.6: each task type once, with a weight of 0 or more, not all 0"


@dataclass(frozen=True, slots=True)
class TaskMix:
    """Weights by task type; they need not sum to 1."""

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not all(0 <= weight < math.inf for weight in self.weights.values()) or sum(self.weights.values()) <= 0:
            raise InvalidConfig("task_mix", dict(self.weights), _ALLOWED)

    @classmethod
    def parse(cls, text: str, *, field: str) -> TaskMix:
        """Raises InvalidConfig."""
        weights: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            try:
                weight = float(value)
            except ValueError:
                raise InvalidConfig(field, text, _ALLOWED) from None
            if not equals or not name or name in weights:
                raise InvalidConfig(field, text, _ALLOWED)
            weights[name] = weight
        if not all(0 <= weight < math.inf for weight in weights.values()) or sum(weights.values()) <= 0:
            raise InvalidConfig(field, text, _ALLOWED)
        return cls(weights)

    def check(self, known: Iterable[str], *, field: str) -> None:
        """Raises UnknownName for a task type that is not among ``known``."""
        names = list(known)
        for task in self.weights:
            if task not in names:
                raise UnknownName(field, task, names)

    @property
    def shares(self) -> dict[str, float]:
        whole = sum(self.weights.values())
        return {task: weight / whole for task, weight in self.weights.items()}

    def __str__(self) -> str:
        return ", ".join(f"{task or 'no task type'} {share:.3g}" for task, share in self.shares.items() if share > 0)


@dataclass(frozen=True, slots=True)
class ShiftingMix:
    """From ``first`` at the run's start to ``last`` at its end, in a straight line; ``last`` None: no change."""

    first: TaskMix
    last: TaskMix | None = None

    def shares(self, progress: float) -> dict[str, float]:
        """At ``progress`` from 0 to 1 of the run."""
        if self.last is None:
            return self.first.shares
        begin, end = self.first.shares, self.last.shares
        moved = min(1.0, max(0.0, progress))
        return {task: (1 - moved) * begin.get(task, 0) + moved * end.get(task, 0) for task in (begin | end)}

    def draw(self, rng: Random, progress: float) -> str:
        shares = self.shares(progress)
        tasks = list(shares)
        sums = list(accumulate(shares.values()))
        return rng.choices(tasks, cum_weights=sums)[0]

    def __str__(self) -> str:
        return str(self.first) if self.last is None else f"{self.first}, moving to {self.last}"
