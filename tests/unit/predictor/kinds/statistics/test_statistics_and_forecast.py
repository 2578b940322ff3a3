"""Forecasts of worlds that are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidRequest
from greenroom.predictor.kinds.statistics.forecaster import Forecaster, parse_previous, uniform
from greenroom.predictor.kinds.statistics.statistics import Statistics
from greenroom.predictor.traces.counts import Shape, count
from tests.examples import examples
from tests.unit.predictor.worlds import World, f32, trace


def learn(world: World, sequences: int, rows: int, half_life: float = 1e9) -> Statistics:
    statistics = Statistics.empty(Shape(world.layers, world.experts))
    for _ in range(sequences):
        statistics.add(count(trace(world.picks(rows), world.experts)), half_life)
    statistics.audit()
    return statistics


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(2, 8))
def test_popularity_comes_to_what_the_world_is(seed: int, layers: int, experts: int) -> None:
    world = World(seed, layers, experts)
    popularity = Forecaster(learn(world, 100, 60)).popularity
    np.testing.assert_allclose(popularity.sum(axis=1), 1, rtol=1e-5)
    # 6,000 draws: a share has a deviation of at most 0.0065.
    assert np.abs(popularity - world.marginals()).max() < 0.04


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(2, 6))
def test_after_a_prompt_it_follows_the_worlds_own_steps(seed: int, layers: int, experts: int) -> None:
    """The next prompt begins as the previous one did, which is not as the others do."""
    world = World(seed, layers, experts)
    world.first = np.full(experts, 1 / experts)  # all steps are seen
    forecaster = Forecaster(learn(world, 100, 200))
    first = world.random.dirichlet(np.ones(experts))
    previous = world.marginals(first).astype(np.float32)
    forecast = forecaster.after(previous)
    np.testing.assert_allclose(forecast.sum(axis=1), 1, rtol=1e-5)
    assert np.abs(forecast - previous).max() < 0.1


def test_affinity_is_exact_where_the_world_is_certain() -> None:
    """Every row goes 0 → 1 → 2 or 3 → 0 → 3."""
    statistics = Statistics.empty(Shape(3, 4))
    statistics.add(count(trace([[[0], [1], [2]], [[3], [0], [3]], [[3], [0], [3]]], 4)), 100.0)
    forecaster = Forecaster(statistics)
    previous = np.zeros((3, 4), np.float32)
    previous[:, 0] = 1
    np.testing.assert_array_equal(forecaster.after(previous), f32([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]))
    previous[:] = f32([[0.5, 0, 0, 0.5]] * 3)
    np.testing.assert_allclose(
        forecaster.after(previous), f32([[0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]), rtol=1e-6
    )
    np.testing.assert_allclose(forecaster.popularity[1], [2 / 3, 1 / 3, 0, 0], rtol=1e-6)


def test_from_an_expert_that_was_never_seen_it_is_popularity() -> None:
    statistics = Statistics.empty(Shape(2, 4))
    statistics.add(count(trace([[[0], [1]], [[1], [2]]], 4)), 100.0)
    previous = f32([[0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    np.testing.assert_allclose(Forecaster(statistics).after(previous)[1], [0, 0.5, 0.5, 0])


def test_the_old_fades() -> None:
    """After a change of the world the forecast is half old after one half-life, and new after many."""
    statistics = Statistics.empty(Shape(1, 2))
    for _ in range(200):
        statistics.add(count(trace([[[0]]], 2)), 10.0)
    np.testing.assert_allclose(Forecaster(statistics.copy()).popularity, f32([[1, 0]]))
    for _ in range(10):
        statistics.add(count(trace([[[1]]], 2)), 10.0)
    np.testing.assert_allclose(Forecaster(statistics.copy()).popularity, f32([[0.5, 0.5]]), atol=1e-4)
    for _ in range(190):
        statistics.add(count(trace([[[1]]], 2)), 10.0)
    np.testing.assert_allclose(Forecaster(statistics.copy()).popularity, f32([[0, 1]]), atol=1e-4)
    assert statistics.sequences == 400
    statistics.audit()


def test_a_long_sequence_weighs_as_much_as_a_short_one() -> None:
    statistics = Statistics.empty(Shape(1, 2))
    statistics.add(count(trace([[[0]]] * 1000, 2)), 1e9)
    statistics.add(count(trace([[[1]]], 2)), 1e9)
    np.testing.assert_allclose(Forecaster(statistics).popularity, f32([[0.5, 0.5]]), atol=1e-6)


def test_a_layer_that_no_row_was_routed_in_is_uniform() -> None:
    statistics = Statistics.empty(Shape(2, 4))
    statistics.add(count(trace([[[1], [255]]], 4)), 100.0)
    forecaster = Forecaster(statistics)
    np.testing.assert_allclose(forecaster.popularity, f32([[0.0, 1.0, 0.0, 0.0], [0.25] * 4]))
    np.testing.assert_allclose(forecaster.after(uniform(Shape(2, 4))), f32([[0.25, 0.25, 0.25, 0.25]] * 2))


@pytest.mark.parametrize(
    "previous",
    [
        np.ones((2, 3), np.float32),
        np.zeros((2, 4), np.float32),
        np.full((2, 4), -1, np.float32),
        np.full((2, 4), np.nan, np.float32),
        np.full((2, 4), np.inf, np.float32),
        np.full((2, 4), 3e38, np.float32),
        f32([[1, 1, 1, 1], [0, 0, 0, 0]]),
        f32([[1, 1, 1, -1], [1, 0, 0, 0]]),
    ],
)
def test_a_previous_distribution_that_is_none_is_refused(previous: npt.NDArray[np.float32]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_previous(previous.tobytes(), Shape(2, 4))
    assert caught.value.param == "previous"


def test_counts_will_do_for_a_previous_distribution() -> None:
    previous = parse_previous(f32([[3, 1], [0, 5]]).tobytes(), Shape(2, 2))
    np.testing.assert_allclose(previous, f32([[0.75, 0.25], [0.0, 1.0]]))
