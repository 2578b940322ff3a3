"""What T5Paths keeps of sequences, and how it answers; its numbers are compared in tests/unit/predictor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import T5Shape
from greenroom.core.errors import InvalidConfig
from greenroom.core.tensors import Damaged
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.expertflow.t5_paths import CACHE_BYTES, T5Paths
from tests.examples import examples
from tests.random_t5 import SMALL, random_t5

FILE = random_t5()
CATALOGUE = Catalogue("random", experts_per_layer=[4, 3], top_k=[2, 2], expert_bytes=[1, 1])
PROMPT = np.array([5, 9, 7, 30, 5])
TEXT = np.random.default_rng(1).integers(0, 45, size=40)
"""Some of its tokens are not known."""


def asked(paths: T5Paths, rows: Sequence[tuple[int, int, int]]) -> NDArray[np.float32]:
    """Of sequences, positions and tokens."""
    sequences, positions, tokens = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return paths.chances(sequences, positions, tokens)


def of_text(sequence: int, begin: int, end: int, text: NDArray[np.integer] = TEXT) -> list[tuple[int, int, int]]:
    return [(sequence, place, int(text[place])) for place in range(begin, end)]


def begun(*sequences: int, **options: Any) -> T5Paths:
    paths = T5Paths(FILE, CATALOGUE, **options)
    for sequence in sequences:
        paths.begin(sequence, PROMPT[: 1 + sequence % len(PROMPT)])
    return paths


def slots_of(count: int) -> int:
    """Bytes of the caches of so many sequences."""
    return count * SMALL.sequence_bytes


def test_one_by_one_is_the_same_as_all_rows_at_once_in_pieces_of_any_size() -> None:
    whole = asked(begun(1), of_text(1, 0, 40))
    assert whole.shape == (40, 7)
    one_by_one = begun(1)
    found = np.concatenate([asked(one_by_one, of_text(1, at, at + 1)) for at in range(40)])
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-6)
    in_pieces = begun(1)
    bounds = [0, 3, 4, 17, 25, 26, 40]
    found = np.concatenate([asked(in_pieces, of_text(1, a, b)) for a, b in itertools.pairwise(bounds)])
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-6)


def test_company_and_order_of_sequences_do_not_matter() -> None:
    texts = {sequence: np.roll(TEXT, sequence) for sequence in range(5)}
    alone = {n: asked(begun(n), of_text(n, 0, 20, texts[n])) for n in texts}
    together = begun(*texts)
    asked(together, [row for n in texts for row in of_text(n, 0, 3 + n, texts[n])])
    at = {n: 3 + n for n in texts}
    random = np.random.default_rng(2)
    for _ in range(8):
        chosen = random.permutation(5)[: random.integers(1, 6)].tolist()
        rows = [row for n in chosen for row in of_text(n, at[n], at[n] + 1, texts[n])]
        found = asked(together, rows)
        for row, n in enumerate(chosen):
            np.testing.assert_allclose(found[row], alone[n][at[n]], rtol=1e-4, atol=1e-6)
            at[n] += 1


def test_rows_of_one_sequence_need_not_lie_side_by_side() -> None:
    texts = {sequence: np.roll(TEXT, sequence) for sequence in (1, 2)}
    rows = [row for pair in zip(*(of_text(n, 0, 9, texts[n]) for n in texts), strict=True) for row in pair]
    found = asked(begun(1, 2), rows)
    for place, n in enumerate(texts):
        expected = asked(begun(n), of_text(n, 0, 9, texts[n]))
        np.testing.assert_allclose(found[place::2], expected, rtol=1e-4, atol=1e-6)


@given(end=st.integers(1, 30), back=st.integers(1, SMALL.window))
@settings(max_examples=examples(25), deadline=None)
def test_what_is_asked_for_again_gets_the_same_answer_and_other_tokens_take_its_place(end: int, back: int) -> None:
    paths, start = begun(1), max(0, end - back)
    first = asked(paths, of_text(1, 0, end))[start:]
    np.testing.assert_allclose(asked(paths, of_text(1, start, end)), first, rtol=1e-4, atol=1e-6)
    other = TEXT.copy()
    other[start:] = (other[start:] + 7) % 45
    expected = asked(begun(1), of_text(1, 0, 40, other))[start:]
    np.testing.assert_allclose(asked(paths, of_text(1, start, 40, other)), expected, rtol=1e-4, atol=1e-6)


def test_what_lies_behind_the_asked_place_is_forgotten() -> None:
    paths = begun(1)
    asked(paths, of_text(1, 0, 12))
    asked(paths, of_text(1, 8, 9))
    gap = asked(paths, of_text(1, 11, 12))
    other = begun(1)
    asked(other, of_text(1, 0, 9))
    np.testing.assert_allclose(gap, asked(other, of_text(1, 11, 12)), rtol=1e-4, atol=1e-6)


def test_prompt_and_context_count_and_only_within_the_window() -> None:
    other = begun(2)
    before = asked(begun(1), of_text(1, 0, 40))
    assert np.abs(asked(other, of_text(2, 0, 40)) - before).max() > 0.01, "another prompt"
    changed = TEXT.copy()
    changed[10] = (changed[10] + 11) % 40
    after = asked(begun(1), of_text(1, 0, 40, changed))
    unlike = np.abs(after - before).max(axis=1) > 1e-4
    reach = SMALL.decoder_layers * (SMALL.window - 1)
    assert np.flatnonzero(unlike).min() == 10
    assert 11 <= np.flatnonzero(unlike).max() <= 10 + reach


def test_a_window_of_one_knows_the_token_and_the_prompt_alone() -> None:
    paths = begun(1, window=1)
    in_order = asked(paths, of_text(1, 0, 30))
    alone = np.concatenate([asked(begun(1, window=1), of_text(1, at, at + 1)) for at in range(30)])
    np.testing.assert_allclose(in_order, alone, rtol=1e-4, atol=1e-6)
    assert np.abs(in_order - asked(begun(1), of_text(1, 0, 30))).max() > 0.01
    with pytest.raises(InvalidConfig, match="window: 7"):
        begun(window=7)


def test_more_sequences_than_the_bytes_hold_still_get_answers() -> None:
    paths = begun(*range(9), cache_bytes=slots_of(3))
    assert paths.nbytes < slots_of(3) + 1e6
    found = np.empty((0, 7), dtype=np.float32)
    for at in range(4):
        found = asked(paths, [row for n in range(9) for row in of_text(n, at, at + 1)])
        assert found.shape == (9, 7)
        assert ((found > 0) & (found < 1)).all()
        assert len(paths._cache) == 3
    assert paths.lost == 33
    fresh = begun(8)
    np.testing.assert_allclose(found[8], asked(fresh, of_text(8, 3, 4))[0], rtol=1e-4, atol=1e-6)


def test_an_ended_sequence_leaves_nothing_and_its_place_is_taken_anew() -> None:
    paths = begun(1, cache_bytes=slots_of(1))
    asked(paths, of_text(1, 0, 9))
    paths.end(1)
    assert (len(paths._cache), len(paths._prompts)) == (0, 0)
    paths.begin(2, PROMPT[:3])
    np.testing.assert_allclose(asked(paths, of_text(2, 0, 9)), asked(begun(2), of_text(2, 0, 9)), rtol=1e-4)
    assert paths.lost == 0
    paths.end(77)


def test_a_sequence_that_never_began_and_one_without_a_prompt_are_answered() -> None:
    paths = T5Paths(FILE, CATALOGUE)
    unbegun = asked(paths, of_text(5, 0, 4))
    paths.begin(6, np.empty(0, dtype=np.int64))
    np.testing.assert_allclose(asked(paths, of_text(6, 0, 4)), unbegun, rtol=1e-4)
    assert asked(paths, []).shape == (0, 7)


def test_tokens_that_are_not_known_are_all_alike() -> None:
    found = asked(begun(1, window=1), [(1, 0, 1), (1, 1, 44), (1, 2, 10**6), (1, 3, 5)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)
    assert np.abs(found[3] - found[0]).max() > 1e-3
    nothing = T5Paths(random_t5(tokens=range(0)), CATALOGUE)
    assert np.isfinite(asked(nothing, [(1, 0, 3)])).all()


def test_what_overflows_counts_as_no_chance() -> None:
    tensors = dict(FILE.tensors)
    tensors["head.weight"] = np.full_like(tensors["head.weight"], 6e4)
    for name in ("decoder.final_layer_norm.weight", "shared.weight"):
        tensors[name] = np.full_like(tensors[name], 6e4)
    paths = T5Paths(file_with(tensors), CATALOGUE)
    assert np.isfinite(asked(paths, of_text(1, 0, 5))).all()
    paths._network.head_bias[2] = np.nan
    found = asked(paths, of_text(1, 5, 8))
    assert (found[:, 2] == 0).all()


# -- with the past ---------------------------------------------------------------------------------------------------


def with_past(**other: Any) -> PathsFile:
    tensors = {
        "past.popularity": np.full(7, -0.5, np.float32),
        "past.bias": np.arange(7, dtype=np.float32) / 10,
        "past.weights": np.array([[0.5, 1], [0.25, 2], [3, 0]], np.float32),
    }
    return file_with({**FILE.tensors, **tensors, **other})


def logit(chance: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.log(chance / (1 - chance))
    return found


def test_what_a_sequence_has_picked_is_weighed_with_what_its_tokens_say() -> None:
    past = np.linspace(-2, 2, 7, dtype=np.float32)
    paths = T5Paths(with_past(), CATALOGUE, lambda sequences: np.tile(past, (len(sequences), 1)))
    rows = [(1, 0, 5), (1, 1, 1), (2, 0, 9)]
    own = logit(asked(T5Paths(FILE, CATALOGUE), rows))
    layer = np.array([0, 0, 0, 0, 1, 1, 1])
    weight = np.array([[0.25, 2], [3.25, 2], [0.25, 2]])[:, layer]  # the second token is not known
    expected = -0.5 + np.arange(7) / 10 + np.array([0.5, 1])[layer] * (own + 0.5) + weight * (past + 0.5)
    np.testing.assert_allclose(logit(asked(paths, rows)), expected, rtol=1e-3, atol=1e-3)


def test_a_sequence_without_a_past_is_foretold_by_its_tokens_alone() -> None:
    def past(sequences: NDArray[np.int64]) -> NDArray[np.float32]:
        found = np.full((len(sequences), 7), np.nan, dtype=np.float32)
        found[sequences == 2] = 1
        found[sequences == 3] = [1, 1, 1, 1, np.nan, 1, 1]
        return found

    rows = [(3, 0, 5), (1, 0, 5), (2, 0, 5)]
    found, own = asked(T5Paths(with_past(), CATALOGUE, past), rows), asked(T5Paths(FILE, CATALOGUE), rows)
    np.testing.assert_allclose(found[1], own[1], rtol=1e-5)
    assert np.abs(found[2] - own[2]).max() > 0.01
    assert np.isfinite(found).all()
    np.testing.assert_allclose(asked(T5Paths(with_past(), CATALOGUE, lambda _: None), rows), own, rtol=1e-5)
    np.testing.assert_allclose(asked(T5Paths(FILE, CATALOGUE, past), rows), own, rtol=1e-5)


# -- files -----------------------------------------------------------------------------------------------------------


def file_with(tensors: dict[str, Any], **fields: Any) -> PathsFile:
    known: dict[str, Any] = {"experts_per_layer": FILE.experts_per_layer, "vocabulary": FILE.vocabulary, **fields}
    return PathsFile(model="random", sequences=1, form="t5", tensors=tensors, **known)


def test_a_file_foretells_the_same_once_it_is_written_and_read() -> None:
    again = T5Paths(PathsFile.parse(FILE.dump()), CATALOGUE)
    np.testing.assert_array_equal(asked(again, of_text(1, 0, 9)), asked(T5Paths(FILE, CATALOGUE), of_text(1, 0, 9)))
    assert again.version == "1"
    with pytest.raises(Damaged):
        PathsFile.parse(FILE.dump()[:-2])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("shape", np.zeros(3, np.uint16), "whole numbers"),
        ("shape", np.array(SMALL._replace(heads=0), np.uint16), "heads"),
        ("shape", np.array(SMALL._replace(buckets=3), np.uint16), "buckets"),
        ("shape", np.array(SMALL._replace(window=5000), np.uint16), "window"),
        ("shape", np.array(SMALL._replace(heads=64, key=64), np.uint16), "64 of 64"),
        ("shape", np.array(SMALL._replace(inner=25), np.uint16), "DenseReluDense"),
        ("tokens", np.array([4, 3], np.uint32), "ascending"),
        ("tokens", np.array([3, 3], np.uint32), "ascending"),
        ("tokens", np.array([3, 400], np.uint32), "vocabulary"),
        ("tokens", np.zeros((2, 2), np.uint32), "token ids"),
        ("head.bias", np.full(7, np.inf, np.float16), "finite"),
        ("head.bias", np.zeros(7, np.float32), "float16"),
        ("head.bias", np.zeros(8, np.float16), r"\(7,\)"),
        ("head.bias", None, "head.bias"),
        ("past.weights", np.zeros((3, 2), np.float32), "past.bias"),
        ("another", np.zeros(1, np.float16), "another"),
    ],
)
def test_a_file_that_is_no_t5_is_refused(name: str, value: Any, said: str) -> None:
    tensors = {**FILE.tensors, name: value}
    if value is None:
        del tensors[name]
    with pytest.raises(InvalidConfig, match=said):
        file_with(tensors)


def test_another_form_and_another_models_file_are_refused() -> None:
    tables: Any = SimpleNamespace(form="tables")
    with pytest.raises(InvalidConfig, match="form"):
        T5Paths(tables, CATALOGUE)
    with pytest.raises(InvalidConfig, match="this model"):
        T5Paths(FILE, Catalogue("other", experts_per_layer=[4], top_k=[2], expert_bytes=[1]))
    with pytest.raises(InvalidConfig, match="vocabulary"):
        T5Paths(FILE, CATALOGUE, vocabulary=39)
    T5Paths(FILE, CATALOGUE, vocabulary=40)
    with pytest.raises(InvalidConfig, match=r"shape|head"):
        file_with(dict(FILE.tensors), experts_per_layer=(4, 4))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (T5Shape(width=1, inner=1, heads=64, key=64, window=4096, prompt=4096), "window"),
        (T5Shape(width=1, inner=1, heads=512, key=1, decoder_layers=1, window=1, prompt=500), "MiB of attention"),
        (T5Shape(width=1, inner=1, heads=256, key=1, decoder_layers=1, window=512, prompt=1), "MiB of attention"),
        (T5Shape(width=1, inner=1, heads=1, key=1024, encoder_layers=1, prompt=1024), "MiB of keys and values"),
    ],
)
def test_a_small_file_asks_for_no_more_time_or_memory_than_a_predictor_may_take(shape: T5Shape, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        random_t5(shape)


def test_what_is_kept_of_sequences_stays_within_its_bytes() -> None:
    """The largest shapes that are allowed, too."""
    wide = T5Shape(width=4, inner=4, heads=4, key=256, decoder_layers=1, window=64, prompt=380)
    tiny = SMALL._replace(heads=1, key=1, decoder_layers=1, window=1, prompt=1)
    for shape, slots in ((SMALL, None), (T5Shape(), 127), (wide, 16), (tiny, 4096)):
        paths = T5Paths(random_t5(shape), CATALOGUE)
        cache = paths._cache
        kept = (cache.keys, cache.values, cache.prompt_keys, cache.prompt_values, cache.positions, cache.prompt_lengths)
        assert sum(one.nbytes for one in kept) == cache.nbytes <= CACHE_BYTES
        assert slots is None or cache.slots == slots
    with pytest.raises(InvalidConfig, match="cache_bytes"):
        begun(cache_bytes=slots_of(1) - 1)


@pytest.mark.parametrize(
    "shape",
    [
        T5Shape(),
        T5Shape(width=256, inner=512, heads=8, key=32, encoder_layers=2, decoder_layers=2),
        T5Shape(width=512, inner=2048, heads=8, key=64, encoder_layers=6, decoder_layers=2),
    ],
)
def test_shapes_of_predictors_are_allowed(shape: T5Shape) -> None:
    shape.check()


def test_a_shape_says_how_many_numbers_a_file_has() -> None:
    shape = T5Shape()
    count = sum(int(np.prod(size)) for size in shape.weights(4744, 768).values())
    assert count == 1_232_384
