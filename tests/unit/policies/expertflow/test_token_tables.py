from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.tables import GRAMS, feature_names
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.expertflow import token_histories
from greenroom.policies.expertflow.token_tables import TokenTables
from tests.examples import examples
from tests.paths_files import KEEP, tables

CATALOGUE = Catalogue.uniform("m", layers=2, experts=3, top_k=1)
WIDTHS = (3, 3)
A, B, C, STRANGE = 4, 9, 11, 15  # the first three are known
NOTHING = [0] * 6


def logits(found: np.ndarray) -> np.ndarray:
    odds: np.ndarray = np.log(found / (1 - found))
    return odds


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def ask(of: TokenTables, *tokens: int, start: int = 0, sequence: int = 0) -> np.ndarray:
    """The logits of rows of one sequence, asked for together."""
    positions = np.arange(start, start + len(tokens))
    return logits(of.chances(np.full(len(tokens), sequence), positions, ids(*tokens)))


def always(number: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda sequences: np.full((len(sequences), 6), number, dtype=np.float32)


def test_a_rows_logits_are_the_sum_of_its_rows_in_all_tables() -> None:
    file = tables(
        WIDTHS,
        tokens=[A, B, C],
        token={(0,): [1, 0, 0, 0, 0, 0], (1,): [0, 1, 0, 0, 0, 0]},
        pair={(0, 1): [0, 0, 2, 0, 0, 0]},
        triple={(0, 1, 2): [0, 0, 0, 3, 0, 0]},
        before={(0,): [0, 0, 0, 0, 1, 0], (1,): [0, 0, 0, 0, 2, 0]},
        pair_before={(0, 1): [0, 0, 0, 0, 0, 4]},
        two_before={(0,): [0, 0, 0, 0, 0, 1]},
    )
    found = ask(TokenTables(file, CATALOGUE), A, B, C)
    assert found[0] == pytest.approx([1, 0, 0, 0, 0, 0], abs=1e-5)
    assert found[1] == pytest.approx([0, 1, 2, 0, 1, 0], abs=1e-5)
    assert found[2] == pytest.approx([0, 0, 0, 3, 2, 5], abs=1e-5)


def test_weights_count_by_layer_and_what_is_usual_is_added() -> None:
    file = tables(WIDTHS, tokens=[A], token={(0,): [2] * 6})
    file.tensors["weights"][0, 0] = [0.5, 2]
    file.tensors["popularity"][:] = -1
    file.tensors["bias"][0] = [0, 0, 0, 0, 0, 1]
    assert ask(TokenTables(file, CATALOGUE), A)[0] == pytest.approx([0, 0, 0, 3, 3, 4], abs=1e-5)


def test_earlier_tokens_count_by_a_moving_average_of_the_token_table() -> None:
    file = tables(
        WIDTHS, tokens=[A, B], token={(0,): [4] * 6, (1,): [8] * 6}, weights={"token": 0, "context_0": 1}
    )  # fmt: skip
    of = TokenTables(file, CATALOGUE)
    assert KEEP == 0.5
    found = ask(of, A, B, STRANGE, A)
    assert found[:, 0] == pytest.approx([0, 2, 5, 2.5], abs=1e-5)
    assert ask(of, A, start=4)[0, 0] == pytest.approx(3.25, abs=1e-5)


def test_the_past_counts_above_what_is_usual_and_more_where_the_token_is_unknown() -> None:
    file = tables(WIDTHS, tokens=[A], token={(0,): [1] * 6}, weights={"past": 0.5, "past_of_unknown": 0.25})
    file.tensors["popularity"][:] = -2
    of = TokenTables(file, CATALOGUE, always(2.0))
    assert ask(of, A)[0] == pytest.approx([-2 + 1 + 2] * 6, abs=1e-5)
    assert ask(of, STRANGE, start=1)[0] == pytest.approx([-2 + 3] * 6, abs=1e-5)
    assert ask(of, 10**6, start=2)[0] == pytest.approx([-2 + 3] * 6, abs=1e-5), "beyond the vocabulary"


def test_where_no_past_is_told_the_weights_are_those_fitted_without() -> None:
    file = tables(WIDTHS, tokens=[A], token={(0,): [1] * 6}, weights={"past": 1})
    file.tensors["weights"][0, 0] = 3
    alone = [3.0] * 6
    for past in (None, lambda _: None, always(np.nan)):
        assert ask(TokenTables(file, CATALOGUE, past), A)[0] == pytest.approx(alone, abs=1e-5)
    some = np.array([[np.nan, 1, np.nan, 1, 1, 1]], dtype=np.float32)
    of = TokenTables(file, CATALOGUE, lambda _: some)
    assert ask(of, A)[0] == pytest.approx([1, 2, 1, 2, 2, 2], abs=1e-5), "NaN counts as 0"


OWN = {"same_token_1": 1.0, "same_token_2": 2.0, "same_token_3": 4.0, "same_pair": 8.0, "has_same_token_1": -0.5}


def test_what_rows_of_the_same_token_have_picked_counts_newest_first() -> None:
    of = TokenTables(tables(WIDTHS, weights=OWN), CATALOGUE, always(0.0))
    ask(of, STRANGE, A, STRANGE, B)
    assert not ask(of, STRANGE, start=4).any(), "no picks were told"
    picks = np.array([[[0], [0]], [[1], [1]], [[2], [0]], [[1], [1]], [[1], [2]]])
    of.picked(np.zeros(5, dtype=np.int64), np.arange(5), picks)
    # earlier: at 4 it picked 1 and 2, at 2 it picked 2 and 0, at 0 it picked 0 and 0
    assert ask(of, STRANGE, start=5)[0] == pytest.approx([3.5, 0.5, 1.5, 5.5, -0.5, 0.5], abs=1e-5)
    of.picked(ids(0), ids(5), np.array([[[3], [2]]]))  # none in layer 0
    ask(of, A, start=6)
    of.picked(ids(0), ids(6), np.array([[[0], [0]]]))
    found = ask(of, STRANGE, start=7)[0]
    # 5, 4, 2 as tokens; 2 too, since an A came before it
    assert found == pytest.approx([-0.5, 1.5, 3.5 + 8, 3.5 + 8, -0.5, 2.5], abs=1e-3)


def test_a_sequence_is_forgotten_with_its_end_and_others_know_nothing_of_it() -> None:
    of = TokenTables(tables(WIDTHS, weights=OWN), CATALOGUE, always(0.0))
    ask(of, A)
    of.picked(ids(0), ids(0), np.array([[[1], [1]]]))
    assert not ask(of, A, sequence=1).any()
    assert ask(of, A, start=1).any()
    of.end(0)
    of.end(7)
    assert not ask(of, A, start=1).any()


def test_a_row_asked_for_again_is_foretold_as_before_and_its_picks_count_no_more() -> None:
    of = TokenTables(tables(WIDTHS, tokens=[A], token={(0,): [3] * 6}, weights=OWN | {"context_0": 1}),
                     CATALOGUE, always(0.0))  # fmt: skip
    first = ask(of, A, A, B)
    assert np.array_equal(ask(of, A, A, B), first)
    of.picked(ids(0, 0), ids(0, 1), np.array([[[1], [1]], [[2], [2]]]))
    later = ask(of, A, start=3)
    ask(of, C, start=4)
    assert np.array_equal(ask(of, A, start=3), later), "one step further back than was asked last"


def test_what_comes_long_after_begins_anew_and_long_sequences_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_histories, "MOST", 8)
    of = TokenTables(tables(WIDTHS, weights=OWN, before={}), CATALOGUE, always(0.0))
    for position in range(100):
        ask(of, position % 5, start=position)
        of.picked(ids(0), ids(position), np.array([[[1], [1]]]))
    history = of._histories[0]
    assert history.end == 100
    assert history.end - history.start <= 17
    assert ask(of, 100 % 5, start=100).any()
    assert not ask(of, 0, start=5000).any()
    ask(of, 0, start=2)  # before all that is remembered
    assert of._histories[0].start == 2


