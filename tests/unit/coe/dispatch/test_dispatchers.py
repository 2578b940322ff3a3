"""Every dispatcher on a virtual clock: each request runs all its stages once, in order, and none waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.coe.dispatch.base import Dispatcher, ExpertMemory, Run
from greenroom.coe.dispatch.early_binding import EarlyBinding, Executor
from greenroom.coe.dispatch.late_binding import LateBinding
from greenroom.coe.simulation.simulate import Served, Way, simulate
from greenroom.coe.simulation.simulated_memory import SimulatedLink, SimulatedMemory
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.coserve.scheduling import CoServePlacement
from greenroom.policies.placement.placement_policy import Costs, PendingRequest, Shed
from greenroom.policies.registry import create_policy
from tests.examples import examples

SIZES = [40, 10, 25, 25, 5, 60, 10, 30]
MOST = {expert: 1 + expert % 4 for expert in range(len(SIZES))}
LOAD_MS, REQUEST_MS, BATCH_MS = 1.0, 3.0, 5.0  # a byte, a request, a batch
KINDS = ("coserve", "coserve, not ahead", "coserve, literal", "one memory", "as they come", "pull")
every_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Watched(Dispatcher):
    """Holds what a dispatcher answers against what it was told."""

    inner: Dispatcher
    memories: list[SimulatedMemory]
    running: dict[str, Run] = field(default_factory=dict)
    waits: set[tuple[str, int]] = field(default_factory=set)
    ran: list[tuple[str, int, int | None]] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return self.inner.waiting

    def arrived(self, requests: Sequence[PendingRequest], now_ms: float) -> tuple[Shed, ...]:
        self.waits |= {(request.request_id, request.stage) for request in requests}
        return self.inner.arrived(requests, now_ms)

    def finished(self, executor: str, now_ms: float) -> None:
        del self.running[executor]
        self.inner.finished(executor, now_ms)

    def cancel(self, request: PendingRequest) -> bool:
        return self.inner.cancel(request)

    def failed(self, memory: ExpertMemory, expert: int) -> tuple[PendingRequest, ...]:
        return self.inner.failed(memory, expert)

    def next_runs(self, now_ms: float) -> list[Run]:
        runs = self.inner.next_runs(now_ms)
        for run in runs:
            assert run.executor not in self.running, "an executor computes one batch at a time"
            assert 1 <= len(run.requests) <= MOST[run.expert]
            assert any(memory.has(run.expert) for memory in self.memories)
            self.running[run.executor] = run
            for request in run.requests:
                assert request.expert == run.expert
                self.waits.remove((request.request_id, request.stage))  # once, and only what had come
                self.ran.append((request.request_id, request.stage, request.expert))
        assert self.inner.waiting == len(self.waits)
        return runs


def served(kind: str, ways: Sequence[Way], executors: int = 2, share: float = 0.6) -> tuple[Served, Watched]:
    link = SimulatedLink(lambda expert: LOAD_MS * SIZES[expert])
    watched = dispatcher_of(kind, link, executors, share)
    found = simulate(watched, watched.memories, link, lambda _, requests: BATCH_MS + REQUEST_MS * requests, ways)
    return found, watched


def dispatcher_of(kind: str, link: SimulatedLink | None = None, executors: int = 2, share: float = 0.6) -> Watched:
    link = link or SimulatedLink(lambda expert: 1.0)
    catalogue = Catalogue.of_models("board", SIZES)
    usage = np.linspace(0.9, 0.1, len(SIZES))
    dependencies = Dependencies(usage, tuple(map(frozenset, [[], [], [0], [0, 1], [2], [2, 3], [], [6]])))

    def memory(nbytes: int) -> SimulatedMemory:
        chosen: dict[str, tuple[str, dict[str, Any]]] = {
            "coserve": ("coserve", {"dependencies": dependencies}),
            "coserve, not ahead": ("coserve", {"dependencies": dependencies}),
            "coserve, literal": ("coserve", {"dependencies": dependencies, "literal": True}),
            "pull": ("pull", {"dependencies": dependencies}),
        }
        policy, options = chosen.get(kind, ("lru", {}))
        made = create_policy(policy, catalogue=catalogue, options=options)
        return SimulatedMemory(made, max(nbytes, max(SIZES)), link)

    names, whole = [f"e{number}" for number in range(executors)], int(share * sum(SIZES))
    costs = Costs(token_ms=REQUEST_MS, batch_ms=BATCH_MS, load_ms_by_expert=dict(enumerate(map(float, SIZES))))
    if kind == "pull":
        memories = [memory(max(whole, executors * max(SIZES)))]
        dispatcher: Dispatcher = LateBinding(memories[0], names, MOST, age_ms=200.0)
    else:
        shared = kind == "one memory"
        memories = [memory(max(whole, executors * max(SIZES)))] if shared else [
            memory(whole // executors) for _ in names
        ]  # fmt: skip
        sorts = kind != "as they come"
        dispatcher = EarlyBinding(
            CoServePlacement(assigning=sorts, arranging=sorts),
            [Executor(name, memories[0 if shared else at], costs, MOST) for at, name in enumerate(names)],
            ahead=kind != "coserve, not ahead",
        )
    return Watched(dispatcher, memories)


paths = st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=3, unique=True).map(tuple)
loads_of_requests = st.lists(st.builds(Way, st.integers(0, 300).map(float), paths), min_size=1, max_size=30)


@every_kind
@settings(max_examples=examples(60), deadline=None)
@given(ways=loads_of_requests, executors=st.integers(1, 3))
def test_each_request_runs_all_its_stages_once_and_in_order(kind: str, ways: list[Way], executors: int) -> None:
    found, watched = served(kind, ways, executors)
    by_request: dict[str, list[tuple[int, int | None]]] = {}
    for name, stage, expert in watched.ran:
        by_request.setdefault(name, []).append((stage, expert))
    assert by_request == {str(number): list(enumerate(way.experts)) for number, way in enumerate(ways)}
    assert watched.waiting == 0
    assert not watched.running
    assert min(found.latencies_ms) >= BATCH_MS + REQUEST_MS


@every_kind
@settings(max_examples=examples(30), deadline=None)
@given(ways=loads_of_requests)
def test_equal_requests_are_served_equally(kind: str, ways: list[Way]) -> None:
    assert served(kind, ways)[0] == served(kind, ways)[0]


def test_an_expert_is_brought_while_another_computes() -> None:
    ways = [Way(0.0, (4,))] * 8 + [Way(0.0, (0,))]
    found, _ = served("coserve", ways, executors=1)
    # 5 to load expert 4, then 8 batches of one, under which expert 0's 40 are hidden
    assert found.total_ms == 5 + 8 * 8 + 8


def test_without_looking_ahead_an_expert_is_brought_when_its_turn_has_come() -> None:
    ways = [Way(0.0, (4,))] * 8 + [Way(0.0, (0,))]
    found, _ = served("coserve, not ahead", ways, executors=1)
    assert found.total_ms == 5 + 8 * 8 + 40 + 8


@every_kind
def test_loads_are_counted_by_memory(kind: str) -> None:
    found, watched = served(kind, [Way(0.0, (expert,)) for expert in range(len(SIZES))] * 3)
    assert len(found.loads_by_memory) == len(watched.memories)
    assert 0 < sum(found.loads_by_memory) <= found.loads


def test_a_dispatcher_is_asked_again_when_it_wants_to_be() -> None:
    class Later(Watched):
        """Tells of what has come 50 ms later."""

        told: list[PendingRequest] = []  # noqa: RUF012

        @property
        def asks_ms(self) -> float | None:
            return self.told[0].arrived_ms + 50.0 if self.told else None

        def arrived(self, requests: Sequence[PendingRequest], now_ms: float) -> tuple[Shed, ...]:
            self.told.extend(requests)
            return ()

        def next_runs(self, now_ms: float) -> list[Run]:
            if self.asks_ms is not None and self.asks_ms <= now_ms:
                super().arrived(list(self.told), now_ms)
                self.told.clear()
            return super().next_runs(now_ms)

    link = SimulatedLink(lambda expert: 1.0)
    inner = dispatcher_of("pull", link, executors=1)
    inner.memories[0].fill([0])
    later = Later(inner.inner, inner.memories)
    found = simulate(later, later.memories, link, lambda _, requests: 8.0, [Way(3.0, (0,))])
    assert found.total_ms == 3 + 50 + 8


def test_under_pull_a_group_that_has_waited_long_gets_its_place() -> None:
    """Requests for resident experts come so fast that they alone would fill the executor, and always wait."""
    rush = [Way(float(at), (at % 2,)) for at in range(0, 3000, 4)]
    rare = Way(10.0, (5,))
    found, _ = served("pull", [rare, *rush], executors=1, share=0.0)  # room for the largest expert alone
    assert found.latencies_ms[0] < 2000.0


@pytest.mark.parametrize("executors", [1, 2])
def test_under_pull_groups_that_have_all_waited_long_do_not_take_each_others_place(
    executors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than ``age_ms`` of work lies there for each executor, with room for few experts."""
    begin, ways = SimulatedLink.begin, [Way(float(at), (at * 5 % len(SIZES),)) for at in range(120)]

    def counting(link: SimulatedLink, *about: Any) -> None:
        assert link.loads < len(ways), "each load is for a batch"
        begin(link, *about)

    monkeypatch.setattr(SimulatedLink, "begin", counting)
    found, watched = served("pull", ways, executors, share=0.0)
    assert max(found.latencies_ms) > 200.0, "so they have waited long"
    assert watched.waiting == 0


