"""What holds for whatever finds out the task type of a prompt and comes with greenroom."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import UnknownName
from greenroom.tasktype import DEFAULT_EXTRACTOR, SHIPPED_EXTRACTORS, UNKNOWN, Extractor, open_extractor

NAMES = sorted(SHIPPED_EXTRACTORS)
OPENED = {name: open_extractor(name) for name in NAMES}
FILLER = "The ferry left the harbour at noon and the wind had turned. " * 40


@pytest.fixture(params=NAMES)
def extractor(request: pytest.FixtureRequest) -> Extractor:
    return OPENED[request.param]


def test_it_has_the_name_by_which_it_is_chosen(extractor: Extractor) -> None:
    assert OPENED[extractor.name] is extractor


def test_the_default_is_the_one_that_is_opened_without_a_name() -> None:
    assert open_extractor().name == DEFAULT_EXTRACTOR == "linear"


def test_names_that_are_not_known_are_told_with_those_that_are() -> None:
    with pytest.raises(UnknownName, match=r"keywords.*linear|linear.*keywords"):
        open_extractor("oracle")


def test_it_tells_the_types_of_emoe_apart(extractor: Extractor) -> None:
    assert sorted(extractor.names) == ["classify", "compare", "converse", "question", "summarise"]


@pytest.mark.parametrize(
    ("prompt", "task_type"),
    [
        ("Summarise the following text in two lines: ...", "summarise"),
        (f"Summarize: {FILLER}", "summarise"),
        (f"{FILLER}\n\nTL;DR:", "summarise"),
        (f"Give me a short summary.\n\n{FILLER}", "summarise"),
        ("Is this review positive or negative? I loved it.", "classify"),
        ("Which category does this article belong to?", "classify"),
        (f"{FILLER}\nAnswer the question based on the context. Question: who wrote it?", "question"),
        ("Which of the following is correct? Choose the best answer.", "question"),
        ("Do these two sentences mean the same thing?", "compare"),
        ("What is the difference between a violin and a viola?", "compare"),
        ("Hello! Can you help me write an email to my landlord?", "converse"),
        ("Imagine you are a pirate. Tell me a story.", "converse"),
    ],
)
def test_plain_wishes(extractor: Extractor, prompt: str, task_type: str) -> None:
    assert extractor.extract(prompt).task_type == task_type


@pytest.mark.parametrize(
    "prompt", ["", " \n\t", "zzz", "Lorem ipsum dolor sit amet", "····", "48213", "\U0001f3ad" * 9]
)
def test_what_asks_for_nothing_is_unknown(extractor: Extractor, prompt: str) -> None:
    assert extractor.extract(prompt).task_type == UNKNOWN


@given(st.sampled_from(NAMES), st.text(max_size=400))
def test_any_text_has_an_answer_and_always_the_same(name: str, text: str) -> None:
    extraction = OPENED[name].extract(text)
    assert extraction.task_type in {*OPENED[name].names, UNKNOWN}
    assert set(extraction.scores) <= set(OPENED[name].names)
    assert all(math.isfinite(score) and score >= 0 for score in extraction.scores.values())
    if extraction.task_type != UNKNOWN:
        assert extraction.scores[extraction.task_type] == max(extraction.scores.values())
    assert OPENED[name].extract(text) == extraction


def test_another_instance_says_the_same(extractor: Extractor) -> None:
    other = open_extractor(extractor.name)
    for prompt in ("Summarise this.", "Who?", FILLER, "Compare tea and coffee."):
        assert other.extract(prompt) == extractor.extract(prompt)


def test_time_does_not_grow_with_the_prompt(extractor: Extractor) -> None:
    """Ten million characters of the kinds that make sentences, words and patterns begin everywhere."""
    for text in ("x ", "? ", "a: ", "\n", "(A) ", "Text 1 ", "{\n"):
        long = text * (10_000_000 // len(text))
        began = time.process_time()
        extractor.extract(long)
        assert time.process_time() - began < 0.5
