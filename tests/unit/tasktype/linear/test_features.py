"""What of a prompt is weighed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.tasktype.linear.features import Blocks, InstructionFeatures

FEATURES = InstructionFeatures()


def names(prompt: str, mark: str) -> set[str]:
    return {name.removeprefix(mark) for name in FEATURES(prompt) if name.startswith(mark)}


def test_first_and_last_sentence_stand_apart_from_the_rest() -> None:
    prompt = "Please read this with care. The cat sat on a mat. It was a Tuesday in June. Who was on the mat?"
    assert {"please", "read this with", "^ please read"} <= names(prompt, "f ")
    assert {"who", "the mat ?", "^ who was", "mat ? $"} <= names(prompt, "l ")
    assert names(prompt, "r ") == {"the", "cat", "sat", "on", "a", "mat", "it", "was", "tuesday", "in", "june"}
    assert "first asks" not in names(prompt, "p ")
    assert {"last asks", "last begins with a question word"} <= names(prompt, "p ")


def test_a_short_sentence_is_taken_with_its_neighbour() -> None:
    prompt = "Summarize:\nThe town council met on Tuesday.\nIt rained.\nIt was cold and wet outside.\nAnswer:"
    assert {"summarize", "town council"} <= names(prompt, "f ")
    assert {"answer : $", "cold and wet"} <= names(prompt, "l ")


def test_words_of_one_stem_and_synonyms_share_features() -> None:
    one, other = "Summarise the text that follows.", "Provide summaries of the text that follows."
    assert "summa" in names(one, "s ") & names(other, "s ")
    assert "f summarise" in names(one, "k ") & names("Give me the gist of the text.", "k ")


def test_numbers_and_case_make_no_difference() -> None:
    assert FEATURES("Write 12 LINES on the Sea please") == FEATURES("write 99 lines on the sea please")


@pytest.mark.parametrize(
    ("prompt", "shape"),
    [
        ("Pick one.\n(A) red\n(B) blue", "options"),
        ("Sentence 1: a cat\nSentence 2: the cat", "a pair"),
        ("Explain:\n```\nx = 1\n```", "code"),
        ("Ann: hi\nBen: hello\nAnn: bye", "speakers"),
        ("The text in short:", "ends with a colon"),
    ],
)
def test_shapes(prompt: str, shape: str) -> None:
    assert shape in names(prompt, "p ")
    assert shape not in names("The cat sat on the mat.", "p ")


def test_a_block_that_does_not_count_has_no_features() -> None:
    none = InstructionFeatures(Blocks(0, 0, 0, 0, 0, 0, 0, 0))
    assert none("Summarise the text. Who wrote it?") == {}
    assert not {name[0] for name in InstructionFeatures(Blocks(characters=0))("Summarise it")} & {"c"}


@given(st.text(max_size=300))
def test_blocks_have_the_length_that_they_count(text: str) -> None:
    found = FEATURES(text)
    for mark, share in (("f ", 1.0), ("l ", 1.0), ("e ", 0.5), ("r ", 0.2), ("c ", 1.0)):
        squares = sum(value**2 for name, value in found.items() if name.startswith(mark))
        assert squares == pytest.approx(share) or squares == 0
