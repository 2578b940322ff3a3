"""Which waiting requests a worker may be given: the test of eMoE's Algorithm 1, for all of them at once.

A request that joins delays every request on the worker by the same loading and reading. By its generated tokens it
delays those with no more left than it by one amount, and the others by another. The slack of the requests there is
sorted by what they have left, with the least slack from each end on. So the test of a waiting request is two look-ups.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Mask
from greenroom.policies.placement.latency_estimate import Figures, LatencyEstimator, OnWorker, newly_placed, on_worker
from greenroom.policies.placement.placement_policy import (
    COLUMNS,
    PendingRequest,
    Placement,
    PlacementState,
    Shed,
    WorkerView,
)

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rules:
    """``from_arrival``: an SLO covers the wait in the queue too. ``sums_up``: loads and prompts of placed requests that
    have not begun count. ``heeds_lost``: requests that miss their SLO anyway keep others out too. ``margin``: factor on
    all estimates. ``late_share``: a request that would miss its own SLO is admitted only where less than this share
    of the places is taken."""

    estimator: LatencyEstimator
    from_arrival: bool = True
    sums_up: bool = True
    heeds_lost: bool = False
    margin: float = 1.0
    late_share: float = 1.0


class Queue:
    """The waiting requests' figures, an array each, ascending by expected tokens (look-ups in order are several times
    as fast). ``rank``: each one's place in order of arrival; ``by_arrival``: the inverse. ``task``: an index into
    ``tasks``, those with known loads; all other tasks share one index."""

    def __init__(
        self, requests: Sequence[PendingRequest], columns: Mapping[str, Figures], tasks: Collection[str], now_ms: float
    ) -> None:
        self.rank = np.argsort(columns["expected_tokens"], kind="stable")
        self.by_arrival = np.argsort(self.rank)
        ordered = {name: column[self.rank] for name, column in columns.items()}
        self.arrived = ordered["arrived_ms"]
        self.waited = np.maximum(0.0, now_ms - self.arrived)
        self.input = ordered["input_tokens"]
        self.kv_need, self.kv_most = ordered["kv_need"], ordered["kv_most"]
        self.left = ordered["expected_tokens"]
        self.slo_ttft = ordered["slo_ttft_ms"]
        self.slo_e2e = ordered["slo_e2e_ms"]
        self.demanding = np.isfinite(self.slo_ttft) | np.isfinite(self.slo_e2e)
        self.priority = ordered["priority"]
        self.tasks = tuple(sorted(tasks))
        self.task = _numbers(requests, self.tasks)[self.rank]
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def request(self, index: int) -> PendingRequest:
        return self._requests[int(self.rank[index])]


def _numbers(requests: Sequence[PendingRequest], tasks: Sequence[str]) -> Indices:
    if not tasks:
        return np.zeros(len(requests), dtype=np.int64)
    numbers = {task: number for number, task in enumerate(tasks)}
    other = len(tasks)
    return np.array([numbers.get(request.task, other) for request in requests], dtype=np.int64)


def sort_out(state: PlacementState, now_ms: float) -> tuple[Queue, tuple[Shed, ...]]:
    """The queue, and the requests that are given up: expired, or larger than every worker's memory."""
    packed = b"".join([request.packed for request in state.pending])
    table = np.frombuffer(packed, dtype=np.float64).reshape(-1, len(COLUMNS))
    columns = dict(zip(COLUMNS, np.ascontiguousarray(table.T), strict=True))
    tasks = {task for view in state.workers for task in view.costs.load_ms_by_task}
    largest = max((view.kv_total for view in state.workers), default=math.inf)
    expired = columns["deadline_ms"] <= now_ms
    given_up = expired | (columns["kv_most"] > largest) | (columns["input_tokens"] > largest)
    if not given_up.any():
        return Queue(state.pending, columns, tasks, now_ms), ()
    shed = tuple(
        Shed(state.pending[index].request_id, "expired" if expired[index] else "unservable")
        for index in np.flatnonzero(given_up).tolist()
    )
    stay = np.flatnonzero(~given_up)
    staying = {name: column[stay] for name, column in columns.items()}
    return Queue([state.pending[index] for index in stay.tolist()], staying, tasks, now_ms), shed


