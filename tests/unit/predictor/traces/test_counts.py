"""What a trace says, and which traces say nothing that can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from greenroom.predictor.traces import counts as module
from greenroom.predictor.traces.counts import BadTrace, Shape, count, count_slots, tokens_of
from tests.unit.predictor.worlds import trace

SHAPES = st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 3))


def plain(picks: np.ndarray[Any, Any], experts: int, absent: int) -> tuple[Any, Any]:
    """The same by loops."""
    rows, layers, _ = picks.shape
    popularity = np.zeros((layers, experts))
    affinity = np.zeros((max(0, layers - 1), experts, experts))
    for row in range(rows):
        for layer in range(layers):
            for one in picks[row, layer]:
                if one == absent:
                    continue
                popularity[layer, one] += 1
                for other in picks[row, layer + 1] if layer + 1 < layers else ():
                    if other != absent:
                        affinity[layer, one, other] += 1
    for sums in (*popularity, *affinity):
        sums /= max(1, sums.sum())
    return popularity, affinity


@given(st.data(), SHAPES, st.sampled_from(["uint8", "uint16"]), st.integers(1, 400))
def test_counts_are_those_of_loops(data: st.DataObject, shape: Any, dtype: str, at_once: int) -> None:
    absent = int(np.iinfo(dtype).max)
    picks = data.draw(hnp.arrays(np.int64, shape, elements=st.sampled_from([0, 1, 2, 3, 4, absent])))
    before, module._PAIRS_AT_ONCE = module._PAIRS_AT_ONCE, at_once
    try:
        counted = count(trace(picks, 5, dtype=dtype))
    finally:
        module._PAIRS_AT_ONCE = before
    popularity, affinity = plain(picks, 5, absent)
    np.testing.assert_allclose(counted.popularity, popularity, rtol=1e-6)
    np.testing.assert_allclose(counted.affinity, affinity, rtol=1e-6)
    assert counted.shape == Shape(shape[1], 5)
    assert counted.popularity.dtype == counted.affinity.dtype == np.float32


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"experts": b"\0" * 11}, "11 bytes"),
        ({"rows": 3}, "3 rows"),
        ({"prompt_rows": 3}, "3 rows of a prompt"),
        ({"num_experts": 1}, "2 picks of 1"),
        ({"experts": bytes([0, 1, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0])}, "expert 9"),
        ({"num_experts": 256}, "no room in uint8"),
        ({"layers": 10**12}, "bytes of experts"),
        ({"rows": 2**62, "layers": 2**62}, "bytes of experts"),
        ({"k": 3}, "12 bytes"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        count(trace(np.zeros((2, 3, 2), int), 8, **fields))


def test_tokens_are_those_of_the_rows() -> None:
    picks = np.zeros((2, 1, 1), int)
    told = tokens_of(trace(picks, 8, tokens=np.array([7, 2**24 - 1], "<u4").tobytes()))
    assert told is not None
    assert told.tolist() == [7, 2**24 - 1]
    assert tokens_of(trace(picks, 8)) is None


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (np.array([111, 222, 333], "<u4").tobytes(), "12 bytes of tokens, and 2 rows of uint32 are 8"),
        (b"\0" * 7, "7 bytes of tokens"),
        (np.array([111, 2**24], "<u4").tobytes(), "tokens: row 1 must be an id below 16,777,216"),
        (np.array([2**31, 222], "<u4").tobytes(), "tokens: row 0 must be an id"),
    ],
)
def test_other_tokens_than_the_rows_are_refused_and_not_told(tokens: bytes, says: str) -> None:
    with pytest.raises(BadTrace, match=says) as caught:
        tokens_of(trace(np.zeros((2, 1, 1), int), 8, tokens=tokens))
    assert not {"111", "222", str(2**31)} & set(str(caught.value).replace(",", " ").split())


def test_an_index_that_is_neither_an_expert_nor_none_is_refused() -> None:
    with pytest.raises(BadTrace, match="expert 254"):
        count(trace([[[254]]], 8))
    assert count(trace([[[255]]], 8)).popularity.sum() == 0
    assert count(trace([[[65535]]], 300, dtype="uint16")).popularity.sum() == 0


# -- by slot -----------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(module, "_PICKS_AT_ONCE", 20)
    np.testing.assert_array_equal(count_slots(picks, 5), whole)


def test_what_is_too_much_for_16_bits_is_scaled_and_nothing_vanishes() -> None:
    picks = np.zeros((200_000, 1, 1), np.int64)
    picks[:50_000] = 1
    picks[0] = 2
    assert count_slots(picks, 4)[0, 0].tolist() == [65535, 21845, 1, 0]
