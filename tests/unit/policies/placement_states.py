"""Random states for placement policies, and eMoE's decision written out plainly.

All figures are whole numbers, halves or eighths, so that sums are exact in whatever order they are taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from greenroom.core.step_costs import StepCosts
from greenroom.policies.placement.placement_policy import (
    Costs,
    PendingRequest,
    PlacedRequest,
    Placement,
    PlacementState,
    WorkerView,
)

STEPS = StepCosts({1: 4.0, 5: 8.0, 9: 16.0}, {1: 8.0, 33: 40.0, 65: 48.0, 2113: 560.0})
"""With bends, and larger than all prompts of a state together."""
SHARED = StepCosts({1: 4.0, 5: 8.0, 9: 16.0}, {1: 8.0, 33: 40.0, 65: 48.0, 2113: 560.0}, 0.5)
TASKS = ["a", "b", "unknown"]
times = st.integers(0, 4000).map(float)
slos = st.none() | st.integers(-100, 8000).map(float) | st.sampled_from([0.0, 1e15])


@st.composite
def requests(draw: st.DrawFn, name: str) -> PendingRequest:
    inputs = draw(st.integers(1, 60))
    tokens = draw(st.integers(1, 120))
    return PendingRequest(
        name,
        arrived_ms=draw(times),
        input_tokens=inputs,
        kv_need=inputs + tokens,
        expected_tokens=draw(st.integers(1, tokens)),
        deadline_ms=1e9,
        task=draw(st.sampled_from(TASKS)),
        slo_ttft_ms=draw(slos),
        slo_e2e_ms=draw(slos),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        most_tokens=draw(st.none() | st.integers(tokens + 1, 900)),
    )


@st.composite
def workers(draw: st.DrawFn, name: str, now_ms: float) -> WorkerView:
    running = []
    for number in range(draw(st.integers(0, 5))):
        request = draw(requests(f"{name}r{number}"))
        made = draw(st.sampled_from([0, 0, 1, 40]))
        started = draw(st.integers(0, int(now_ms))) if now_ms else 0
        running.append(PlacedRequest(request, float(started), made, draw(st.integers(1, 120))))
    costs = Costs(
        token_ms=draw(st.sampled_from([0.0, 0.125, 2.0])),
        token_ms_by_rows=tuple(draw(st.lists(st.integers(0, 32), max_size=4)) or ()),
        prefill_token_ms=draw(st.none() | st.sampled_from([0.0, 0.5])),
        load_ms_by_task=draw(st.dictionaries(st.sampled_from(TASKS), st.integers(0, 400).map(float))),
        steps=draw(st.sampled_from([None, STEPS, SHARED])),
    )
    used = sum(placed.request.kv_need for placed in running)
    free = draw(st.integers(0, 800))
    return WorkerView(
        name,
        running=tuple(running),
        queued=tuple(draw(requests(f"{name}q{n}")) for n in range(draw(st.integers(0, 1)))),
        max_running=draw(st.integers(0, 8)),
        max_queued=2,
        kv_total=max(180, used + free),
        kv_free=free,
        costs=costs,
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[PlacementState, float]:
    now_ms = draw(times)
    pending = tuple(draw(requests(f"p{n}")) for n in range(draw(st.integers(0, 8))))
    views = tuple(draw(workers(f"w{n}", now_ms)) for n in range(draw(st.integers(0, 3))))
    return PlacementState(pending, views), now_ms


# -- written out


@dataclass
class There:
    request: PendingRequest
    left: int
    held: int
    unread: int
    started_ms: float


@dataclass
class Site:
    view: WorkerView
    there: list[There]
    kv_free: int
    coming: list[str] = field(default_factory=list)

    def load_ms(self, task: str) -> float:
        return 0.0 if task in self.coming else self.view.costs.load_ms_by_task.get(task, 0.0)

    def take(self, request: PendingRequest, now_ms: float) -> None:
        self.there.append(There(request, request.expected_tokens, request.input_tokens, request.input_tokens, now_ms))
        self.kv_free -= request.kv_need
        self.coming.append(request.task)

    def fits(self, request: PendingRequest) -> bool:
        held = sum(other.held for other in self.there)
        return (
            len(self.there) < self.view.max_running
            and request.kv_need <= self.kv_free
            and held + request.input_tokens <= self.view.kv_total
            and request.kv_most <= self.view.kv_total
        )

    def reading(self, there: Sequence[There], rows: int) -> float:
        """All prompts that were not read yet, together, beside those that generate."""
        unread, costs = sum(other.unread for other in there), self.view.costs
        if costs.steps is None:
            return unread * costs.read_ms(rows)
        decoding = sum(not other.unread for other in there)
        alone = costs.steps.step_ms(decoding) if decoding else 0.0
        return costs.steps.step_ms(decoding, unread) - alone if unread else 0.0

    def latencies(self, new: PendingRequest | None, now_ms: float, estimator: str) -> dict[str, float]:
        """From its arrival to its end, of every request there and of ``new``."""
        there = self.there + ([] if new is None else [There(new, new.expected_tokens, 0, new.input_tokens, now_ms)])
        rows = len(there)
        loads = sum(self.view.costs.load_ms_by_task.get(task, 0.0) for task in set(self.coming))
        loads += 0.0 if new is None else self.load_ms(new.task)
        read = self.reading(there, rows)
        result = {}
        for mine in there:
            if estimator == "eq3":
                tokens = sum(other.left >= mine.left for other in there) * mine.left
            else:
                tokens = sum(min(other.left, mine.left) for other in there)
            waited = max(0.0, now_ms - mine.request.arrived_ms)
            result[mine.request.request_id] = waited + loads + read + tokens * self.view.costs.generated_ms(rows)
        return result

    def spoiled_by(self, new: PendingRequest, now_ms: float, estimator: str) -> list[str]:
        """The requests that would meet their SLO without ``new`` and not with it."""
        before = self.latencies(None, now_ms, estimator)
        after = self.latencies(new, now_ms, estimator)
        return [
            other.request.request_id
            for other in self.there
            if other.request.slo_e2e_ms is not None
            and before[other.request.request_id] <= other.request.slo_e2e_ms
            and after[other.request.request_id] > other.request.slo_e2e_ms
        ]

    def in_time(self, new: PendingRequest, now_ms: float, estimator: str) -> bool:
        """Whether ``new`` would meet its own SLOs here."""
        rows, costs = len(self.there) + 1, self.view.costs
        loads = sum(costs.load_ms_by_task.get(task, 0.0) for task in set(self.coming)) + self.load_ms(new.task)
        there = [*self.there, There(new, new.expected_tokens, 0, new.input_tokens, now_ms)]
        first = max(0.0, now_ms - new.arrived_ms) + loads + self.reading(there, rows)
        end = self.latencies(new, now_ms, estimator)[new.request_id]
        return first <= or_never(new.slo_ttft_ms) and end <= or_never(new.slo_e2e_ms)


def or_never(slo: float | None) -> float:
    return math.inf if slo is None else slo


def sites_of(views: Sequence[WorkerView], now_ms: float) -> list[Site]:
    sites = []
    for view in views:
        there = [
            There(
                placed.request,
                placed.expected_left,
                placed.request.input_tokens + placed.generated_tokens,
                0 if placed.generated_tokens else placed.request.input_tokens,
                placed.started_ms,
            )
            for placed in view.running
        ]
        there += [There(r, r.expected_tokens, r.input_tokens, r.input_tokens, now_ms) for r in view.queued]
        sites.append(Site(view, there, view.kv_free))
    return sites


def by_the_book(
    state: PlacementState, now_ms: float, estimator: str, patience_ms: float, late_share: float
) -> list[Placement]:
    """Where docs/architecture/scheduling.md sends what waits. Nothing in ``state`` is past its deadline."""
    largest = max((view.kv_total for view in state.workers), default=0)
    waiting = [r for r in state.pending if r.kv_most <= largest and r.input_tokens <= largest]
    sites = sites_of(state.workers, now_ms)
    placed: list[Placement] = []

    def put(request: PendingRequest, able: list[Site]) -> None:
        site = min(able, key=lambda s: (s.load_ms(request.task), len(s.there), s.view.worker))
        site.take(request, now_ms)
        placed.append(Placement(request.request_id, site.view.worker))
        waiting.remove(request)

    impatient = [r for r in waiting if max(0.0, now_ms - r.arrived_ms) >= patience_ms]
    for position, request in enumerate(impatient[: len(sites)]):
        turn = [
            site
            for site in sites
            if site.view.max_running > 0
            and max(request.kv_most, request.input_tokens) <= site.view.kv_total
            and not any(
                other.request.arrived_ms <= request.arrived_ms
                and other.started_ms - other.request.arrived_ms >= patience_ms
                for other in site.there
            )
        ]
        able = [site for site in turn if site.fits(request)]
        if able:
            put(request, able)
        elif turn and position == 0:
            sites.remove(min(turn, key=lambda s: (-s.view.kv_total, s.view.worker)))
    if not sites:
        return placed

    def slack(request: PendingRequest) -> float:
        ready = min(
            s.load_ms(request.task) + s.reading([There(request, 1, 0, request.input_tokens, now_ms)], 1) for s in sites
        )
        rest = request.expected_tokens * min(s.view.costs.generated_ms(1) for s in sites)
        first_by = min(or_never(request.slo_ttft_ms), or_never(request.slo_e2e_ms) - rest)
        return first_by - max(0.0, now_ms - request.arrived_ms) - ready

    slacks = {request.request_id: slack(request) for request in waiting}  # once, before any is placed by them
    for priority in sorted({request.priority for request in waiting}, reverse=True):
        rank = [request for request in waiting if request.priority == priority]
        for request in sorted(rank, key=lambda r: slacks[r.request_id]):
            if slacks[request.request_id] < math.inf:
                able = [
                    s
                    for s in sites
                    if s.fits(request)
                    and not s.spoiled_by(request, now_ms, estimator)
                    and s.in_time(request, now_ms, estimator)
                ]
                if able:
                    put(request, able)
        for request in [r for r in rank if r in waiting]:
            asks = request.slo_ttft_ms is not None or request.slo_e2e_ms is not None
            able = [
                s
                for s in sites
                if s.fits(request)
                and not s.spoiled_by(request, now_ms, estimator)
                and (
                    not asks
                    or len(s.there) < max(1.0, late_share * s.view.max_running)
                    or s.in_time(request, now_ms, estimator)
                )
            ]
            if able:
                put(request, able)
    return placed