class Site:
    """One worker while a decision is made: its requests, and what they mean for each waiting request."""

    def __init__(self, view: WorkerView, queue: Queue, rules: Rules, now_ms: float) -> None:
        self.view = view
        self._queue = queue
        self._rules = rules
        self._now_ms = now_ms
        self._there = on_worker(view, now_ms)
        self._figures = [self._figures_of(other) for other in self._there]
        self._held = sum(other.held for other in self._there)
        self._unread = sum(other.unread for other in self._there)
        self._generating = sum(not other.unread for other in self._there)
        self._kv_free = view.kv_free
        known = view.costs.load_ms_by_task
        self._load_ms = np.array([*(known.get(task, 0.0) for task in queue.tasks), 0.0]) * rules.margin
        self._coming_ms = 0.0

    def _figures_of(self, other: OnWorker) -> tuple[float, float, float]:
        """The tokens it has left, the time that counts already, and its end-to-end SLO."""
        spent = max(0.0, self._now_ms - other.request.arrived_ms) if self._rules.from_arrival else other.ran_ms
        slo = other.request.slo_e2e_ms
        return float(other.left), spent, math.inf if slo is None or math.isnan(slo) else slo

    @property
    def requests(self) -> int:
        return len(self._there)

    @property
    def room(self) -> int:
        return self.view.max_running - len(self._there)

    @property
    def alone_ms(self) -> Figures:
        """Until the first token of each waiting request, were it alone here."""
        alone: Figures = self._loads() + self.view.costs.reading_ms(self._queue.input, 1, 0) * self._rules.margin
        return alone

    def generated_ms(self, rows: int) -> float:
        return self.view.costs.generated_ms(rows) * self._rules.margin

    def _read_ms(self, tokens: int, rows: int) -> float:
        return self.view.costs.read_all_ms(tokens, rows, self._generating) * self._rules.margin

    @property
    def takes_late(self) -> bool:
        """Whether a request that would miss its own SLO may be placed here."""
        return len(self._there) < max(1.0, self._rules.late_share * self.view.max_running)

    def load_ms(self, index: int) -> float:
        """ΔE; 0 for a task whose experts are already loaded for a request placed in this decision."""
        return float(self._load_ms[self._queue.task[index]])

    def fits(self, index: int) -> bool:
        return self.room > 0 and bool(self._fitting()[index])

    def could_hold(self, index: int) -> bool:
        """Whether it would fit if the worker were empty."""
        needed = max(self._queue.kv_most[index], self._queue.input[index])
        return self.view.max_running > 0 and bool(needed <= self.view.kv_total)

    def is_turn_of(self, index: int, patience_ms: float) -> bool:
        """Whether no request here arrived before it and was placed only after waiting for that long."""
        arrived = self._queue.arrived[index]
        return not any(
            other.request.arrived_ms <= arrived
            and self._now_ms - other.ran_ms - other.request.arrived_ms >= patience_ms
            for other in self._there
        )

    def take(self, index: int) -> None:
        request = self._queue.request(index)
        placed = newly_placed(request)
        self._there.append(placed)
        self._figures.append(self._figures_of(placed))
        self._held += placed.held
        self._unread += placed.unread
        self._kv_free -= request.kv_need
        if self._rules.sums_up:
            self._coming_ms += self.load_ms(index)
            self._load_ms[self._queue.task[index]] = 0.0

    def admits(self) -> tuple[Mask, Mask]:
        """For each waiting request: whether it may be placed here, and whether it would then meet its own SLOs."""
        queue = self._queue
        if self.room <= 0:
            none = np.zeros(len(queue), dtype=bool)
            return none, none
        estimator, rows = self._rules.estimator, len(self._there) + 1
        token_ms = self.generated_ms(rows)
        figures = np.array(self._figures).reshape(-1, 3)
        left, spent, limit = figures[np.argsort(figures[:, 0])].T
        tokens = estimator.among(left)
        before = limit - spent - self._begun_ms(rows - 1) - tokens * self.generated_ms(rows - 1)
        slack = limit - spent - self._begun_ms(rows) - tokens * token_ms
        heeded = np.isfinite(limit) & (self._rules.heeds_lost | (before >= 0))
        of, slack = left[heeded], slack[heeded]
        least = np.minimum.accumulate(slack - of * token_ms if estimator.slows_shorter else slack)
        least_shorter = np.concatenate(([math.inf], least))
        least_longer = np.concatenate((np.minimum.accumulate(slack[::-1])[::-1], [math.inf]))
        added = self._loads() + self._added_reading_ms(rows)
        more = added + queue.left * token_ms if estimator.slows_longer else added
        shorter = np.searchsorted(of, queue.left, "right")
        spares = (added <= least_shorter[shorter]) & (more <= least_longer[shorter])

        begun = queue.waited + self._begun_ms(rows) + added
        done = begun + estimator.behind(left, queue.left) * token_ms
        return self._fitting() & spares, (begun <= queue.slo_ttft) & (done <= queue.slo_e2e)

    def _loads(self) -> Figures:
        return self._load_ms[self._queue.task]

    def _fitting(self) -> Mask:
        free = self.view.kv_total - self._held
        fitting: Mask = (self._queue.kv_need <= self._kv_free) & (self._queue.input <= free)
        return fitting & (self._queue.kv_most <= self.view.kv_total)

    def _begun_ms(self, rows: int) -> float:
        """Until every request here has begun to generate."""
        if not self._rules.sums_up:
            return 0.0
        return self._coming_ms + self._read_ms(self._unread, rows)

    def _added_reading_ms(self, rows: int) -> Figures:
        """Reading each waiting request's prompt beside those that are read already."""
        unread = self._unread if self._rules.sums_up else 0
        costs, margin = self.view.costs, self._rules.margin
        together: Figures = costs.reading_ms(self._queue.input + unread, rows, self._generating) * margin
        return together - self._read_ms(unread, rows)


