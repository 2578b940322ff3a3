"""The last finished prompt of each task type, from which eMoE's predictor forecasts (section 3.2.2)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import ModelProfile
from greenroom.worker.generation_engine import RecordedRouting

_MOST_TASKS = 16
"""Each may hold megabytes of picks. The task type that has not finished a prompt for longest is forgotten first."""


class LastPrompts:
    """Where the last finished prompt of each task type was routed. A type without a prompt so far has the popularity
    of the ``profile``, where there is one."""

    def __init__(self, profile: ModelProfile | None = None) -> None:
        self._profile = profile
        self._last: dict[str, RecordedRouting] = {}

    def finished(self, task: str, routed: RecordedRouting) -> None:
        if len(routed.experts):
            self._last.pop(task, None)
            self._last[task] = routed
            if len(self._last) > _MOST_TASKS:
                del self._last[next(iter(self._last))]

    def of(self, task: str) -> bytes:
        """float32[layers, experts], little-endian, each row 1 in sum; empty where nothing is known."""
        return self.now(task)()

    def now(self, task: str) -> Callable[[], bytes]:
        """A function that computes ``of`` as of now. It takes milliseconds, and may be called in a thread."""
        routed = self._last.get(task)
        if routed is not None:
            return functools.partial(_encoded, routed)
        profile = self._profile
        if profile is not None and task in profile.tasks:
            return lambda: np.array(profile.popularity(task), dtype="<f4").tobytes()
        return bytes


def _encoded(routed: RecordedRouting) -> bytes:
    return distribution_of(routed).astype("<f4", copy=False).tobytes()


def distribution_of(routed: RecordedRouting) -> NDArray[np.float32]:
    """``[layers, experts]``: each expert's share of its layer's picks; all are equal in a layer without picks."""
    layers, experts = routed.experts.shape[1], routed.num_experts
    picks = np.ascontiguousarray(routed.experts.transpose(1, 0, 2)).reshape(layers, -1)
    counts = np.stack([np.bincount(own[own < experts], minlength=experts) for own in picks])
    sums = counts.sum(axis=1, keepdims=True)
    return np.where(sums > 0, counts / np.maximum(sums, 1), 1.0 / experts).astype(np.float32)
