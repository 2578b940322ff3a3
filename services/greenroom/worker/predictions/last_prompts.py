"""The last finished prompt of each task type: what eMoE's predictor goes by (section 3.2.2)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import ModelProfile
from greenroom.worker.engine import Routed

_MOST_TASKS = 16
"""Each may have kept megabytes of picks; the one that has not finished for longest is forgotten first."""


class LastPrompts:
    """Where the rows of the last finished prompt of a task type were routed; of a type that has had none here the
    popularity in the ``profile``, where there is one."""

    def __init__(self, profile: ModelProfile | None = None) -> None:
        self._profile = profile
        self._last: dict[str, Routed] = {}

    def finished(self, task: str, routed: Routed) -> None:
        if len(routed.experts):
            self._last.pop(task, None)
            self._last[task] = routed
            if len(self._last) > _MOST_TASKS:
                del self._last[next(iter(self._last))]

    def of(self, task: str) -> bytes:
        """float32[layers, experts], little-endian, each row 1 in sum; empty where nothing is known."""
        return self.now(task)()

    def now(self, task: str) -> Callable[[], bytes]:
        """``of`` as things are now, to be reckoned later: that takes milliseconds, and may be done in a thread."""
        routed = self._last.get(task)
        if routed is not None:
            return functools.partial(_encoded, routed)
        profile = self._profile
        if profile is not None and task in profile.tasks:
            return lambda: np.array(profile.popularity(task), dtype="<f4").tobytes()
        return bytes


def _encoded(routed: Routed) -> bytes:
    return distribution_of(routed).astype("<f4", copy=False).tobytes()


def distribution_of(routed: Routed) -> NDArray[np.float32]:
    """``[layers, experts]``: each expert's share of its layer's picks, all alike in a layer without any."""
    layers, experts = routed.experts.shape[1], routed.num_experts
    picks = np.ascontiguousarray(routed.experts.transpose(1, 0, 2)).reshape(layers, -1)
    counts = np.stack([np.bincount(own[own < experts], minlength=experts) for own in picks])
    sums = counts.sum(axis=1, keepdims=True)
    return np.where(sums > 0, counts / np.maximum(sums, 1), 1.0 / experts).astype(np.float32)
