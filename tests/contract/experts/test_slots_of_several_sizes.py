"""Layers whose records differ in size: memory is cut to them, and no size waits for another."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.errors import BudgetTooSmall
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.layout import PAGE_BYTES
from greenroom.policies.base.array_types import NO_KEYS, Keys
from greenroom.policies.base.events import LayerRouting, Reason, VictimRequest
from greenroom.policies.base.expert_policy import Prefetch
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.replacement.lru import Lru
from tests.contract.experts.engines import EXPERTS, LAYERS, SIZE, TOP_K, make_engine, run_layer
from tests.matrices import matrix
from tests.unit.experts.fakes import FakeStore, GatedReads, manifest

PAGES = [3, 1, 3]
MANIFEST = manifest(LAYERS, EXPERTS, TOP_K, PAGES)
SIZES = SlotSizes(catalogue_of(MANIFEST))
ONE_ROW = np.zeros(1, dtype=np.int64)
SMALL, LARGE = range(EXPERTS, 2 * EXPERTS), [*range(EXPERTS), *range(2 * EXPERTS, SIZE)]


@pytest.mark.parametrize("host_slots", [0, 5])
def test_memory_is_as_large_as_its_records(closing: list[ExpertEngine], host_slots: int) -> None:
    engine, _ = make_engine("lru", SIZE, host_slots, pages=PAGES)
    closing.append(engine)
    arena, host = engine._tiers._device_arena, engine._tiers._host_arena
    assert arena.nbytes == engine.device.nbytes == sum(PAGES) * EXPERTS * PAGE_BYTES
    assert (host is None) == (not host_slots)
    if host is not None:
        assert host.nbytes == SIZES.nbytes(host_slots) == (2 + 3 * 3) * PAGE_BYTES


@matrix(1, host_slots=(0, 4), slots=range(SIZES.least, SIZE + 1))
def test_the_first_fill_fills_every_slot_with_the_first_experts_of_its_size(
    closing: list[ExpertEngine], slots: int, host_slots: int
) -> None:
    engine, store = make_engine("lru", slots, host_slots, pages=PAGES)
    closing.append(engine)
    order = np.random.default_rng(slots).permutation(SIZE)
    engine.fill(order.tolist())
    assert engine.wait_filled(20.0)
    engine.audit(idle=True)
    expected = SIZES.placed(order, SIZES.places(slots))
    assert engine.device.free == 0
    assert engine.resident_keys().tolist() == sorted(expected.tolist())
    assert engine.fill_progress[:3] == (0, slots, SIZES.nbytes(slots))
    assert sum(store.reads.values()) == slots
    engine.fill_host(range(SIZE))
    while engine.idle():
        engine._tiers.wait(20.0)
    engine.audit(idle=True)
    if engine.host is not None:
        absent = SIZE - slots
        assert engine.host.free == 0 or absent < engine.host.slots


def test_preloading_stops_for_each_size_where_its_slots_are_full(closing: list[ExpertEngine]) -> None:
    engine, _ = make_engine("lru", 6, 0, pages=PAGES)
    closing.append(engine)
    assert engine.device.places.tolist() == [2, 4]
    assert engine.preload([*range(EXPERTS), *range(EXPERTS, SIZE)]) == 6
    assert engine.resident_keys().tolist() == [0, 1, 2, 3, 6, 7]


@matrix(1, host_slots=(0, 4), pages=([3, 1, 3], [1, 3, 1], [1, 1, 1]))
def test_the_first_fill_waits_for_slots_that_it_has_given_away(
    closing: list[ExpertEngine], pages: list[int], host_slots: int
) -> None:
    """Prefetches of one size take the slots that were to be filled, and are taken back, while another size fills."""
    gate = GatedReads(12)
    engine, _ = make_engine("lru", 9, host_slots, gate, pages=pages)
    closing.append(engine)
    engine._first_fill._most = 4  # as with large records
    engine.fill([12, *range(6, 12), *range(6), *range(13, 18)])
    gate.wait_begun(12)
    wanted = np.zeros(SIZE, dtype=np.float32)
    for generation, keys in enumerate(([9, 10, 11], [])):
        wanted[:] = 0
        wanted[keys] = 1
        engine.policy.prefetch = Prefetch(generation, wanted.copy())
        engine.layer_entered(0)
        engine.audit()
    gate.let(12)
    assert engine.wait_filled(20.0)
    assert engine.device.free_places.tolist() == [0] * engine.device.sizes.classes
    assert engine.fill_progress[:3] == (0, 9, engine.device.nbytes)
    engine.audit(idle=True)


def test_the_hosts_fill_waits_for_a_size_whose_slots_are_taken_for_the_moment(closing: list[ExpertEngine]) -> None:
    gate = GatedReads(SMALL[0])
    engine, _ = make_engine("lru", 3, 5, gate, pages=PAGES)
    closing.append(engine)
    assert engine.host is not None
    engine._tiers.fetch_to_host(SMALL[0], Reason.PREFETCH)
    gate.wait_begun(SMALL[0])  # so that all others wait behind it
    for key in LARGE[:3]:
        engine._tiers.fetch_to_host(key, Reason.PREFETCH)
    assert engine.host.open_classes == [0]
    engine.fill_host([*LARGE[3:], *SMALL])
    assert engine.host.open_classes == [], "the other size is filled meanwhile"
    for key in LARGE[:3]:
        assert engine._tiers.withdraw(key)
    gate.let(SMALL[0])
    while engine.idle():
        assert engine._tiers.wait(20.0)
    engine.audit(idle=True)
    assert np.flatnonzero(engine.host.resident).tolist() == sorted([*LARGE[3:6], *SMALL[:2]])


class RefusesLarge(Lru):
    """Wants all experts, the large ones most, and evicts nothing for these ahead of their layer."""

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        priority = np.ones(SIZE, dtype=np.float32)
        priority[LARGE] = 2
        self.prefetch = Prefetch(0, priority) if self.prefetch is None else self.prefetch

    def victims(self, request: VictimRequest) -> Keys:
        own = set(LARGE) if int(request.incoming[0]) in LARGE else set(SMALL)
        assert set(np.flatnonzero(request.resident | request.evictable)) <= own, "of another size none can leave for it"
        ahead = request.reason is Reason.PREFETCH
        return NO_KEYS if ahead and int(request.incoming[0]) in LARGE else super().victims(request)


def test_a_refusal_for_one_size_holds_up_no_other(closing: list[ExpertEngine]) -> None:
    policy = RefusesLarge(catalogue_of(MANIFEST))
    config = EngineConfig(device_slots=8, queue_ahead=1, transfer_timeout_s=20)
    engine = ExpertEngine(FakeStore(MANIFEST), policy.catalogue, policy, config)
    closing.append(engine)
    engine.preload([*LARGE, SMALL[0], SMALL[1]])
    resident_large = [key for key in engine.resident_keys().tolist() if key in LARGE]
    with engine.step(ONE_ROW, ONE_ROW == 1):
        with engine.routed(0, np.array([[0, 1]])) as landing:
            assert sorted(expert for expert, _ in landing) == [0, 1]
        begun = 0
        while engine._tiers.moving:
            begun += engine._tiers.moving
            assert engine._tiers.wait(20)
            engine._on_demand.deliver()
            engine._prefetcher.pump()
            if begun > 20:
                break
    assert begun >= 3, "the next small one is queued each time that one has come"
    assert [key for key in engine.resident_keys().tolist() if key in LARGE] == resident_large
    engine.audit(idle=True)


def test_the_least_budget_is_what_each_size_needs() -> None:
    catalogue = catalogue_of(MANIFEST)
    for config, text in (
        (EngineConfig(1), "holds 1 experts of 4 KiB to 12 KiB; one layer's router picks 2, so give at least 16 KiB"),
        (EngineConfig(SIZE, host_slots=1), "give none, or at least 16 KiB for one of each size"),
    ):
        with pytest.raises(BudgetTooSmall, match=text):
            ExpertEngine(FakeStore(MANIFEST), catalogue, Lru(catalogue), config)


@pytest.mark.parametrize("slots", [SIZES.least, 4, 7])
def test_a_layer_that_needs_more_than_its_slots_leaves_the_other_size_alone(
    closing: list[ExpertEngine], slots: int
) -> None:
    engine, store = make_engine("lru", slots, 0, pages=PAGES)
    closing.append(engine)
    small, large = engine.device.places.tolist()
    engine.preload([*SMALL[2 : 2 + small], *range(large)])
    with engine.step(ONE_ROW, ONE_ROW == 1):
        assert sorted(run_layer(engine, 0, np.array([range(EXPERTS)]))) == list(range(EXPERTS))
    assert set(SMALL[2 : 2 + small]) <= set(engine.resident_keys().tolist())
    assert engine.counters.evictions == EXPERTS - large
    assert set(store.reads.values()) == {1}


@pytest.mark.parametrize("host_slots", [0, 10])
def test_only_what_waits_for_a_slot_of_the_size_is_taken_back(closing: list[ExpertEngine], host_slots: int) -> None:
    gate = GatedReads(0)
    engine, _ = make_engine("lru", SIZE, host_slots, gate, pages=PAGES)
    closing.append(engine)
    tiers, small, large = engine._tiers, engine.device.size_class(SMALL[0]), engine.device.size_class(0)
    tiers.fetch(0, Reason.ON_DEMAND)
    gate.wait_begun(0)  # so that all others wait behind it
    for key, reason in ((1, Reason.PREFETCH), (SMALL[0], Reason.PREFETCH), (2, Reason.FILL), (SMALL[1], Reason.FILL)):
        tiers.fetch(key, reason, priority=float(key))
    assert [tiers.withdraw_prefetch(small) for _ in range(2)] == [SMALL[0], None]
    assert [tiers.withdraw_fill(small) for _ in range(2)] == [SMALL[1], None]
    assert [tiers.withdraw_prefetch(large), tiers.withdraw_fill(large)] == [1, 2]
    if host_slots:
        for key in (3, SMALL[2]):
            tiers.fetch_to_host(key, Reason.PREFETCH)
        assert [tiers.withdraw_to_host(small) for _ in range(2)] == [SMALL[2], None]
        assert tiers.withdraw_to_host(large) == 3
    tiers.audit()
    gate.let(0)
    while tiers.moving:
        assert tiers.wait(20)
        tiers.collect()
    assert engine.resident_keys().tolist() == [0]
    tiers.audit()
