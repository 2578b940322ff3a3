"""How long requests will take on a worker: eMoE, section 3.5, Eq. 3, and a second estimator beside it.

Estimates count in tokens that the worker generates; one takes the worker's c. docs/architecture/scheduling.md has the
formulas.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.placement.placement_policy import PendingRequest, WorkerView

Figures = NDArray[np.float64]
RESET_SHARE = 0.05


def expected_left(first: int, generated: int, most: int | None = None) -> int:
    """eMoE's G: ``first`` tokens less those that were generated. Where it reaches 0 and the request goes on, it starts
    again at 5 % of ``first``. At least 1, and at most ``most``: what the request may still generate."""
    first, generated = max(1, first), max(0, generated)
    if generated < first:
        left = first - generated
    else:
        again = max(1, math.ceil(first * RESET_SHARE))
        left = again - (generated - first) % again
    return left if most is None else max(1, min(left, most))


class LatencyEstimator(ABC):
    """Tokens that a worker generates until a request is done. ``left``: what its requests have left, ascending."""

    @abstractmethod
    def among(self, left: Figures) -> Figures:
        """Until each of the requests on the worker is done."""

    @abstractmethod
    def behind(self, left: Figures, new: Figures) -> Figures:
        """Until one more request is done that has ``new[i]`` to generate, for each i by itself."""

    @property
    @abstractmethod
    def slows_shorter(self) -> bool:
        """Whether a new request delays requests with no more left than it, each by all that it has left."""

    @property
    @abstractmethod
    def slows_longer(self) -> bool:
        """Whether a new request delays requests with more left than it, each by all that the new one generates."""


class Eq3(LatencyEstimator):
    """n · G: the n requests that finish no earlier, the request itself among them, each generate G tokens meanwhile.

    It leaves out what earlier finishers generate, so it is too short where lengths differ.
    """

    slows_shorter = True
    slows_longer = False

    def among(self, left: Figures) -> Figures:
        return (len(left) - np.searchsorted(left, left, "left")) * left

    def behind(self, left: Figures, new: Figures) -> Figures:
        return (1 + len(left) - np.searchsorted(left, new, "left")) * new


class ProcessorSharing(LatencyEstimator):
    """Σ min(G of each, G): every request generates a token a step until it is done."""

    slows_shorter = True
    slows_longer = True

    def among(self, left: Figures) -> Figures:
        return self._shared(left, left)

    def behind(self, left: Figures, new: Figures) -> Figures:
        return self._shared(left, new) + new

    def _shared(self, left: Figures, until: Figures) -> Figures:
        shorter = np.searchsorted(left, until, "left")
        total = np.concatenate(([0.0], np.cumsum(left)))
        return total[shorter] + (len(left) - shorter) * until


class Printed(LatencyEstimator):
    """Eq. 3 to the letter: n counts the running requests that finish later, not the request itself nor the new one."""

    slows_shorter = False
    slows_longer = False

    def among(self, left: Figures) -> Figures:
        return (len(left) - np.searchsorted(left, left, "right")) * left

    def behind(self, left: Figures, new: Figures) -> Figures:
        return (len(left) - np.searchsorted(left, new, "right")) * new


ESTIMATORS: dict[str, LatencyEstimator] = {"eq3": Eq3(), "processor-sharing": ProcessorSharing()}
"""The estimators that can be chosen, by name."""


@dataclass(frozen=True, slots=True)
class OnWorker:
    """One request that was placed on a worker, running or not.

    ``left``: tokens that it is still expected to generate. ``held``: tokens of its context. ``unread``: its input
    tokens, as long as it has generated nothing. ``ran_ms``: time since it was placed.
    """

    request: PendingRequest
    left: int
    held: int
    unread: int
    ran_ms: float


def on_worker(view: WorkerView, now_ms: float) -> list[OnWorker]:
    """The requests placed there. Those in the worker's own queue have not begun."""
    running = [
        OnWorker(
            placed.request,
            placed.expected_left,
            placed.request.input_tokens + placed.generated_tokens,
            0 if placed.generated_tokens else placed.request.input_tokens,
            now_ms - placed.started_ms,
        )
        for placed in view.running
    ]
    return running + [newly_placed(request) for request in view.queued]


def newly_placed(request: PendingRequest) -> OnWorker:
    return OnWorker(request, request.expected_tokens, request.input_tokens, request.input_tokens, 0.0)


def load_ms_of(view: WorkerView, task: str) -> float:
    """ΔE of one more request of the task; 0 for an unknown task."""
    return view.costs.load_ms_by_task.get(task, 0.0)


def latency_ms(
    estimator: LatencyEstimator,
    view: WorkerView,
    joined: Sequence[PendingRequest],
    request: PendingRequest,
    now_ms: float,
) -> float:
    """From the arrival of ``request`` to its end, if it goes to the worker now, together with ``joined``."""
    there = on_worker(view, now_ms) + [newly_placed(other) for other in joined]
    rows = len(there) + 1
    left = np.sort(np.array([other.left for other in there], dtype=np.float64))
    tokens = float(estimator.behind(left, np.array([float(request.expected_tokens)]))[0])
    unread = sum(other.unread for other in there) + request.input_tokens
    generating = sum(not other.unread for other in there)
    reading = view.costs.read_all_ms(unread, rows, generating)
    loads = sum_of_loads(view, [*joined, request])
    waited = max(0.0, now_ms - request.arrived_ms)
    return waited + loads + reading + tokens * view.costs.generated_ms(rows)


def sum_of_loads(view: WorkerView, requests: Iterable[PendingRequest]) -> float:
    """ΔE of requests that come together. A task's experts are loaded once, however many requests it has."""
    return sum(load_ms_of(view, task) for task in sorted({request.task for request in requests}))
