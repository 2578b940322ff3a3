"""Sequences of one model, by slot and by layer."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.predictor.kinds.emoe.sequences import Sequences, sequences_of


def test_the_previous_one_is_the_last_of_its_type() -> None:
    counts = np.ones((5, 1, 1, 2), np.uint16)
    assert Sequences(("a", "b", "a", "a", "b"), counts).previous().tolist() == [-1, -1, 0, 2, 1]


def test_shares_are_of_a_slot_and_of_a_layer() -> None:
    counts = np.asarray([[[[3, 1], [0, 0]], [[0, 2], [2, 0]]]], np.uint16)
    sequences = Sequences(("a",), counts)
    assert sequences.by_slot()[0].tolist() == [[[0.75, 0.25], [0, 0]], [[0, 1], [1, 0]]]
    assert sequences.by_layer()[0].tolist() == [[0.75, 0.25], [0.5, 0.5]]


def test_sequences_without_a_row_are_left_out() -> None:
    picks = np.zeros((3, 1, 1), np.uint8)
    found = sequences_of(picks, [0, 2, 2, 3], ["a", "b", "c"], 2)
    assert found.tasks == ("a", "c")
    assert found.counts[:, 0, 0, 0].tolist() == [2, 1]


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences"):
        Sequences(("a", "b"), np.ones((3, 1, 1, 2), np.uint16))
