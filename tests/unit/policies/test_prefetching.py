"""What the prefetching policies want, when, and which experts they evict for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.events import ROUTER, LayerRouting, Prediction, PredictionRequest, Reason, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.prefetching.look_ahead import Calibration, LookAhead
from greenroom.policies.prefetching.next_layer import NextLayer, TopK, TracedTopK
from greenroom.policies.prefetching.prefetching_policy import RETENTIONS, PrefetchingPolicy
from greenroom.policies.registry import EXPERT_POLICIES, create_policy
from tests.unit.policies.bench import Bench, step_of

CATALOGUE = Catalogue.uniform("pool", layers=3, experts=4, top_k=2)


def wanted(policy: ExpertPolicy) -> list[int]:
    """Most urgent first."""
    if policy.prefetch is None:
        return []
    priority = policy.prefetch.priority
    return [key for key in np.argsort(-priority, kind="stable").tolist() if priority[key] > 0]


def route(policy: ExpertPolicy, layer: int, picks: list[list[int]], step: Step | None = None) -> None:
    step = step or step_of(*range(len(picks)))
    policy.on_layer_routed(LayerRouting.from_picks(CATALOGUE, step, layer, np.array(picks)))


def test_next_layer_wants_all_of_it_and_after_the_last_layer_the_first() -> None:
    policy = NextLayer(CATALOGUE)
    route(policy, 0, [[1, 2]])
    assert wanted(policy) == [4, 5, 6, 7]
    route(policy, 2, [[1, 2]])
    assert wanted(policy) == [0, 1, 2, 3]


def test_after_a_decoders_last_layer_its_first_is_next() -> None:
    pool = Catalogue("pool", experts_per_layer=[4] * 3, top_k=[2] * 3, expert_bytes=[1] * 3, decoder_start=1)
    policy = NextLayer(pool)
    policy.on_layer_routed(LayerRouting.from_picks(pool, step_of(0), 2, np.array([[1, 2]])))
    assert wanted(policy) == [4, 5, 6, 7]


def test_top_k_wants_the_first_by_index_as_many_as_the_router_gives_a_row() -> None:
    policy = TopK(CATALOGUE)
    route(policy, 1, [[1, 3]])
    assert wanted(policy) == [8, 9]
    policy = TopK(CATALOGUE, count=9)
    route(policy, 1, [[1, 3]])
    assert wanted(policy) == [8, 9, 10, 11]


def test_traced_top_k_wants_those_used_in_the_most_steps() -> None:
    policy = TracedTopK(CATALOGUE)
    route(policy, 0, [[0, 1]])
    assert wanted(policy) == [], "nothing is known of the layer yet"
    for picks in ([[3, 2]], [[3, 1]], [[3, 1], [3, 0]]):
        route(policy, 1, picks)
    route(policy, 0, [[0, 1]])
    assert wanted(policy) == [7, 5]
    policy.learn(np.array([0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]))  # of key 4, elsewhere
    route(policy, 0, [[0, 1]])
    assert wanted(policy) == [4, 7]


@pytest.mark.parametrize("name", ["next-layer", "top-k", "traced-top-k", "look-ahead"])
def test_retention_is_chosen_by_name(name: str) -> None:
    for retention, rule in RETENTIONS.items():
        policy = create_policy(name, catalogue=CATALOGUE, options={"retention": retention})
        assert isinstance(policy, PrefetchingPolicy)
        assert type(policy.retention) is rule
    with pytest.raises(UnknownName, match="decayed, lfu, lru, next-use"):
        create_policy(name, catalogue=CATALOGUE, options={"retention": "mru"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("top-k", {"count": 0}),
        ("traced-top-k", {"count": -1}),
        ("look-ahead", {"layers": 0}),
        ("look-ahead", {"least": 0.0}),
        ("look-ahead", {"least": 1.5}),
        ("look-ahead", {"per_row": 0}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        create_policy(name, catalogue=CATALOGUE, options=options)


def test_only_what_asks_declares_it() -> None:
    assert {name for name, policy in EXPERT_POLICIES.items() if policy.asks} == {
        "duoserve", "expertflow", "look-ahead", "reuse",
    }  # fmt: skip


def test_prefetched_and_still_wanted_leaves_last_however_rarely_it_was_used() -> None:
    policy = NextLayer(CATALOGUE, retention="lfu")
    engine = Bench(policy)
    for _ in range(3):
        engine.use(0, 1, layer=0)
    engine.arrive(4, reason=Reason.PREFETCH)

    assert engine.victims(3) == [0, 1, 4]
    engine.use(5, 6, layer=1)  # its layer has come and it was not used: now it is the least frequently used
    assert engine.victims(1) == [4]


def test_a_prefetch_displaces_no_prefetched_expert_and_none_while_the_running_layer_holds_a_lesser() -> None:
    policy = NextLayer(CATALOGUE, retention="lfu")
    engine = Bench(policy)
    for _ in range(3):
        engine.use(8, 9, layer=2)
    engine.use(0, 1, layer=0)
    engine.arrive(4, reason=Reason.PREFETCH)

    def prefetch(among: list[int]) -> list[int]:
        request = engine.request(among=among, reason=Reason.PREFETCH, incoming=[5])
        return [int(key) for key in policy.victims(request)]

    assert prefetch([4]) == []
    assert prefetch([4, 8, 9]) == [], "0 and 1 were used less and are only pinned"
    assert prefetch([1, 4, 8, 9]) == [1], "0 is pinned, but worth no less"


def test_without_evicting_only_free_slots_are_filled() -> None:
    policy = NextLayer(CATALOGUE, evict=False)
    route(policy, 0, [[1, 2]])
    assert policy.prefetch is not None
    assert policy.prefetch.may_evict is not None
    assert not policy.prefetch.may_evict.any()


# -- look-ahead ------------------------------------------------------------------------------------------------------


def weights_of(*rows: list[float]) -> NDArray[np.float32]:
    return np.array(rows, dtype=np.float32)


def asked(policy: LookAhead) -> PredictionRequest:
    (request,) = policy.take_requests()
    return request


def foresee(policy: LookAhead, values: NDArray[np.float32]) -> None:
    policy.on_prediction(Prediction(asked(policy), "", values))


def test_look_ahead_asks_for_the_next_layers_of_this_step_and_none_beyond_the_last() -> None:
    policy = LookAhead(CATALOGUE, layers=2)
    step = step_of(0, number=7)
    route(policy, 0, [[0, 1]], step)
    for layers in ((1, 3), (2, 3)):
        request = asked(policy)
        assert (request.kind, request.layers, request.step) == (ROUTER, layers, 7)
        route(policy, layers[0], [[0, 1]], step)
    assert policy.take_requests() == ()


def test_look_ahead_wants_the_likely_the_nearer_layer_first() -> None:
    policy = LookAhead(CATALOGUE, layers=2, least=0.6)
    route(policy, 0, [[0, 1]])
    foresee(policy, weights_of([0.1, 0.9, 0.72, 0.4, 0.98, 0.2, 0.52, 0.63]))
    assert wanted(policy) == [5, 6, 8, 11]


def test_rows_add_up() -> None:
    """Two rows that are each unlikely to pick an expert make it likely that one does."""
    policy = LookAhead(CATALOGUE, layers=1, least=0.6)
    route(policy, 0, [[0, 1], [0, 1]])
    foresee(policy, weights_of([0.42, 0.1, 0.1, 0.3], [0.42, 0.1, 0.1, 0.3]))
    assert wanted(policy) == [4]


def test_per_row_keeps_each_row_to_its_best() -> None:
    policy = LookAhead(CATALOGUE, layers=1, least=0.5, per_row=1)
    route(policy, 0, [[0, 1], [0, 1]])
    foresee(policy, weights_of([0.9, 0.8, 0.1, 0.1], [0.1, 0.7, 0.1, 0.8]))
    assert sorted(wanted(policy)) == [4, 7]


def test_what_was_wanted_for_a_layer_is_dropped_when_its_router_has_spoken() -> None:
    policy = LookAhead(CATALOGUE, layers=2)
    step = step_of(0)
    policy.on_step_started(step)
    route(policy, 0, [[0, 1]], step)
    foresee(policy, weights_of([0.9, 0.9, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1]))
    assert wanted(policy) == [4, 5, 8]
    route(policy, 1, [[2, 3]], step)
    assert wanted(policy) == [8]
    policy.on_step_started(step_of(0, number=1))
    assert wanted(policy) == []


def test_answers_that_are_late_strange_or_given_twice_change_nothing() -> None:
    policy = LookAhead(CATALOGUE, layers=1)
    route(policy, 0, [[0, 1]])
    late = Prediction(asked(policy), "", weights_of([0.9, 0.9, 0.9, 0.9]))
    route(policy, 1, [[0, 1]])
    policy.on_prediction(late)
    policy.on_prediction(Prediction(PredictionRequest(ROUTER, (0, 3)), "", weights_of([0.9] * 12)))
    assert wanted(policy) == []
    foresee(policy, weights_of([np.nan, 0.9, np.inf, -1.0]))
    assert wanted(policy) == [10, 9]


def test_without_answers_it_evicts_as_its_retention_does() -> None:
    policy, retention = LookAhead(CATALOGUE), create_policy("next-use", catalogue=CATALOGUE)
    benches = Bench(policy), Bench(retention)
    for turn in range(12):
        for layer in range(3):
            for engine in benches:
                engine.use(4 * layer + turn % 3, 4 * layer + 3, layer=layer)
        assert benches[0].victims(9) == benches[1].victims(9)
    assert policy.prefetch is None


def test_with_next_use_what_comes_must_be_worth_more_than_what_goes() -> None:
    policy = LookAhead(CATALOGUE, layers=1, least=0.6)
    engine = Bench(policy)
    for _ in range(30):
        for layer in range(3):
            engine.use(4 * layer, 4 * layer + 1, layer=layer)
    route(policy, 1, [[0, 1]])
    foresee(policy, weights_of([0.3, 0.3, 0.1, 0.72]))

    def prefetch(victim: int) -> list[int]:
        engine.inside[Tier.DEVICE] = {victim}
        return [int(key) for key in policy.victims(engine.request(reason=Reason.PREFETCH, incoming=[11]))]

    assert prefetch(2) == [2], "never used"
    assert prefetch(0) == [], "used at every step, and soon again"


def test_calibration_learns_what_weights_are_worth_by_how_far_ahead_they_were_given() -> None:
    calibration = Calibration(2)
    sure = calibration.bins(weights_of([0.9, 0.1, 0.6, 0.2]))
    assert calibration.chances(1, sure)[0, 0] == pytest.approx(0.925)  # a weight for the chance itself, by bins
    for turn in range(200):
        calibration.learn(1, sure, np.array([[0, 2 if turn % 4 == 0 else 3]]))
        calibration.learn(2, sure, np.array([[1, 4]]))  # 4 is none

    assert calibration.chances(1, sure)[0] == pytest.approx([1.0, 0.0, 0.25, 0.75], abs=0.02)
    assert calibration.chances(2, sure)[0] == pytest.approx([0.0, 1.0, 0.0, 0.0], abs=0.03)
    each_its_own = calibration.chances(np.array([1, 1, 2, 2]), sure)
    assert each_its_own[0] == pytest.approx([1.0, 0.0, 0.0, 0.0], abs=0.03)


def test_calibration_reads_as_many_picks_as_it_has_weights_of() -> None:
    calibration = Calibration(1)
    one, two = calibration.bins(weights_of([0.9])), calibration.bins(weights_of([0.9], [0.9]))
    before = calibration.chances(1, one)
    calibration.learn(1, two, np.array([[0]]))
    assert (calibration.chances(1, one) == before).all()
    calibration.learn(1, one, np.array([[1], [1], [1]]))
    assert (calibration.chances(1, one) < before).all()
