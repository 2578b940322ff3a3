"""Most matches wins; ties and unknown are settled."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.tasktype import UNKNOWN
from greenroom.tasktype.keywords import KeywordExtractor, parse_profile

TYPES = {
    "summarise": ["summary", "sum up", "in a nutshell", "tl dr"],
    "question": ["question", "answer the question", "who"],
    "converse": ["hello", "sum up", "write a"],
}


def extractor(types: dict[str, list[str]] = TYPES, **look_at: int) -> KeywordExtractor:
    file: dict[str, Any] = {
        "format": "greenroom-task-keywords",
        "version": 1,
        "task_types": [{"name": name, "keywords": keywords} for name, keywords in types.items()],
    }
    if look_at:
        file["look_at"] = look_at
    return KeywordExtractor(parse_profile(json.dumps(file).encode(), "test"))


@pytest.mark.parametrize(
    ("prompt", "task_type", "matches"),
    [
        ("Give me a SUMMARY, please", "summarise", {"summarise": 1}),
        ("TL;DR", "summarise", {"summarise": 1}),
        ("tl  \n dr", "summarise", {"summarise": 1}),
        ("summaryless", UNKNOWN, {}),
        ("in a big nutshell", UNKNOWN, {}),
        ("", UNKNOWN, {}),
        # The longest keyword at a place, and none inside it.
        ("answer the question", "question", {"question": 1}),
        ("answer the other question", "question", {"question": 1}),
        # One that speaks for several counts for each; where they tie, the one that is listed first.
        ("sum up", "summarise", {"summarise": 1, "converse": 1}),
        ("hello, sum up", "converse", {"summarise": 1, "converse": 2}),
        ("who? summary", "summarise", {"summarise": 1, "question": 1}),
        ("who? who? summary", "question", {"summarise": 1, "question": 2}),
        ("write a summary of what he answered to the question: who", "question", {
            "summarise": 1, "question": 2, "converse": 1,
        }),
    ],
)  # fmt: skip
def test_extraction(prompt: str, task_type: str, matches: dict[str, int]) -> None:
    extraction = extractor().extract(prompt)
    assert extraction.task_type == task_type
    assert extraction.scores == matches


def test_only_the_beginning_and_the_end_are_looked_at() -> None:
    bounded = extractor(head_chars=12, tail_chars=12)
    assert bounded.extract("question " + "x " * 500 + " summary").scores == {"question": 1, "summarise": 1}
    assert bounded.extract("x " * 500 + "question" + " x" * 500).task_type == UNKNOWN
    # No keyword is put together from both ends.
    assert extractor(head_chars=8, tail_chars=2).extract("go:  sum and then on and up").task_type == UNKNOWN


@given(
    st.lists(st.sampled_from(["summary", "sum", "up", "question", "answer", "the", "who", "hello", "x"]), max_size=30)
)
def test_the_answer_has_the_most_matches_and_is_always_the_same(text: list[str]) -> None:
    one = extractor().extract(" ".join(text))
    assert extractor().extract("\n".join(text).upper()) == one
    if one.task_type == UNKNOWN:
        assert not one.scores
        return
    most = max(one.scores.values())
    assert one.scores[one.task_type] == most
    order = list(TYPES)
    tied = [name for name in order if one.scores.get(name) == most]
    assert one.task_type == tied[0]


@given(st.text(max_size=400))
def test_any_text_has_an_answer(text: str) -> None:
    assert extractor().extract(text).task_type in {*TYPES, UNKNOWN}


def test_time_does_not_grow_with_the_prompt() -> None:
    """Keywords that share long beginnings with the text and never end: the worst case of the walk."""
    long = extractor({"a": [" ".join(["x"] * 15 + ["y"])], "b": ["x x x z"]}, head_chars=4096, tail_chars=4096)
    began = time.process_time()
    for length in (10_000, 10_000_000):
        assert long.extract("x " * (length // 2)).task_type == UNKNOWN
    assert time.process_time() - began < 0.5