def test_under_pull_nobody_waited_for_leaves_for_what_has_just_come() -> None:
    ways = [Way(0.0, (5,)), Way(61.0, (0,)), *[Way(61.0, (5,))] * 3]
    found, _ = served("pull", ways, executors=1, share=0.0)
    assert found.loads == 2
    assert found.latencies_ms[1] > max(found.latencies_ms[2:])


def test_in_one_memory_an_executor_begins_before_the_others_next_expert_takes_the_place() -> None:
    """Room for what two executors compute and for no more, and loads that take a hundredth of computing."""
    catalogue, link = Catalogue.of_models("board", [1] * 6), SimulatedLink(lambda _: 1.0)
    memory = SimulatedMemory(create_policy("lru", catalogue=catalogue), 2, link)
    costs = Costs(batch_ms=100.0, load_ms_by_expert=dict.fromkeys(range(6), 1.0))
    alone = dict.fromkeys(range(6), 1)
    dispatcher = EarlyBinding(CoServePlacement(), [Executor(name, memory, costs, alone) for name in ("a", "b")])
    found = simulate(dispatcher, [memory], link, lambda *_: 100.0, [Way(0.0, (at % 6,)) for at in range(12)])
    assert found.total_ms < 1.1 * 12 * 100 / 2, "both compute all the time"
    assert found.loads <= 12


