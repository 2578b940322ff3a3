"""What an arm did with some prompts once, a request at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.turn import Turn


@dataclass
class PhaseTurn:
    """What the steps of one phase took: seconds, of these those that layers waited, and bytes moved meanwhile."""

    steps: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    bytes_moved: int = 0


@dataclass
class ServedTurn(Turn):
    """``request_seconds``: of each prompt, from when the engine had it to its last token.

    ``on_demand``: fetches that a layer waited for. ``prefetches_wasted``: fetched ahead and gone without a use.
    ``policy_seconds``: by the policy's method, where that was looked at. ``phases``: of steps with prompt rows
    ("prefill") and of those without ("decode").
    """

    request_seconds: list[float] = field(default_factory=list)
    prefetches_wasted: int = 0
    on_demand: int = 0
    policy_seconds: dict[str, float] = field(default_factory=dict)
    phases: dict[str, PhaseTurn] = field(default_factory=dict)

    @property
    def per_token(self) -> list[float]:
        """Seconds a token of each prompt."""
        return [seconds / max(1, len(ids)) for seconds, ids in zip(self.request_seconds, self.ids, strict=True)]

    @classmethod
    def of_answer(cls, values: dict[str, Any]) -> ServedTurn:
        """As a child process says it."""
        return cls(**values)
