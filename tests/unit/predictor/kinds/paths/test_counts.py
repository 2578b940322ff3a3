from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.artifacts.paths_forms.tables import BACKS_OFF_TO, GRAMS
from greenroom.predictor.kinds.paths.counts import SHRINK, GramCounts, backed_off, looked_up, same_before, tokens_back

STARTS = np.array([0, 3, 6])
PLACES = np.array([0, 1, 0, 0, 1, 1])
SEQUENCE = np.array([0, 0, 0, 1, 1, 1])
LEARNT = np.ones(6, dtype=bool)
PICKED = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [0, 1], [1, 0]], dtype=np.float32)
PRIOR = np.array([0.5, 0.5], dtype=np.float32)


def counts(name: str, learnt: np.ndarray = LEARNT) -> GramCounts:
    back = np.stack([tokens_back(PLACES, STARTS, one) for one in range(3)], axis=1)
    return GramCounts(name, back, 2, learnt, SEQUENCE)


def test_tokens_before_are_of_the_same_sequence() -> None:
    assert tokens_back(PLACES, STARTS, 1).tolist() == [-1, 0, 1, -1, 0, 1]
    assert tokens_back(PLACES, STARTS, 2).tolist() == [-1, -1, 0, -1, -1, 0]
    assert looked_up(np.array([2, 5]), np.array([5, 1, 9])).tolist() == [1, -1, -1]
    assert looked_up(np.array([], dtype=np.int64), np.array([5])).tolist() == [-1]


def test_a_tables_chances_are_counts_shrunk_towards_the_prior() -> None:
    token = counts("token")
    shrink = SHRINK["token"]
    assert token.keys.tolist() == [[0], [1]]
    found = token.chances(token.sums(PICKED), np.stack([PRIOR, PRIOR]))
    assert found[0] == pytest.approx([(3 + shrink / 2) / (3 + shrink), (shrink / 2) / (3 + shrink)])
    assert found[1] == pytest.approx([(1 + shrink / 2) / (3 + shrink), (2 + shrink / 2) / (3 + shrink)])


def test_of_a_row_that_is_learnt_from_only_other_sequences_speak() -> None:
    token, shrink = counts("token"), SHRINK["token"]
    rows = np.array([0, 1])
    found = token.chances_without(rows, token.sums(PICKED), np.stack([PRIOR, PRIOR]))
    assert found[0] == pytest.approx([(1 + shrink / 2) / (1 + shrink), (shrink / 2) / (1 + shrink)])
    assert found[1] == pytest.approx([(1 + shrink / 2) / (2 + shrink), (1 + shrink / 2) / (2 + shrink)])
    assert token.counts_without(rows).tolist() == [1, 2]
    held_out = counts("token", SEQUENCE == 0)
    assert held_out.counts_without(np.array([3, 4])).tolist() == [2, 1], "all of them are others"


def test_pairs_back_off_to_their_last_token() -> None:
    grams = {name: counts(name) for name in ("token", "pair", "triple")}
    assert grams["pair"].keys.tolist() == [[0, 1], [1, 0], [1, 1]]
    assert backed_off(grams, "pair", 2).tolist() == [1, 0, 1]
    assert grams["triple"].keys.tolist() == [[0, 1, 0], [0, 1, 1]]
    assert backed_off(grams, "triple", 2).tolist() == [1, 2]


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 2))
def test_a_row_is_in_a_table_where_enough_sequences_have_it(told: list[list[int]], least: int, held_out: int) -> None:
    """By loops over the sequences that are learnt from; and a row learnt from is foretold by enough others alone."""
    starts = np.cumsum([0, *map(len, told)])
    places = np.array([one for row in told for one in row], dtype=np.int64)
    sequence = np.repeat(np.arange(len(told)), [len(one) for one in told])
    learnt = sequence < len(told) - held_out
    back = np.stack([tokens_back(places, starts, one) for one in range(3)], axis=1)
    grams = {name: GramCounts(name, back, 4, learnt, sequence, least) for name in GRAMS}
    for name, offsets in GRAMS.items():
        shared: dict[tuple[int, ...], set[int]] = {}
        keys: list[tuple[int, ...] | None] = []
        for number, row in enumerate(told):
            for place in range(len(row)):
                key = tuple(row[place - back] for back in offsets) if place >= max(offsets) else None
                keys.append(key)
                if key is not None and number < len(told) - held_out:
                    shared.setdefault(key, set()).add(number)
        kept = sorted(key for key, of in shared.items() if len(of) >= least)
        assert [tuple(one) for one in grams[name].keys.tolist()] == kept
        assert grams[name].rare == len(shared) - len(kept)
        for at, (key, number) in enumerate(zip(keys, sequence.tolist(), strict=True)):
            others = set() if key is None else shared.get(key, set()) - {number}
            assert (grams[name].place[at] >= 0) == (len(others) >= least)
    for name in BACKS_OFF_TO:
        assert (backed_off(grams, name, 4) >= 0).all()


def test_earlier_rows_of_the_same_token_and_pair() -> None:
    ids = np.array([7, 8, 7, 8, 7, 7, 8, 7])
    found = same_before(ids, np.array([0, 6, 8]))
    assert found[0].tolist() == [-1, -1, 0, 1, 2, 4, -1, -1]
    assert found[1].tolist() == [-1, -1, -1, -1, 0, 2, -1, -1]
    assert found[2].tolist() == [-1, -1, -1, -1, -1, 0, -1, -1]
    assert found[3].tolist() == [-1, -1, -1, 1, 2, -1, -1, -1]
    assert (same_before(np.full(4, -1), np.array([0, 4])) == -1).all(), "those can not be told apart"