@pytest.mark.parametrize(("sizes", "room"), [([1, 1, 1, 1, 2], 2), ([1, 1, 1, 1, 3], 3), ([1, 1, 1, 1, 1], 1)])
@pytest.mark.parametrize("sorts", [True, False])
def test_in_one_memory_no_executor_keeps_another_from_beginning(sizes: list[int], room: int, sorts: bool) -> None:
    """One executor always has something to compute, in the place that the other's expert needs."""
    link = SimulatedLink(lambda expert: float(sizes[expert]))
    memory = SimulatedMemory(create_policy("lru", catalogue=Catalogue.of_models("board", sizes)), room, link)
    costs = Costs(token_ms=1.0, batch_ms=10.0, load_ms_by_expert=dict(enumerate(map(float, sizes))))
    most = dict.fromkeys(range(len(sizes)), 4)
    dispatcher = EarlyBinding(
        CoServePlacement(assigning=sorts, arranging=sorts),
        [Executor(name, memory, costs, most) for name in ("a", "b")],
        age_ms=200.0,
    )
    rush = [Way(float(at), (number % 4,)) for number, at in enumerate(range(0, 3000, 6))]
    found = simulate(dispatcher, [memory], link, lambda _, requests: 10.0 + requests, [Way(10.0, (4,)), *rush])
    assert found.latencies_ms[0] < 500.0


