"""The head that is fitted is the minimum of what it says it minimises."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.tasktype.linear.head import Rows, fit_shares, probabilities

PENALTY = 0.5


def rows_of(dense: np.ndarray) -> Rows:
    named = [{str(column): float(value) for column, value in enumerate(row) if value} for row in dense]
    return Rows.of(named, {str(column): column for column in range(dense.shape[1])})


@pytest.fixture
def dense() -> np.ndarray:
    random = np.random.default_rng(7)
    return np.asarray(random.normal(size=(30, 9)) * (random.random((30, 9)) < 0.5), dtype=np.float32)


def test_products_and_sums_are_those_of_the_dense_rows(dense: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.tasktype.linear.head._COLUMNS_AT_ONCE", 4)
    rows = rows_of(dense)
    shares = np.random.default_rng(1).normal(size=(30, 3)).astype(np.float32)
    np.testing.assert_allclose(rows.products(), dense @ dense.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows.combined(shares), dense.T @ shares, rtol=1e-4, atol=1e-5)


def test_features_that_are_not_known_are_passed_over() -> None:
    rows = Rows.of([{"a": 1.0, "b": 2.0}, {"b": 3.0}, {}], {"a": 0})
    np.testing.assert_array_equal(rows.products(), [[1, 0, 0], [0, 0, 0], [0, 0, 0]])


def test_the_gradient_vanishes_at_the_fitted_head(dense: np.ndarray) -> None:
    random = np.random.default_rng(3)
    targets = random.dirichlet([0.3, 0.3, 0.3], size=30).astype(np.float32)
    weights = random.random(30).astype(np.float32)
    shares = fit_shares(dense @ dense.T, targets, weights, penalty=PENALTY, rounds=500)
    head = dense.T @ shares
    error = weights[:, None] * (probabilities(dense @ head) - targets)
    np.testing.assert_allclose(dense.T @ error + PENALTY * head, 0, atol=1e-4)
    assert np.abs(dense.T @ (weights[:, None] * (1 / 3 - targets))).max() > 0.1, "at the start it did not vanish"
