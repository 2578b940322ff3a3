"""How long a policy takes, by method. Wrappers are put around the methods that the engine calls, and removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness.part_clock import PartClock
from greenroom.policies.base.expert_policy import ExpertPolicy

ASKED = ("victims", "compute_order", "row_mask", "take_requests", "report")
"""What is asked of a policy; all else that the engine calls are events."""
LOOK_UP = "_predict"
"""Of MoE-Infinity's events, the look-up and the priorities; the rest of them is caching."""


PREDICTORS = "predictors"
"""What the policy's own predictors take, which the engine calls beside it."""
_PREDICTING = ("on_step_started", "on_layer_routed", "answer")


class PolicyClock:
    """Times every call of the engine to the policy and its predictors until ``remove``, on the engine's thread.

    ``seconds``: by method; ``LOOK_UP`` counts apart from the event that it is in. The clock takes about half a
    microsecond a call, which counts to the method.
    """

    def __init__(self, policy: ExpertPolicy) -> None:
        self._clock = PartClock()
        self._timed: list[tuple[object, str]] = []
        for name in dir(ExpertPolicy):
            if (name in policy.hooks or name in ASKED) and callable(getattr(policy, name)):
                self._time(policy, name, name)
        if hasattr(policy, LOOK_UP):
            self._time(policy, LOOK_UP, LOOK_UP)
        for predictor in policy.predictors:
            for name in _PREDICTING:
                self._time(predictor, name, PREDICTORS)

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._clock.seconds)

    def remove(self) -> None:
        for owner, name in self._timed:
            delattr(owner, name)
        self._timed = []

    def _time(self, owner: object, name: str, part: str) -> None:
        setattr(owner, name, self._around(part, getattr(owner, name)))
        self._timed.append((owner, name))

    def _around(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        clock = self._clock

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.enter(name)
            try:
                return inner(*args, **kwargs)
            finally:
                clock.leave()

        return timed


def of_events(seconds: Mapping[str, float]) -> float:
    """Without the methods that are asked for an answer."""
    return sum(value for name, value in seconds.items() if name not in ASKED)