def test_without_assigning_requests_that_run_count_as_those_that_wait() -> None:
    catalogue = Catalogue.of_models("board", SIZES)
    memory = SimulatedMemory(create_policy("lru", catalogue=catalogue), 100, SimulatedLink(lambda _: 1.0))
    memory.fill([3])
    first, second = executors = [Executor(name, memory, Costs(), MOST) for name in ("a", "b")]
    dispatcher = EarlyBinding(CoServePlacement(assigning=False), executors)
    for number, executor in enumerate([*[first] * 4, second]):
        request = PendingRequest(str(number), 0.0, 1, 1, 1, 9.0, expert=3)
        executor.queue.insert(request, None)
        memory.waits(request)
    assert [len(run.requests) for run in dispatcher.next_runs(0.0)] == [4, 1]
    for name in ("x", "y"):
        dispatcher.arrived([PendingRequest(name, 1.0, 1, 1, 1, 9.0, expert=3)], 1.0)
    assert [len(executor.queue) for executor in executors] == [0, 2]


def test_what_comes_too_late_is_shed_and_forgotten() -> None:
    catalogue = Catalogue.of_models("board", SIZES)
    memory = SimulatedMemory(create_policy("coserve", catalogue=catalogue), 100, SimulatedLink(lambda _: 1.0))
    dispatcher = EarlyBinding(CoServePlacement(), [Executor("e", memory, Costs(), MOST)])
    until = (("l", 5.0), ("e", 9.0))
    late, early = (PendingRequest(name, 0.0, 1, 1, 1, deadline, expert=0) for name, deadline in until)
    assert dispatcher.arrived([late, early], 5.0) == (Shed("l", "expired"),)
    assert dispatcher.waiting == 1


def test_a_memory_that_can_never_hold_it_is_a_defect_that_is_said() -> None:
    catalogue = Catalogue.of_models("board", SIZES)
    link = SimulatedLink(lambda expert: 1.0)
    memory = SimulatedMemory(create_policy("lru", catalogue=catalogue), 20, link)
    with pytest.raises(RuntimeError, match="1 requests wait"):
        simulate(LateBinding(memory, ["e"], MOST), [memory], link, lambda *_: 1.0, [Way(0.0, (5,))])


@every_kind
def test_what_is_cancelled_or_lost_is_gone(kind: str) -> None:
    """It runs nowhere, its memory no longer counts it, and the rest is served."""
    watched = dispatcher_of(kind)
    asked = [PendingRequest(str(number), 0.0, 1, 1, 1, 1e9, expert=number % 3) for number in range(9)]
    watched.arrived(asked, 0.0)
    assert watched.waiting == 9
    assert watched.cancel(asked[0])
    assert not watched.cancel(asked[0])
    lost = [one for memory in watched.memories for one in watched.failed(memory, 1)]
    assert {one.request_id for one in lost} == {"1", "4", "7"}
    assert watched.inner.waiting == 5
    assert sum(len(memory._waiting) for memory in watched.memories) == 5
    for memory in watched.memories:
        memory.audit()
    assert not watched.cancel(asked[1])


@every_kind
@settings(max_examples=examples(60), deadline=None)
@given(
    experts=st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=25),
    cancelled=st.lists(st.integers(0, 24), max_size=25),
)
def test_cancels_change_nobody_elses_order(kind: str, experts: list[int], cancelled: list[int]) -> None:
    """Those that stay run once, and of one executor and expert in the order of their arrival."""
    link = SimulatedLink(lambda expert: 1.0)
    watched = dispatcher_of(kind, link)
    asked = [PendingRequest(str(at), float(at), 1, 1, 1, 1e9, expert=expert) for at, expert in enumerate(experts)]
    for request in asked:
        watched.arrived([request], request.arrived_ms)
    gone = {at for at in cancelled if at < len(asked)}
    for at in cancelled:
        if at in gone and (asked[at].request_id, 0) in watched.waits:
            assert watched.cancel(asked[at])
            watched.waits.remove((asked[at].request_id, 0))
        else:
            assert at >= len(asked) or not watched.cancel(asked[at])
    now_ms, ran = 0.0, dict[tuple[str, int], list[int]]()
    while watched.waiting:
        for run in watched.next_runs(now_ms):
            ran.setdefault((run.executor, run.expert), []).extend(int(one.request_id) for one in run.requests)
        for executor in list(watched.running):
            watched.finished(executor, now_ms)
        now_ms = max(now_ms, link.next_ms or 0.0)
        link.deliver(now_ms)
    assert sorted(at for own in ran.values() for at in own) == sorted(set(range(len(asked))) - gone)
    assert all(own == sorted(own) for own in ran.values())
