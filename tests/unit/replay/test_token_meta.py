"""Tokens of a trace's rows out of the file of texts beside it, and how texts are numbered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Counts
from greenroom.replay.traces.join import joined
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.token_numbers import numbered, numbered_by, texts_of, tokens_of, vocabulary_of
from greenroom.replay.traces.trace_file import TraceError
from tests.real_data import real_data
from tests.unit.replay.traces import trace_of

LENGTHS = (3, 0, 2)


def written(folder: Path, *lists: object, text: str | None = None, lengths: Sequence[int] = LENGTHS) -> Path:
    """A trace of sequences with ``lengths`` rows, and beside it a meta file with these lists, or ``text``."""
    path = folder / "t.npz"
    trace_of(*lengths).save(path)
    lines = "".join(json.dumps({"task": "a", "decode_tokens": one}) + "\n" for one in lists)
    path.with_suffix(".meta.jsonl").write_text(lines if text is None else text)
    return path


@pytest.mark.parametrize("longer", [0, 1])
def test_entry_i_is_the_input_of_row_i_and_the_last_token_is_an_input_of_none(tmp_path: Path, longer: int) -> None:
    lists = ([7, 8, 9, 2][: 3 + longer], [2][:longer], [5, 7, 2][: 2 + longer])
    trace = RoutingTrace.load(written(tmp_path, *lists), tokens=True)
    assert trace.token is not None
    assert trace.token.tolist() == [7, 8, 9, 5, 7]
    assert trace.token_texts is None


def test_texts_are_numbered_by_first_appearance_among_the_inputs(tmp_path: Path) -> None:
    trace = RoutingTrace.load(written(tmp_path, ["b", "a", "b", "end"], ["end"], ["c", "a", "end"]), tokens=True)
    assert tokens_of(trace).tolist() == [0, 1, 0, 2, 1]
    assert trace.token_texts == ("b", "a", "c")
    assert vocabulary_of(trace) == 4


def test_only_what_is_learnt_from_has_numbers_and_the_rest_is_one_unknown_token(tmp_path: Path) -> None:
    trace = RoutingTrace.load(written(tmp_path, ["b", "a", "b"], [], ["c", "a"]), tokens=True)
    first, last = numbered_by(trace, 2), numbered_by(trace, [2])
    assert (tokens_of(first).tolist(), first.token_texts) == ([0, 1, 0, 2, 1], ("b", "a"))
    assert (tokens_of(last).tolist(), last.token_texts) == ([2, 1, 2, 0, 1], ("c", "a"))
    assert tokens_of(numbered(first, ("a", "c"))).tolist() == [2, 0, 2, 2, 0], "what was unknown stays so"
    assert tokens_of(numbered_by(trace, 0)).tolist() == [0] * 5


def test_ids_of_the_model_stay_as_they_are(tmp_path: Path) -> None:
    trace = RoutingTrace.load(written(tmp_path, [7, 8, 9], [], [5, 7]), tokens=True)
    assert numbered_by(trace, 1) is trace
    assert vocabulary_of(trace) == 10
    with pytest.raises(TraceError, match="token: these are the model's own ids"):
        texts_of(trace, 1)
    with pytest.raises(TraceError, match="token: these are the model's own ids"):
        numbered(trace, ("a",))


def test_a_trace_that_nobody_asks_for_tokens_has_none_and_a_broken_file_beside_it_does_not_matter(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, text="no JSON")
    assert RoutingTrace.load(path).token is None
    with pytest.raises(TraceError, match=r"t\.meta\.jsonl: line 1 is no JSON"):
        RoutingTrace.load(path, tokens=True)


@pytest.mark.parametrize("text", [None, "", "".join('{"task": "a", "text": "b"}\n' for _ in LENGTHS), '{"task": 1}'])
def test_a_trace_without_tokens_beside_it_has_none(tmp_path: Path, text: str | None) -> None:
    path = written(tmp_path, text="" if text is None else text)
    if text is None:
        path.with_suffix(".meta.jsonl").unlink()
    trace = RoutingTrace.load(path, tokens=True)
    assert trace.token is None
    with pytest.raises(TraceError, match="no array token, and no decode_tokens"):
        tokens_of(trace)


def test_the_trace_s_own_tokens_come_before_those_beside_it(tmp_path: Path) -> None:
    path = written(tmp_path, text="no JSON")
    replace(RoutingTrace.load(path), token=np.arange(5)).save(path)
    assert tokens_of(RoutingTrace.load(path, tokens=True)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lists", "complaint"),
    [
        (([1, 2, 3], [], [4]), "line 3: decode_tokens has 1 tokens; its sequence has 2 rows, so 2 or 3"),
        (([1, 2, 3, 4, 5], [], [4, 5]), "line 1: decode_tokens has 5 tokens; its sequence has 3 rows"),
        (([1, 2, 3], []), "has 2 lines and the trace 3 sequences, so line 3 is missing"),
        (([1, 2, 3], [], [4, 5], [6]), "has 4 lines and the trace 3 sequences"),
        (([1, "a", 3], [], [4, 5]), "line 1: decode_tokens must be ids or texts in all lines, not ids and texts"),
        (([1, 2, 3], [], ["a", "b"]), "line 3: decode_tokens must be ids or texts in all lines, not ids and texts"),
        (([1, 2.5, 3], [], [4, 5]), "line 1: decode_tokens must be ids or texts in all lines, not float and ids"),
        (([1, True, 3], [], [4, 5]), "line 1: decode_tokens must be ids or texts in all lines, not bool and ids"),
        (([1, 2, 3], [], [-4, 5]), "line 3: decode_tokens: row 0 must be an id from 0 to 16,777,215"),
        (([1, 2**24, 3], [], [4, 5]), "line 1: decode_tokens: row 1 must be an id from 0"),
        (([1, 2, 3], None, [4, 5]), "line 2: decode_tokens must be a list"),
        (("abc", [], [4, 5]), "line 1: decode_tokens must be a list"),
    ],
)
def test_what_is_not_the_rows_tokens_is_refused_by_line(
    tmp_path: Path, lists: tuple[object, ...], complaint: str
) -> None:
    with pytest.raises(TraceError, match=complaint):
        RoutingTrace.load(written(tmp_path, *lists), tokens=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"decode_tokens": [1, 2, 3]}\n{"decode_tokens"\n{"decode_tokens": [4, 5]}\n', "line 2 is no JSON"),
        ('{"decode_tokens": [1, 2, 3]}\n\n{"decode_tokens": [4, 5]}\n', "line 2 is no JSON"),
        ('{"decode_tokens": [1, 2, 3]}\n[1]\n{"decode_tokens": [4, 5]}\n', "line 2 is no JSON object"),
        ("[" * 100_000, "line 1 is no JSON"),
    ],
)
def test_a_line_that_can_not_be_read_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        RoutingTrace.load(written(tmp_path, text=text), tokens=True)
    path = written(tmp_path, text="")
    path.with_suffix(".meta.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="can not be read"):
        RoutingTrace.load(path, tokens=True)


def test_a_mark_of_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = written(tmp_path, [7, 8, 9], [], [5, 7])
    meta = path.with_suffix(".meta.jsonl")
    meta.write_text(meta.read_text(), encoding="utf-8-sig")
    assert tokens_of(RoutingTrace.load(path, tokens=True)).tolist() == [7, 8, 9, 5, 7]


def test_texts_survive_a_file_and_ids_beyond_what_is_known_are_refused(tmp_path: Path) -> None:
    trace = replace(trace_of(*LENGTHS), token=np.array([0, 1, 0, 2, 1]), token_texts=(" b", "\u2028"))
    trace.save(tmp_path / "t.npz")
    again = RoutingTrace.load(tmp_path / "t.npz")
    assert (tokens_of(again).tolist(), again.token_texts) == ([0, 1, 0, 2, 1], (" b", "\u2028"))
    assert tokens_of(trace, 3) is trace.token
    with pytest.raises(TraceError, match="token of row 3 must lie below 2, the model's vocabulary"):
        tokens_of(trace, 2)
    with pytest.raises(TraceError, match="token of row 2 must be an id from 0 to 16,777,215"):
        replace(trace, token=np.array([0, 1, -1, 2, 1]))
    with pytest.raises(TraceError, match="token_texts: there must be ids in token, from 0 to 2"):
        replace(trace, token=np.array([0, 1, 0, 3, 1]))
    with pytest.raises(TraceError, match="token_texts: there must be ids"):
        replace(trace, token=None)
    with pytest.raises(TraceError, match="token_texts must be distinct"):
        replace(trace, token_texts=("a", "a"))
    with pytest.raises(TraceError, match="token_texts: one ends in a NUL"):
        replace(trace, token_texts=("a", "b\0")).save(tmp_path / "t.npz")


def test_joined_traces_have_tokens_where_all_have_them() -> None:
    bare = trace_of(*LENGTHS)
    ids = replace(bare, token=np.array([7, 8, 9, 5, 7]))
    texts = replace(bare, token=np.array([0, 1, 0, 2, 1]), token_texts=("b", "a"))
    others = replace(bare, token=np.array([0, 1, 2, 2, 1]), token_texts=("c", "b", "d"))
    assert joined([ids, bare]).token is None
    assert joined([texts, bare]).token_texts is None
    assert tokens_of(joined([ids, ids])).tolist() == [7, 8, 9, 5, 7] * 2
    both = joined([texts, others])
    assert both.token_texts == ("b", "a", "c", "d")
    assert tokens_of(both).tolist() == [0, 1, 0, 4, 1, 2, 0, 3, 3, 0], "the unknown token follows the last"
    with pytest.raises(TraceError, match="token: these are ids of the model in one trace, and texts in another"):
        joined([ids, texts])


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=6), min_size=1, max_size=6), st.data())
def test_a_number_stands_for_its_text_in_whatever_order_is_learnt_from(
    lists: list[list[str]], data: st.DataObject
) -> None:
    pieces = [text for one in lists for text in one]
    known = tuple(dict.fromkeys(pieces))
    tokens = np.array([known.index(text) for text in pieces], dtype=np.int64)
    trace = replace(trace_of(*map(len, lists)), token=tokens, token_texts=known)
    chosen = data.draw(st.permutations(range(len(lists))))[: data.draw(st.integers(0, len(lists)))]
    trained = numbered_by(trace, chosen)
    expected = list(dict.fromkeys(text for one in chosen for text in lists[one]))
    assert list(trained.token_texts or ()) == expected
    found = [expected.index(text) if text in expected else len(expected) for text in pieces]
    assert tokens_of(trained).tolist() == found


def test_the_real_trace_s_own_tokens_foretell_its_routing_and_those_of_the_row_before_do_not() -> None:
    """A table by token id alone, on the last third of the sequences. One off either way, layer 0 tells it."""
    trace = RoutingTrace.load(real_data("routing/gpt-oss-20b.npz"), tokens=True)
    learnt = trace.sequences * 2 // 3
    trace = numbered_by(trace, learnt)
    right = _recall_by_token(trace, tokens_of(trace), learnt)
    assert right.mean() == pytest.approx(0.55, abs=0.01)
    assert right[0] == pytest.approx(0.735, abs=0.01)
    for off in (1, -1):
        assert _recall_by_token(trace, np.roll(tokens_of(trace), off), learnt)[0] < 0.4


def _recall_by_token(trace: RoutingTrace, tokens: Counts, learnt: int) -> NDArray[np.floating]:
    """``[layers]``: the share of picks that are among the k most frequent after the row's token, else in all."""
    rows, experts, k = int(trace.seq_starts[learnt]), int(trace.experts_per_layer[0]), trace.experts.shape[2]
    hot = np.zeros((trace.tokens, trace.layers, experts), dtype=np.float32)
    np.put_along_axis(hot, trace.experts.astype(np.int64), 1, axis=2)
    counts = np.zeros((vocabulary_of(trace), trace.layers, experts), dtype=np.float32)
    np.add.at(counts, tokens[:rows], hot[:rows])
    counts += 0.5 * hot[:rows].mean(axis=0)
    foretold = np.argsort(-counts, axis=2, kind="stable")[:, :, :k]
    found = np.take_along_axis(hot[rows:], foretold[tokens[rows:]], axis=2)
    shares: NDArray[np.floating] = found.mean(axis=(0, 2))
    return shares
