"""What counts as a word."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.tasktype.words import bounded, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Summarise THIS text.", ["summarise", "this", "text"]),
        ("TL;DR: what's it about?", ["tl", "dr", "what", "s", "it", "about"]),
        ("snake_case and 2nd-hand", ["snake", "case", "and", "2nd", "hand"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("ＦＵＬＬ ｗｉｄｔｈ", ["full", "width"]),
        ("résumé re\u0301sume\u0301", ["résumé", "résumé"]),
        ("Обобщи текст", ["обобщи", "текст"]),
        ("请总结text", ["请", "总", "结", "text"]),
        ("สรุป", ["ส", "ร", "ุ", "ป"]),
        ("", []),
        ("!?… \n\t", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(st.text(max_size=300))
def test_case_and_the_way_accents_are_stored_make_no_difference(text: str) -> None:
    found = words(text)
    assert words(unicodedata.normalize("NFD", text)) == found
    assert words(unicodedata.normalize("NFC", text)) == found
    assert all(word and not word.isspace() for word in found)


@given(st.text(max_size=200), st.integers(0, 50), st.integers(0, 50))
def test_what_is_looked_at_is_bounded(text: str, head: int, tail: int) -> None:
    parts = bounded(text, head, tail)
    assert sum(map(len, parts)) == min(len(text), head + tail)
    assert text.startswith(parts[0])
    assert text.endswith(parts[-1]) or tail == 0


@pytest.mark.parametrize("letter", ["a", " ", "a ", "\u0301", "가", "𝔸", "ﷺ", "ŉ"])
def test_no_text_takes_long(letter: str) -> None:
    text = (letter * 8192)[:8192]
    began = time.process_time()
    words(text)
    assert time.process_time() - began < 0.5
