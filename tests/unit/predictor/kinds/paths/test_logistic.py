from __future__ import annotations

import numpy as np
import pytest

from greenroom.predictor.kinds.paths.logistic import fitted


def drawn(rows: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(3, rows, 4)).astype(np.float32)
    logits = np.tensordot(np.array([1.0, -2.0, 0.0]), features, 1) + np.array([0, 1, -1, 0])
    return features, (rng.random((rows, 4)) < 1 / (1 + np.exp(-logits))).astype(np.float32)


def test_it_finds_the_weights_that_the_rows_were_drawn_by() -> None:
    features, picked = drawn(20_000)
    weights, bias = fitted(features, picked, np.zeros(4, np.float32), np.zeros(3, np.float32))
    assert weights == pytest.approx([1, -2, 0], abs=0.05)
    assert bias == pytest.approx([0, 1, -1, 0], abs=0.1)


def test_few_rows_leave_it_near_where_it_began_and_none_or_no_time_just_there() -> None:
    begin = np.array([1, 1, 1], dtype=np.float32)
    features, picked = drawn(3)
    weights, _ = fitted(features, picked, np.zeros(4, np.float32), begin)
    assert np.abs(weights - begin).max() < 1.5
    for rows, is_up in ((0, lambda: False), (3, lambda: True)):
        weights, bias = fitted(features[:, :rows], picked[:rows], np.zeros(4, np.float32), begin, is_up)
        assert weights.tolist() == [1, 1, 1]
        assert not bias.any()