SOME = tables(
    WIDTHS, tokens=[0, 1, 2],
    token={(i,): [i, 1, -i, 2, 0, i] for i in range(3)},
    pair={(i, j): [i - j, j, 1, 0, i, -1] for i in range(3) for j in range(2)},
    triple={(0, 1, 2): [5, 0, 0, 0, 0, 5]}, before={(2,): [1, 2, 3, 4, 5, 6]},
    weights=OWN | {"past": 0.7, "past_of_unknown": 0.2, "context_0": 0.3},
)  # fmt: skip
STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=6), min_size=1, max_size=6
)


@settings(max_examples=examples(60), deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_rows_asked_for_together_are_foretold_as_one_by_one_and_again_the_same(
    steps: list[list[tuple[int, int]]], random: Any
) -> None:
    def past(sequences: np.ndarray) -> np.ndarray:
        found = np.sin(np.outer(sequences + 1, np.arange(6))).astype(np.float32)
        found[sequences == 2] = np.nan
        return found

    together, single = TokenTables(SOME, CATALOGUE, past), TokenTables(SOME, CATALOGUE, past)
    lengths = dict.fromkeys(range(4), 0)
    for rows in steps:
        sequences, tokens, positions = ids(*(s for s, _ in rows)), ids(*(t for _, t in rows)), []
        for sequence, _ in rows:
            positions.append(lengths[sequence])
            lengths[sequence] += 1
        found = together.chances(sequences, ids(*positions), tokens)
        assert np.array_equal(together.chances(sequences, ids(*positions), tokens), found)
        for row, asked in enumerate(zip(sequences, positions, tokens, strict=True)):
            assert np.array_equal(single.chances(*(ids(one) for one in asked))[0], found[row])
        picks = np.array([[[random.randrange(4)] for _ in range(2)] for _ in rows])
        for of in (together, single):
            of.picked(sequences, ids(*positions), picks)


def test_nothing_asked_is_nothing_answered() -> None:
    assert TokenTables(tables(WIDTHS), CATALOGUE).chances(ids(), ids(), ids()).shape == (0, 6)


def test_files_of_another_model_form_or_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="one of this model"):
        TokenTables(tables((3, 3, 3)), CATALOGUE)
    with pytest.raises(InvalidConfig, match="vocabulary"):
        TokenTables(tables(WIDTHS, vocabulary=17), CATALOGUE, vocabulary=16)


def test_the_version_is_the_files() -> None:
    file = tables(WIDTHS)
    assert TokenTables(PathsFile.of_arrays(file.arrays, WIDTHS, version=7), CATALOGUE).version == "7"
    assert len(feature_names(1)) == len(GRAMS) + 1 + 2 + 8
