"""How many tokens the requests of each task bring (eMoE, Eq. 2), and what one more request would change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import ModelProfile
from greenroom.policies.base.allocation import Allocation, Shares
from greenroom.policies.base.array_types import Counts, Mask
from greenroom.policies.base.events import SequenceInfo

_MOST_TASKS = 64


def expected_tokens(weights: Mapping[str, float], shares: Mapping[str, Shares]) -> NDArray[np.float64]:
    """Eq. 2, summed over the tasks that have ``shares`` (s·f): how many tokens each expert is expected to get."""
    tasks = [task for task in weights if task in shares]
    return np.array([weights[task] for task in tasks]) @ np.stack([shares[task] for task in tasks])


class Prompts:
    """The tokens of a task's requests: those of their input, and those that they are expected to generate.

    A request is expected to generate the mean of its task's answers in the profile; without a profile, what it says.
    """

    def __init__(self, profile: ModelProfile | None) -> None:
        self._profile = profile
        self._generated: dict[str, float] = {}
        self._seen: dict[str, tuple[int, float]] = {}

    def add(self, request: SequenceInfo) -> None:
        """Count a new request."""
        if request.task in self._seen or len(self._seen) < _MOST_TASKS:
            count, tokens = self._seen.get(request.task, (0, 0.0))
            self._seen[request.task] = count + 1, tokens + request.prompt_tokens + self._generates(request)

    def weights(self, requests: Iterable[SequenceInfo]) -> dict[str, float]:
        """By task: Σ W + |R| · Wo, the brackets of Eq. 2. A request of unknown tokens counts 1."""
        weights: dict[str, float] = {}
        for one in requests:
            tokens = max(1.0, one.prompt_tokens + self._generates(one))
            weights[one.task] = weights.get(one.task, 0.0) + tokens
        return weights

    def expected(self, task: str) -> float:
        """Tokens that one more request of the task brings, by the profile, else in the mean of those seen."""
        if self._profile is not None and task in self._profile.tasks:
            return max(1.0, self._profile.tasks[task].input_tokens.mean + self._profile.expected_tokens(task))
        count, tokens = self._seen.get(task, (0, 0.0))
        return max(1.0, tokens / count if count else 0.0)

    def _generates(self, request: SequenceInfo) -> float:
        if self._profile is None:
            return float(request.expected_tokens)
        known = self._generated.get(request.task)
        if known is None:
            known = self._profile.expected_tokens(request.task)
            if len(self._generated) < _MOST_TASKS:
                self._generated[request.task] = known
        return known


@dataclass(frozen=True, eq=False)
class Outlook:
    """A policy's state at one moment. It no longer changes, so other threads may read it.

    ``weights``: tokens of the requests that are here, by task; ``one_more``: of one more request. ``wanted[N]``:
    experts of the target, resident or on their way. ``places[classes]``: of the device.
    """

    weights: Mapping[str, float]
    one_more: Mapping[str, float]
    shares: Mapping[str, Shares]
    here: Mask
    wanted: Mask
    popularity: Shares
    places: Counts

    def loads(self, allocation: Allocation) -> dict[str, int]:
        """By task: how many experts another request of it would bring to the device."""
        return {task: self._loaded_for(task, allocation) for task in self.one_more}

    def _loaded_for(self, task: str, allocation: Allocation) -> int:
        weights = {**self.weights, task: self.weights.get(task, 0.0) + self.one_more[task]}
        tokens = expected_tokens(weights, self.shares)
        chosen = allocation.choose(tokens, self.places, here=self.here, popularity=self.popularity)
        return int(np.count_nonzero(chosen & ~self.here & ~self.wanted))
