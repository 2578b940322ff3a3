"""Cache-MoE: each layer evicts its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.replacement.lru_per_layer import LruPerLayer
from greenroom.replay.hit_rates import ReplayCache
from tests.examples import examples
from tests.unit.policies.bench import Bench, routing_of

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


LAYERS, EXPERTS = 4, 8
SMALL, LARGE = 4096, 12288


def of_sizes(*sizes: int) -> Catalogue:
    return Catalogue("p", experts_per_layer=[EXPERTS] * len(sizes), top_k=[2] * len(sizes), expert_bytes=sizes)


@pytest.mark.parametrize("sizes", [[SMALL] * LAYERS, [SMALL, SMALL, LARGE, LARGE], [LARGE, SMALL, SMALL, LARGE]])
def test_each_layer_keeps_its_share_of_the_slots_of_its_size(sizes: list[int]) -> None:
    """Half of the layers go round all their experts, which would leave nothing to the others under LRU."""
    catalogue = of_sizes(*sizes)
    share = 4
    cache = ReplayCache(LruPerLayer(catalogue), SlotSizes(catalogue).nbytes(share * LAYERS))
    misses = np.zeros(LAYERS, dtype=np.int64)
    for turn in range(40):
        for layer in range(LAYERS):
            first, before = layer * EXPERTS, cache.result.misses
            picks = [turn % share] if layer % 2 == 0 else [2 * turn % EXPERTS, (2 * turn + 1) % EXPERTS]
            cache.route(routing_of(catalogue, [first + pick for pick in picks], layer=layer))
            misses[layer] += cache.result.misses - before
            if turn >= share:
                assert cache.resident[catalogue.span(layer)].sum() == share
    assert misses.tolist() == [share, 2 * 40] * 2


@settings(max_examples=examples(40))
@given(
    large=st.lists(st.booleans(), min_size=3, max_size=5).filter(lambda large: len(set(large)) == 2),
    share=st.floats(0.3, 0.8),
    seed=st.integers(0, 2**32 - 1),
)
def test_layers_of_one_size_are_as_in_a_model_of_their_own(large: list[bool], share: float, seed: int) -> None:
    catalogue = of_sizes(*(LARGE if one else SMALL for one in large))
    sizes = SlotSizes(catalogue)
    slots = round(share * catalogue.size)
    together = ReplayCache(LruPerLayer(catalogue), sizes.nbytes(slots))
    alone, layers_of = [], [[layer for layer, one in enumerate(large) if one == kind] for kind in (False, True)]
    for places, layers in zip(sizes.places(slots).tolist(), layers_of, strict=True):
        own = Catalogue.uniform("p", layers=len(layers), experts=EXPERTS, top_k=2)
        alone.append(ReplayCache(LruPerLayer(own), places))
    random = np.random.default_rng(seed)
    for number in range(30 * len(large)):
        layer = number % len(large)
        indices = random.choice((4, 8, 6)[layer % 3], 2, replace=False).tolist()
        kind = int(large[layer])
        single, place = alone[kind], layers_of[kind].index(layer)
        together.route(routing_of(catalogue, [EXPERTS * layer + index for index in indices], layer=layer))
        single.route(routing_of(single.catalogue, [EXPERTS * place + index for index in indices], layer=place))
        expected = single.resident[single.catalogue.span(place)]
        assert together.resident[catalogue.span(layer)].tolist() == expected.tolist()
    assert together.hits == sum(each.hits for each in alone)
    assert together.evictions == sum(each.evictions for each in alone)
