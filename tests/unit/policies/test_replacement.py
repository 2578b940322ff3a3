"""Each replacement policy by its own rule, and one scenario in which all of them differ."""

from __future__ import annotations

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Reason, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.registry import EXPERT_POLICIES, create_policy
from tests.unit.policies.bench import Bench

CATALOGUE = Catalogue.uniform("pool", layers=2, experts=16, top_k=2)
A, B, C, D, E = 4, 3, 10, 13, 7


def bench(name: str, **options: object) -> Bench:
    return Bench(create_policy(name, catalogue=CATALOGUE, options=options))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        # A came first, and is used last.
        ("fifo", [A, B, E, C, D]),
        # B was used longest ago, then E.
        ("lru", [B, E, C, D, A]),
        # C has 2 uses, B, E and A have 3, D has 6 with those of its earlier stay.
        ("lfu", [C, B, E, A, D]),
        # D has 1 use since it came back.
        ("lfu-reset", [D, C, B, E, A]),
        # B is A's neighbour, so it is as recent as A.
        ("neighbour-aware", [E, C, D, B, A]),
    ],
)
def test_one_history_five_orders_of_leaving(name: str, order: list[int]) -> None:
    engine = bench(name)
    for _ in range(5):
        engine.use(D)
    engine.evict(D)
    for _ in range(2):
        engine.use(A)
    for expert in (B, E):
        for _ in range(3):
            engine.use(expert)
    for _ in range(2):
        engine.use(C)
    engine.use(D)
    engine.use(A)

    assert engine.victims(5) == order
    assert engine.victims(1) == order[:1]
    assert engine.victims(2, among=order[1:]) == order[1:3]


def test_every_replacement_policy_is_in_the_scenario_above() -> None:
    assert {"fifo", "lru", "lfu", "lfu-reset", "neighbour-aware"} <= set(EXPERT_POLICIES)


@pytest.mark.parametrize("name", ["lru", "neighbour-aware"])
def test_experts_of_one_layer_are_used_in_the_order_of_the_event(name: str) -> None:
    engine = bench(name)
    engine.use(9, 1, 5)

    assert engine.victims(3) == [9, 1, 5]


@pytest.mark.parametrize("name", ["lru", "neighbour-aware"])
def test_by_recency_what_was_brought_ahead_is_as_fresh_as_its_arrival(name: str) -> None:
    engine = bench(name)
    engine.use(1)
    engine.arrive(20, reason=Reason.PREFETCH)
    engine.use(5)

    assert engine.victims(3) == [1, 20, 5]


@pytest.mark.parametrize("name", ["lfu", "lfu-reset"])
def test_by_frequency_what_was_brought_ahead_has_no_use_yet_but_is_fresh_among_such(name: str) -> None:
    engine = bench(name)
    engine.use(1)
    engine.arrive(20, 19, reason=Reason.PREFETCH)
    engine.use(5)

    assert engine.victims(4) == [20, 19, 1, 5]


def test_an_on_demand_arrival_is_no_second_use() -> None:
    engine = bench("lru")
    engine.use(1, 2)
    engine.arrive(1, reason=Reason.ON_DEMAND)

    assert engine.victims(2) == [1, 2]


def test_lfu_keeps_counts_over_an_eviction_and_lfu_reset_loses_them() -> None:
    for name, first in (("lfu", 2), ("lfu-reset", 1)):
        engine = bench(name)
        for _ in range(4):
            engine.use(1)
        engine.evict(1)
        engine.use(2)
        engine.use(2)
        engine.use(1)

        assert engine.victims() == [first], name


def test_lfu_reset_counts_for_each_tier_alone() -> None:
    engine = bench("lfu-reset")
    engine.arrive(1, 2, tier=Tier.HOST)
    for _ in range(3):
        engine.use(1)
    engine.use(2)
    engine.evict(1, tier=Tier.DEVICE)

    assert engine.victims(tier=Tier.HOST) == [2]
    engine.use(1)
    engine.use(2)
    engine.use(2)
    assert engine.victims(tier=Tier.DEVICE) == [1]


def test_fifo_ignores_use_and_counts_a_return_as_new() -> None:
    engine = bench("fifo")
    engine.use(1)
    engine.use(2)
    engine.use(3)
    engine.use(1)
    assert engine.victims() == [1]

    engine.evict(1)
    engine.use(1)
    assert engine.victims(3) == [2, 3, 1]


def test_fifo_queues_for_each_tier_alone() -> None:
    engine = bench("fifo")
    engine.arrive(2, 1, tier=Tier.HOST)
    engine.arrive(1, 2, tier=Tier.DEVICE)

    assert engine.victims(tier=Tier.HOST) == [2]
    assert engine.victims(tier=Tier.DEVICE) == [1]


def test_neighbours_are_of_one_layer_only() -> None:
    engine = bench("neighbour-aware")
    last_of_layer_0, first_of_layer_1 = 15, 16
    engine.use(first_of_layer_1, layer=1)
    engine.use(0)
    engine.use(last_of_layer_0)

    assert engine.victims() == [first_of_layer_1]


@pytest.mark.parametrize(("radius", "first"), [(0, 1), (1, 1), (2, 6), (3, 1)])
def test_the_radius_says_how_far_a_use_protects(radius: int, first: int) -> None:
    engine = bench("neighbour-aware", radius=radius)
    engine.use(1)
    engine.use(6)
    engine.use(3)

    # 1 and 3 are two apart, 6 and 3 three: at radius 3 both are protected, and 1's own use is the older one.
    assert engine.victims() == [first]


def test_neighbour_aware_at_radius_0_is_lru() -> None:
    lru, alone = bench("lru"), bench("neighbour-aware", radius=0)
    for engine in (lru, alone):
        for expert in (3, 9, 1, 3, 7, 9, 2):
            engine.use(expert)
        engine.arrive(12, reason=Reason.PREFETCH)

    assert lru.victims(6) == alone.victims(6)


def test_a_negative_radius_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="radius"):
        bench("neighbour-aware", radius=-1)
