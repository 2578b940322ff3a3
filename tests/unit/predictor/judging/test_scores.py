"""The measures of Table 2 against the same, written as loops over tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.judging.scores import coverage, overlap, ranked, score, score_ranked
from tests.unit.predictor.kinds.emoe.worlds import random_sequences


@given(st.integers(0, 200))
def test_as_counted_token_by_token(seed: int) -> None:
    random = np.random.default_rng(seed)
    actual = random_sequences(3, layers=2, slots=2, experts=4, seed=seed).counts
    predicted = random.dirichlet(np.ones(4), (3, 2, 2)).astype(np.float32)
    tokens = [  # (class that came, class that was said)
        ((layer, expert), (layer, int(predicted[prompt, layer, slot].argmax())))
        for prompt, layer, slot, expert in np.ndindex(*actual.shape)
        for _ in range(actual[prompt, layer, slot, expert])
    ]
    found = score(predicted, actual)
    assert found.accuracy == pytest.approx(sum(came == said for came, said in tokens) / len(tokens))
    weighed = {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    for one in {came for came, _ in tokens}:
        right = sum(came == said == one for came, said in tokens)
        came_so = sum(came == one for came, _ in tokens)
        said_so = sum(said == one for _, said in tokens)
        precision, recall = right / said_so if said_so else 0.0, right / came_so
        weighed["precision"] += precision * came_so / len(tokens)
        weighed["recall"] += recall * came_so / len(tokens)
        weighed["f1"] += (2 * precision * recall / (precision + recall) if right else 0.0) * came_so / len(tokens)
    for name, value in weighed.items():
        assert getattr(found, name) == pytest.approx(value), name
    assert found.recall == pytest.approx(found.accuracy)


def test_a_predictor_that_knows_the_answer_is_right() -> None:
    sequences = random_sequences(4)
    one = np.zeros_like(sequences.counts)
    np.put_along_axis(one, sequences.counts.argmax(axis=-1)[..., None], 7, axis=-1)
    found = score((one / 7).astype(np.float32), one)
    assert (found.accuracy, found.precision, found.recall, found.f1) == (1, 1, 1, 1)
    assert found.overlap == pytest.approx(1)


def test_overlap_and_coverage() -> None:
    forecast = np.asarray([[[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]]], np.float32)
    layers = np.asarray([[[0, 4, 4, 0], [0, 0, 0, 0]]])
    assert overlap(forecast, layers) == pytest.approx(0.5)  # the layer without a pick does not count
    assert coverage(forecast, layers, 0.5) == pytest.approx(0.5)
    assert coverage(forecast, layers, 0.75) == pytest.approx(1.0)
    assert coverage(forecast, layers, 0.01) == 0.0  # one expert at least


def test_a_forecast_without_slots_names_its_likeliest_in_turn() -> None:
    forecast = np.asarray([[[0.1, 0.5, 0.4]]], np.float32)
    assert ranked(forecast, 2).argmax(axis=-1).tolist() == [[[1, 2]]]
    assert ranked(forecast, 5).shape == (1, 1, 5, 3)
    actual = np.asarray([[[[0, 3, 0], [0, 0, 1]]]], np.uint16)
    found = score_ranked(forecast, actual)
    assert found.accuracy == 1.0
    assert found.overlap == pytest.approx(0.5 + 0.25)