class Round:
    """One decision in the making."""

    def __init__(self, queue: Queue, sites: Sequence[Site]) -> None:
        self.queue = queue
        self.sites = sites
        self.place: list[Placement] = []
        self._placed = np.zeros(len(queue), dtype=bool)

    def put(self, index: int, able: Sequence[Site]) -> Site:
        """Place it on the site with the least ΔE; ties: the fewest requests, then the name."""
        site = min(able, key=lambda site: (site.load_ms(index), site.requests, site.view.worker))
        site.take(index)
        self._placed[index] = True
        self.place.append(Placement(self.queue.request(index).request_id, site.view.worker))
        return site

    def place_in_order(self, order: Indices, late: Mask, sites: Sequence[Site]) -> None:
        """Look once at each request of ``order``: a site that admits it takes it. Unless ``late``, it has to meet its
        own SLOs there."""
        verdicts = {site.view.worker: _verdict(site, self.queue, order, late) for site in sites}
        at = 0
        while verdicts and at < len(order):
            ahead = np.logical_or.reduce([verdict[at:] for verdict in verdicts.values()]) & ~self._placed[order[at:]]
            step = int(ahead.argmax())
            if not ahead[step]:
                return
            at += step
            able = [site for site in sites if verdicts[site.view.worker][at]]
            site = self.put(int(order[at]), able)
            verdicts[site.view.worker] = _verdict(site, self.queue, order, late)
            at += 1


def _verdict(site: Site, queue: Queue, order: Indices, late: Mask) -> Mask:
    may, meets = site.admits()
    return may[order] & (meets[order] | (late if site.takes_late else late & ~queue.demanding[order]))
