"""Prompts as texts, split by the texts of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.kinds.paths.prompt_texts import LongestMatch, prompts_beside, prompts_of
from greenroom.replay.traces.trace_file import TraceError
from tests.unit.replay.traces import trace_of

TEXTS = ("a", "ab", "abcd", "b", " c", "c")


def test_the_longest_token_is_taken_and_the_unknown_one_a_character_at_a_time() -> None:
    match = LongestMatch(TEXTS)
    assert match.split("abcdab c").tolist() == [2, 1, 4]
    assert match.split("abcab").tolist() == [1, 5, 1]
    assert match.split("xay").tolist() == [6, 0, 6]
    assert match.split("").tolist() == []
    assert LongestMatch(("", "a")).split("ab").tolist() == [1, 2]
    assert LongestMatch(()).split("ab").tolist() == [0, 0]


@given(st.text("abcd x", max_size=30))
def test_the_tokens_put_together_are_the_text(text: str) -> None:
    found = LongestMatch(TEXTS).split(text)
    assert sum(1 if number == len(TEXTS) else len(TEXTS[number]) for number in found) == len(text)
    place = 0
    for number in found.tolist():
        if number < len(TEXTS):
            assert text.startswith(TEXTS[number], place)
            place += len(TEXTS[number])
        else:
            assert not any(text.startswith(one, place) for one in TEXTS)
            place += 1


def test_prompts_are_read_from_the_file_beside_the_trace(tmp_path: Path) -> None:
    path, meta = tmp_path / "trace.npz", tmp_path / "trace.meta.jsonl"
    assert prompts_beside(path, 2) is None, "no such file"
    write(meta, {"prompt": "ab"}, {"prompt": "cb"})
    assert prompts_beside(path, 2) == ["ab", "cb"]
    write(meta, {}, {"category": "none"})
    assert prompts_beside(path, 2) is None
    write(meta, {"prompt": "ab"}, {})
    with pytest.raises(TraceError, match="line 2"):
        prompts_beside(path, 2)
    write(meta, {"prompt": "ab"})
    with pytest.raises(TraceError, match="1 lines and the trace 2"):
        prompts_beside(path, 2)


def write(path: Path, *lines: dict[str, str]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_prompts_have_the_numbers_of_the_trace_s_tokens_whatever_their_order() -> None:
    trace = replace(trace_of(4, 1), token=np.array([2, 0, 3, 2, 1]), token_texts=("ab", "abc", "b", "a"))
    found = [one.tolist() for one in prompts_of(trace, 1, ["ab", "baa", "abc", ""])]
    assert found == [[0], [2, 3, 3], [0, 4], []], "what is held out is not split by, and unknown"
    with pytest.raises(TraceError, match="no texts"):
        prompts_of(replace(trace, token_texts=None), 1, ["ab"])
