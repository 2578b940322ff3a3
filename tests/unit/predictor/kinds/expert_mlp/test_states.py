"""What the network is told: popularity, affinity, and what a token has picked (DuoServe-MoE, Eqs 2 to 5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.policies.duoserve.mlp_states import StateConstructor
from greenroom.predictor.kinds.expert_mlp.shares import ExpertShares, many_hot
from greenroom.replay.traces.routing_trace import RoutingTrace

PICKS = np.array([[[0, 1], [2, 0]], [[0, 2], [2, 1]], [[1, 0], [0, 1]]], dtype=np.uint8)
"""Three tokens, two layers of four experts, top-2."""


def trace_of(picks: np.ndarray, experts: int | np.ndarray = 4) -> RoutingTrace:
    return RoutingTrace(picks, np.array([0, len(picks)]), experts)


def test_popularity_is_how_often_each_expert_was_picked_in_its_layer() -> None:
    shares = ExpertShares.of_trace(trace_of(PICKS))
    np.testing.assert_allclose(shares.popularity, np.array([[3, 2, 1, 0], [2, 2, 2, 0]]) / 6)


def test_affinity_is_what_followed_and_where_that_was_never_seen_popularity() -> None:
    (affinity,) = ExpertShares.of_trace(trace_of(PICKS)).affinity
    np.testing.assert_allclose(affinity[0], np.array([2, 2, 2, 0]) / 6)
    np.testing.assert_allclose(affinity[1], np.array([2, 1, 1, 0]) / 4)
    np.testing.assert_allclose(affinity[2], np.array([0, 1, 1, 0]) / 2)
    np.testing.assert_allclose(affinity[3], np.array([2, 2, 2, 0]) / 6)


def test_two_layers_ahead_the_layer_between_does_not_count() -> None:
    picks = np.array([[[0], [1], [2]], [[0], [2], [2]], [[1], [1], [0]]], dtype=np.uint8)
    (affinity,) = ExpertShares.of_trace(trace_of(picks), 2).affinity
    assert affinity[:2].tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]


@given(seed=st.integers(0, 1000), ahead=st.integers(1, 3))
def test_every_row_is_a_distribution_over_the_layers_experts(seed: int, ahead: int) -> None:
    random = np.random.default_rng(seed)
    widths = random.integers(2, 6, size=4)
    drawn = [random.integers(-1, width, size=(9, 1)) for width in widths]
    picks = np.stack(drawn, axis=1).astype(np.uint8)  # -1 becomes 255: none
    shares = ExpertShares.of_trace(trace_of(picks, widths), ahead)
    for layer, width in enumerate(widths.tolist()):
        routed = bool((picks[:, layer] < width).any())
        assert shares.popularity[layer, :width].sum() == pytest.approx(float(routed))
        assert not shares.popularity[layer, width:].any()
        if layer >= ahead and routed:
            sums = shares.affinity[layer - ahead, :, :width].sum(axis=1)
            np.testing.assert_allclose(sums, 1, rtol=1e-5)


def test_a_distance_beyond_the_model_and_an_empty_trace_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="ahead"):
        ExpertShares.of_trace(trace_of(PICKS), 2)
    with pytest.raises(InvalidConfig, match="no token"):
        ExpertShares.of_trace(trace_of(PICKS[:0]))


def constructor(*, many: bool = False, ahead: int = 1) -> StateConstructor:
    """Of three layers of three experts, top-2. A number in the shares says where it comes from."""
    popularity = (np.arange(9).reshape(3, 3) / 100).astype(np.float32)
    affinity = np.arange(1, (3 - ahead) * 9 + 1, dtype=np.float32).reshape(3 - ahead, 3, 3)
    return StateConstructor(ExpertShares(ahead, popularity, affinity), 2, many)


def test_the_printed_state_has_indices_from_one_on_and_zeros_for_what_is_to_come() -> None:
    picks = np.array([[[2, 0], [1, 2], [0, 1]]], dtype=np.uint8)
    first, second = constructor().states(picks.repeat(2, axis=0), np.array([1, 2])).tolist()
    assert first == pytest.approx([3, 1, 0, 0, 0.03, 0.04, 0.05, 7, 8, 9, 1, 2, 3])
    assert second == pytest.approx([3, 1, 2, 3, 0.06, 0.07, 0.08, 13, 14, 15, 16, 17, 18])
    assert constructor().width == len(first)


def test_many_hot_has_a_place_for_every_expert() -> None:
    picks = np.array([[[2, 0], [1, 2], [0, 1]]], dtype=np.uint8)
    (state,) = constructor(many=True).states(picks, np.array([2])).tolist()
    assert state[:6] == [1, 0, 1, 0, 1, 1]
    assert constructor(many=True).width == len(state)


def test_no_pick_is_zeros() -> None:
    picks = np.array([[[1, 255], [255, 255], [0, 1]]], dtype=np.uint8)
    (state,) = constructor().states(picks, np.array([1])).tolist()
    assert state[:4] == [2, 0, 0, 0]
    assert state[-3:] == [0, 0, 0]
    assert many_hot(picks[0, 0], 3).tolist() == [0, 1, 0]


@given(seed=st.integers(0, 1000), ahead=st.integers(1, 2), many=st.booleans())
def test_what_is_not_routed_yet_does_not_matter(seed: int, ahead: int, many: bool) -> None:
    random = np.random.default_rng(seed)
    layer = int(random.integers(ahead, 3))
    picks = random.random((4, 3, 3)).argsort(axis=2)[:, :, :2].astype(np.uint8)
    other = picks.copy()
    other[:, layer - ahead + 1 :] = random.random((4, 2 + ahead - layer, 3)).argsort(axis=2)[:, :, :2]
    states = constructor(many=many, ahead=ahead)
    layers = np.full(4, layer)
    assert states.states(picks, layers).tolist() == states.states(other, layers).tolist()
