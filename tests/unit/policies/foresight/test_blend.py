from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.foresight.blend import Blend, blended, missed


def told(rng: np.random.Generator, *gains: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """What happens has the sum of the logits, each times its gain, as its logit."""
    logits = [rng.normal(scale=2, size=(4, 16)) for _ in gains]
    total = sum(gain * one for gain, one in zip(gains, logits, strict=True))
    return rng.random((4, 16)) < 1 / (1 + np.exp(-total)), logits


def test_it_learns_how_far_each_predictor_is_to_be_believed() -> None:
    rng, blend = np.random.default_rng(0), Blend((1.0, 1.0), 16)
    for _ in range(2000):
        picked, logits = told(rng, 0.5, 0.0)
        blend.learn(picked, *logits)
    assert np.abs(blend.weights - [0.5, 0.0]).max() < 0.05
    assert np.abs(blend.bias).max() < 0.2


def test_small_logits_get_their_large_weight_as_soon() -> None:
    def lessons_until(size: float) -> int:
        rng, blend, lessons = np.random.default_rng(0), Blend((1.0,), 16), 0
        while abs(blend.weights[0] * size - 2) > 0.4 and lessons < 1000:
            picked, (logits,) = told(rng, 2.0)
            blend.learn(picked, (logits * size).astype(np.float32))
            lessons += 1
        return lessons

    assert max(lessons_until(1.0), lessons_until(0.1)) < 100


def test_an_expert_that_is_picked_more_often_than_foretold_gets_a_bias() -> None:
    rng, blend = np.random.default_rng(0), Blend((1.0,), 16)
    bias = np.linspace(-2, 2, 16)
    for _ in range(3000):
        logits = rng.normal(scale=2, size=(4, 16))
        picked = rng.random((4, 16)) < 1 / (1 + np.exp(-(logits + bias)))
        blend.learn(picked, logits.astype(np.float32))
    assert np.abs(blend.bias - bias).max() < 0.4
    assert blend.weights[0] == pytest.approx(1, abs=0.1)


def test_it_forgets_how_it_was_before() -> None:
    rng, blend = np.random.default_rng(0), Blend((1.0,), 16)
    for gain, lessons in ((1.0, 1000), (0.2, 15_000)):
        for _ in range(lessons):
            picked, logits = told(rng, gain)
            blend.learn(picked, *logits)
    assert abs(blend.weights[0] - 0.2) < 0.1


def test_before_any_lesson_it_believes_what_it_was_given() -> None:
    logits, blend = np.array([[-2.0, 0.0, 2.0]], dtype=np.float32), Blend((1.0,), 3)
    assert np.array_equal(blended(np.array([*blend.weights, 0], dtype=np.float32), logits), logits)
    assert not blend.bias.any()


def test_no_logit_is_too_large() -> None:
    rng, blend = np.random.default_rng(0), Blend((1.0,), 8)
    for sign in (1, -1):
        blend.learn(rng.random((1, 8)) < 0.5, np.full((1, 8), sign * 1e9, dtype=np.float32))
    assert np.isfinite(blend.weights).all()
    assert np.isfinite(blend.bias).all()


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_what_is_missed_is_one_less_the_logistic_function(values: list[float]) -> None:
    logits = np.array(values, dtype=np.float32)
    plain = 1 / (1 + np.exp(np.clip(logits.astype(np.float64), -50, 50)))
    assert np.abs(missed(logits) - plain).max() < 1e-6


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
def test_a_blend_is_the_weighted_sum_of_its_logits_and_a_bias(count: int, rows: int, experts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=4, size=(count, rows, experts)).astype(np.float32)
    weights = rng.normal(size=(count + 1, experts)).astype(np.float32)
    plain = (logits.astype(np.float64) * weights[:-1, None]).sum(axis=0) + weights[-1]
    assert np.abs(blended(weights, *logits) - plain).max() < 1e-4


def test_one_surprise_after_long_certainty_does_not_throw_it_away() -> None:
    rng, blend = np.random.default_rng(0), Blend((1.0,), 32)

    def lesson(turned: int = 0) -> None:
        picked = np.zeros((1, 32), dtype=np.bool_)
        picked[0, rng.permutation(32)[:4]] = True
        logits = (np.where(picked, 4, -6) + rng.normal(0, 0.5, picked.shape)).astype(np.float32)
        blend.learn(np.roll(picked, turned, axis=1), logits)

    for _ in range(20_000):
        lesson()
    before = blend.weights.copy()
    for _ in range(3):
        lesson(turned=1)
    assert np.abs(blend.weights - before).max() < 2


@pytest.mark.parametrize("size", [5, 9.2])
@pytest.mark.parametrize("names", [0, 8])
def test_a_predictor_that_is_sure_and_wrong_is_left_behind_and_no_lesson_goes_beyond_the_mark(
    size: float, names: int
) -> None:
    """It names ``names`` of 128 experts; eight others are picked."""
    rng, blend, losses = np.random.default_rng(0), Blend((1.0,), 128), []
    for _ in range(60):
        picked, named = (np.zeros((4, 128), dtype=np.bool_) for _ in range(2))
        for row in range(4):
            picked[row, rng.choice(128, 8, replace=False)] = True
            named[row, rng.choice(128, names, replace=False)] = True
        logits = np.where(named, size, -size).astype(np.float32)
        total = blend.weights[0] * logits + blend.bias
        losses.append(float(np.mean(np.logaddexp(0, total) - picked * total)))
        blend.learn(picked, logits)
    # What knows nothing but the share that is picked has 0.234.
    assert max(losses[1:]) < 1.0
    assert np.mean(losses[30:]) < 0.32


def test_logits_that_are_all_alike_teach_a_bias_and_nothing_breaks() -> None:
    blend, picked = Blend((1.0,), 8), np.arange(8)[None] < 2
    for _ in range(40_000):
        blend.learn(np.roll(picked, _, axis=1), np.full((1, 8), -1, dtype=np.float32))
    assert np.isfinite(blend.weights).all()
    assert 1 / (1 + np.exp(blend.weights[0] - blend.bias)) == pytest.approx(np.full(8, 0.25), abs=0.05)
