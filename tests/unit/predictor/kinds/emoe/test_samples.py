"""Counts by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.kinds.emoe import samples
from greenroom.predictor.kinds.emoe.samples import Sequences, count_slots, sequences_of


@given(rows=st.integers(0, 7), layers=st.integers(1, 3), slots=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_pick_is_counted_in_its_slot(rows: int, layers: int, slots: int, seed: int) -> None:
    picks = np.random.default_rng(seed).integers(0, 6, (rows, layers, slots)).astype(np.uint8)
    picks[picks == 5] = 255  # no pick
    counts = count_slots(picks, 5)
    for layer, slot, expert in np.ndindex(layers, slots, 5):
        assert counts[layer, slot, expert] == (picks[:, layer, slot] == expert).sum()


def test_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    picks = np.random.default_rng(0).integers(0, 5, (50, 3, 2))
    whole = count_slots(picks, 5)
    monkeypatch.setattr(samples, "_PICKS_AT_ONCE", 20)
    np.testing.assert_array_equal(count_slots(picks, 5), whole)


def test_what_is_too_much_for_16_bits_is_scaled_and_nothing_vanishes() -> None:
    picks = np.zeros((200_000, 1, 1), np.int64)
    picks[:50_000] = 1
    picks[0] = 2
    assert count_slots(picks, 4)[0, 0].tolist() == [65535, 21845, 1, 0]


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
