"""Belady's optimum: by the rule, against every other choice of victims, and as a policy that knows the future."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import LayerRouting, Reason
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.replacement.belady import Belady, Future, belady, next_uses
from tests.examples import examples
from tests.unit.policies.bench import Bench, keys_of, step_of

CATALOGUE = Catalogue.uniform("pool", layers=2, experts=3, top_k=2)


def fewest_misses(accesses: tuple[int, ...], slots: int) -> int:
    """Of all choices of victims, by trying them."""

    @cache
    def least(position: int, inside: frozenset[int]) -> int:
        if position == len(accesses):
            return 0
        expert = accesses[position]
        if expert in inside:
            return least(position + 1, inside)
        if len(inside) < slots:
            return 1 + least(position + 1, inside | {expert})
        return 1 + min(least(position + 1, inside - {victim} | {expert}) for victim in inside)

    return least(0, frozenset())


@given(accesses=st.lists(st.integers(0, 4), max_size=14), slots=st.integers(1, 4))
@settings(max_examples=examples(80), deadline=None)
def test_no_choice_of_victims_has_fewer_misses(accesses: list[int], slots: int) -> None:
    hits = belady(keys_of(accesses), slots)

    assert int((~hits).sum()) == fewest_misses(tuple(accesses), slots)


def test_the_hits_of_a_history_worked_out_by_hand() -> None:
    # At the access to 3 the resident 1 is used next at 4, 2 at 5: 2 leaves.
    assert belady(keys_of([1, 2, 1, 3, 1, 2, 3]), 2).tolist() == [False, False, True, False, True, False, True]


def test_a_cache_without_a_slot_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="slots"):
        belady(keys_of([1]), 0)


def test_the_next_use_is_found_for_every_access() -> None:
    assert next_uses(keys_of([4, 7, 4, 4, 7])).tolist() == [2, 4, 3, 5, 5]
    assert next_uses(keys_of([])).tolist() == []


def test_a_future_from_picks_has_each_layers_distinct_keys_and_no_picks_that_are_none() -> None:
    first = np.array([[[2, 0], [1, 3]], [[2, 1], [3, 3]]])  # two rows; 3 is none
    second = np.array([[[0, 1], [2, 2]]])

    future = Future.of_picks(CATALOGUE, [first, second])

    assert future.starts.tolist() == [0, 3, 4, 6, 7]
    assert future.accesses.tolist() == [0, 1, 2, 4, 0, 1, 5]


def route(engine: Bench, layer: int, *keys: int) -> None:
    engine.policy.on_layer_routed(LayerRouting(CATALOGUE, step_of(0), layer, keys_of(keys), keys_of([1] * len(keys))))


def test_the_policy_evicts_the_farthest_next_use_and_first_what_is_never_used() -> None:
    policy = Belady(CATALOGUE, future=Future.of_groups(map(keys_of, ([0, 1], [3, 4], [2], [4], [0], [3]))))
    engine = Bench(policy)
    route(engine, 0, 0, 1)
    engine.arrive(0, 1)
    route(engine, 1, 3, 4)
    engine.arrive(3, 4)

    assert engine.victims(4) == [1, 3, 0, 4]  # never, last, before it, next
    route(engine, 0, 2)
    route(engine, 1, 4)
    route(engine, 0, 0)
    assert engine.victims(3) == [1, 4, 0]  # of those never used again the least recently used
    assert policy.departures == 0


def test_what_is_routed_otherwise_is_counted() -> None:
    policy = Belady(CATALOGUE, future=Future.of_groups(map(keys_of, ([0, 1], [3]))))
    engine = Bench(policy)
    route(engine, 0, 1, 0)
    assert policy.departures == 0
    route(engine, 1, 4)
    assert policy.departures == 1
    route(engine, 0, 2)  # beyond what is known
    assert policy.departures == 1


def test_ahead_wants_the_next_layers_the_nearest_first_and_only_in_place_of_later_ones() -> None:
    groups = map(keys_of, ([0], [3, 4], [1], [5], [0]))
    policy = Belady(CATALOGUE, future=Future.of_groups(groups), ahead=2)
    engine = Bench(policy)
    route(engine, 0, 0)

    assert policy.prefetch is not None
    priority = policy.prefetch.priority
    assert np.argsort(-priority, kind="stable")[:3].tolist() == [3, 4, 1]
    assert (priority[[0, 2, 5]] == 0).all()
    engine.arrive(0, 3)
    ask = engine.request(among=[0], reason=Reason.PREFETCH, incoming=[1])
    assert policy.victims(ask).tolist() == [0]  # used later than what comes
    ask = engine.request(among=[3], reason=Reason.PREFETCH, incoming=[1])
    assert policy.victims(ask).tolist() == []  # used sooner
    assert policy.victims(engine.request(among=[3])).tolist() == [3]


@pytest.mark.parametrize("options", [{"ahead": -1}, {"future": Future.of_groups([keys_of([6])])}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig):
        Belady(CATALOGUE, **options)  # type: ignore[arg-type]


def test_a_future_can_be_told_in_lists() -> None:
    future = Future.of_groups([[0, 1], [], [2]])

    assert future.accesses.tolist() == [0, 1, 2]
    assert future.starts.tolist() == [0, 2, 2, 3]
