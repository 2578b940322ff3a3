"""Cache-MoE: each layer evicts its own."""

from __future__ import annotations

from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.replacement.lru_per_layer import LruPerLayer
from tests.unit.policies.bench import Bench

POOL = Catalogue.uniform("p", layers=2, experts=4, top_k=2)  # keys 0 to 3, and 4 to 7


def bench(slots: int) -> Bench:
    policy = LruPerLayer(POOL)
    policy.on_budget_changed(Tier.DEVICE, slots)
    return Bench(policy)


def victims(used: Bench, count: int, incoming: list[int]) -> list[int]:
    found: list[int] = used.policy.victims(used.request(count, incoming=incoming)).tolist()
    return found


def test_a_full_layer_evicts_its_own_least_recently_used_though_others_are_older() -> None:
    used = bench(4)
    used.use(4, 5, layer=1)
    used.use(1, 0, layer=0)

    assert victims(used, 1, [2]) == [1]


def test_a_layer_below_its_share_takes_it_back_from_the_one_that_has_too_much() -> None:
    used = bench(4)
    used.use(4, layer=1)
    used.use(0, 1, 2, layer=0)  # one more than its share of two

    assert victims(used, 1, [5]) == [0]


def test_what_a_layer_needs_beyond_its_share_comes_from_others_last() -> None:
    used = bench(4)
    used.use(4, 5, layer=1)
    used.use(0, 1, layer=0)

    assert victims(used, 3, [2, 3]) == [0, 1, 4]
