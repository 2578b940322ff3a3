from __future__ import annotations

import numpy as np

from greenroom.policies.duoserve.blend import Blend


def told(rng: np.random.Generator, *gains: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """What happens has the sum of the logits, each times its gain, as its logit."""
    logits = [rng.normal(scale=2, size=(4, 16)) for _ in gains]
    total = sum(gain * one for gain, one in zip(gains, logits, strict=True))
    return rng.random((4, 16)) < 1 / (1 + np.exp(-total)), logits


def test_it_learns_how_far_each_predictor_is_to_be_believed() -> None:
    rng, blend = np.random.default_rng(0), Blend((1.0, 1.0))
    for _ in range(2000):
        picked, logits = told(rng, 0.5, 0.0)
        blend.learn(picked, *logits)
    assert np.abs(blend.weights - [0.5, 0.0, 0.0]).max() < 0.05


def test_it_forgets_how_it_was_before() -> None:
    rng, blend = np.random.default_rng(0), Blend((1.0,))
    for gain, lessons in ((1.0, 1000), (0.2, 15_000)):
        for _ in range(lessons):
            picked, logits = told(rng, gain)
            blend.learn(picked, *logits)
    assert abs(blend.weights[0] - 0.2) < 0.1


def test_before_any_lesson_it_believes_what_it_was_given() -> None:
    logits = np.array([[-2.0, 0.0, 2.0]])
    assert np.allclose(Blend((1.0,)).chances(logits), 1 / (1 + np.exp(-logits)))


def test_no_logit_is_too_large() -> None:
    rng, blend = np.random.default_rng(0), Blend((1.0,))
    for sign in (1, -1):
        blend.learn(rng.random((1, 8)) < 0.5, np.full((1, 8), sign * 1e9))
    assert np.isfinite(blend.weights).all()
    assert np.isfinite(blend.chances(np.full((1, 8), 1e9))).all()
