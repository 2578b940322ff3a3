"""One suite for all placement policies: random queues and workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.policies.placement.placement_policy import (
    Costs,
    PendingRequest,
    PlacedRequest,
    PlacementPolicy,
    PlacementState,
    WorkerView,
)
from greenroom.policies.registry import (
    EXECUTOR_POLICIES,
    PLACEMENT_POLICIES,
    create_executor_policy,
    create_placement_policy,
)
from tests.examples import examples

TASKS = ["unknown", "classify", "never heard of"]
VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in sorted([*PLACEMENT_POLICIES, *EXECUTOR_POLICIES])),
    ("coserve", {"arranging": False}),
    ("coserve", {"assigning": False}),
    ("emoe", {"estimator": "processor-sharing"}),
    ("emoe", {"patience_s": 0.5}),
    ("emoe", {"patience_s": None}),
]
NAMES = [" ".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in VARIANTS]
every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=NAMES)
slos = st.none() | st.floats(-1e6, 1e9, allow_nan=False)
costs = st.builds(
    Costs,
    token_ms=st.floats(0, 1e3),
    load_ms_by_task=st.dictionaries(st.sampled_from(TASKS), st.floats(0, 1e6)),
    token_ms_by_rows=st.lists(st.floats(0, 1e3), max_size=3).map(tuple),
    prefill_token_ms=st.none() | st.floats(0, 1e3),
    batch_ms=st.floats(0, 1e3),
    load_ms_by_expert=st.dictionaries(st.integers(0, 4), st.floats(0, 1e6)),
    request_ms_by_expert=st.dictionaries(st.integers(0, 4), st.floats(0, 1e3)),
    batch_ms_by_expert=st.dictionaries(st.integers(0, 4), st.floats(0, 1e3)),
)


@st.composite
def requests(draw: st.DrawFn, name: str) -> PendingRequest:
    inputs, need, most = draw(st.integers(1, 10**6)), draw(st.integers(1, 120)), None
    if draw(st.booleans()):  # expected to need less than it may
        inputs, most = draw(st.integers(1, 60)), draw(st.integers(1, 90))
        need = draw(st.integers(inputs, inputs + most - 1))
    return PendingRequest(
        name,
        arrived_ms=draw(st.floats(0, 1000)),
        input_tokens=inputs,
        kv_need=need,
        most_tokens=most,
        expected_tokens=draw(st.integers(0, 10**6)),
        deadline_ms=draw(st.floats(0, 2000)),
        task=draw(st.sampled_from(TASKS)),
        slo_ttft_ms=draw(slos),
        slo_e2e_ms=draw(slos),
        priority=draw(st.integers(-3, 3)),
        expert=draw(st.none() | st.integers(0, 4)),
    )


@st.composite
def states(draw: st.DrawFn) -> PlacementState:
    pending = tuple(draw(requests(f"p{n}")) for n in range(draw(st.integers(0, 8))))
    workers = []
    for number in range(draw(st.integers(0, 4))):
        name = f"w{number}"
        running = tuple(
            PlacedRequest(draw(requests(f"{name}r{n}")), draw(st.floats(0, 1000)), n, n)
            for n in range(draw(st.integers(0, 3)))
        )
        workers.append(
            WorkerView(
                name,
                running=running,
                queued=tuple(draw(requests(f"{name}q{n}")) for n in range(draw(st.integers(0, 2)))),
                max_running=draw(st.integers(0, 5)),
                max_queued=draw(st.integers(0, 3)),
                kv_total=100,
                kv_free=draw(st.integers(0, 100)),
                costs=draw(costs),
            )
        )
    return PlacementState(pending, tuple(workers))


def create(name: str, options: dict[str, object]) -> PlacementPolicy:
    return (create_executor_policy if name in EXECUTOR_POLICIES else create_placement_policy)(name, options=options)


@every_variant
@settings(deadline=None, max_examples=examples(60))
@given(state=states(), now_ms=st.floats(0, 2000))
def test_no_worker_gets_more_than_it_has_room_for_and_no_request_two_fates(
    name: str, options: dict[str, object], state: PlacementState, now_ms: float
) -> None:
    decision = create(name, options).decide(state, now_ms)

    assert create(name, options).decide(state, now_ms) == decision
    pending = {request.request_id: request for request in state.pending}
    fates = [placement.request_id for placement in decision.place] + [shed.request_id for shed in decision.shed]
    assert len(set(fates)) == len(fates)
    assert set(fates) <= set(pending)
    shed = {shed.request_id: shed.reason for shed in decision.shed}
    assert {name for name, request in pending.items() if request.deadline_ms <= now_ms} <= set(shed)
    assert all(reason for reason in shed.values())
    for worker in state.workers:
        given_to_it = [
            pending[placement.request_id] for placement in decision.place if placement.worker == worker.worker
        ]
        assert sum(request.kv_need for request in given_to_it) <= worker.kv_free
        assert all(request.kv_most <= worker.kv_total for request in given_to_it)
        room = worker.max_running + worker.max_queued - len(worker.running) - len(worker.queued)
        assert len(given_to_it) <= max(room, 0)
    known = {worker.worker for worker in state.workers}
    assert {placement.worker for placement in decision.place} <= known


@every_variant
@settings(deadline=None, max_examples=examples(60))
@given(state=states())
def test_an_idle_worker_takes_something_that_fits(name: str, options: dict[str, object], state: PlacementState) -> None:
    idle = WorkerView("idle", (), (), max_running=8, max_queued=0, kv_total=120, kv_free=120)
    with_idle = PlacementState(state.pending, (*state.workers, idle))

    decision = create(name, options).decide(with_idle, -1.0)

    largest = max(worker.kv_total for worker in with_idle.workers)
    too_large = {one.request_id for one in state.pending if max(one.kv_most, one.input_tokens) > largest}
    if not name.startswith("emoe"):
        too_large = {one.request_id for one in state.pending if one.kv_most > largest}
    assert {(shed.request_id, shed.reason) for shed in decision.shed} == {(one, "unservable") for one in too_large}
    assert bool(decision.place) == (len(too_large) < len(state.pending))
