"""Stop strings: the match that ends first, wherever tokens cut the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.text import StopChecker, StopMatcher, TextStream
from tests.examples import examples
from tests.unit.text.loaded import load

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the match that ends first (of several the longest), and that match."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=examples(500), deadline=None)
@given(parts=st.lists(st.text("ab\n", max_size=5), max_size=8), stops=STOPS, keep=st.booleans())
def test_equals_the_definition_however_the_text_is_cut(parts: list[str], stops: list[str], keep: bool) -> None:
    matcher = StopMatcher(stops, keep_match=keep)
    passed = ""
    for part in parts:
        would = matcher.would_match(part)
        before = matcher.matched
        passed += matcher.push(part)
        assert would == (before is None and matcher.matched is not None)
        expected, match = by_definition("".join(parts), stops)
        assert (expected + (match or "" if keep else "")).startswith(passed)
    passed += matcher.flush()
    expected, match = by_definition("".join(parts), stops)
    assert matcher.matched == match
    assert passed == expected + (match or "" if keep else "")


def test_nothing_is_held_longer_than_it_may_begin_a_match() -> None:
    matcher = StopMatcher(["###", "END"])
    assert [matcher.push(part) for part in ["a#", "#b", "EN", "E", "ND", "more"]] == ["a", "##b", "", "EN", "", ""]
    assert matcher.matched == "END"


def test_overlapping_beginnings_do_not_hide_a_match() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aaaab") == "aa"
    assert matcher.matched == "aab"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_a_stream_of_any_tokens_is_the_decoded_text_up_to_the_match(kind: str, data: st.DataObject) -> None:
    tokenizer = load(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20))
    whole = tokenizer.decode(ids)
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[at : at + data.draw(st.integers(1, 5))] or "x"
    stream = TextStream(tokenizer, [stop])
    text = ""
    used = 0
    for token_id in ids:
        text += stream.push(token_id)
        used += 1
        if stream.matched:
            break
    text += stream.finish()
    expected, match = by_definition(tokenizer.decode(ids[:used]), [stop])
    assert (text, stream.matched) == (expected, match)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_the_checker_ends_at_the_first_token_with_a_match_in_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = load(kind)
    text = data.draw(st.text("abh t\n中é", min_size=2, max_size=20))
    ids = tokenizer.encode(text, add_special_tokens=False)
    stop = data.draw(st.sampled_from(["\n", "h", " t", "中", "é\n", "b"]))
    checker = StopChecker(tokenizer, [stop])
    ended = next((place for place, token_id in enumerate(ids) if checker.push(token_id)), None)
    certain = [stop in tokenizer.decode(ids[: place + 1]) for place in range(len(ids))]
    assert ended == (certain.index(True) if True in certain else None)


def test_a_newline_written_as_a_byte_token_stops_at_once() -> None:
    tokenizer = load("byte_fallback")
    ids = tokenizer.encode("hello\n\nThe", add_special_tokens=False)
    newline = tokenizer.token_id("<0x0A>")
    assert newline is not None
    checker = StopChecker(tokenizer, ["\n\n"])
    answers = [checker.push(token_id) for token_id in ids]
    second = [place for place, token_id in enumerate(ids) if token_id == newline][1]
    assert answers.index(True) == second


def test_without_stop_strings_nothing_is_decoded() -> None:
    class Untouched:
        def detokenizer(self, *, behind_text: bool = False) -> None:
            raise AssertionError("asked for a detokenizer")

    assert not StopChecker(Untouched(), []).push(1)  # type: ignore[arg-type]


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.text("abx ", min_size=1, max_size=24),
    stop=st.sampled_from(["a", "ab", "bx", "aa", "x a"]),
    least=st.integers(0, 20),
)
def test_no_stop_string_ends_in_the_first_tokens(text: str, stop: str, least: int) -> None:
    """One that begins in them may end behind them. What passes is the text up to it."""
    tokenizer = load("byte_level")
    ids = tokenizer.encode(text, add_special_tokens=False)
    passed_by = len(tokenizer.decode(ids[:least]))
    ends = [place + len(stop) for place in range(len(text)) if text.startswith(stop, place)]
    end = next((end for end in ends if end > passed_by), None)
    lengths = [len(tokenizer.decode(ids[: place + 1])) for place in range(len(ids))]
    wanted = None if end is None else next(place for place, length in enumerate(lengths) if length >= end)
    checker = StopChecker(tokenizer, [stop], least)
    assert next((place for place, token_id in enumerate(ids) if checker.push(token_id)), None) == wanted
    stream = TextStream(tokenizer, [stop], min_tokens=least, behind_text=True)
    found = "".join(stream.push(token_id) for token_id in ids) + stream.finish()
    assert found == (text if end is None else text[: end - len(stop)])


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.text("aé中🚀\n", min_size=1, max_size=8),
    stop=st.sampled_from(["é", "中", "🚀", "a🚀", "\n"]),
    data=st.data(),
)
def test_nor_in_characters_of_byte_tokens(text: str, stop: str, data: st.DataObject) -> None:
    """Their characters are told with the next token, or at the end, and belong to the tokens that they are made of."""
    tokenizer = load("byte_fallback")
    ids = tokenizer.encode(text, add_special_tokens=False)
    least = data.draw(st.integers(1, len(ids)))
    whole = tokenizer.decode(ids)
    certain = [len(tokenizer.decode(ids[: place + 1]).rstrip("\ufffd")) for place in range(len(ids))]
    passed_by = max(certain[:least])
    ends = [place + len(stop) for place in range(len(whole)) if whole.startswith(stop, place)]
    end = next((end for end in ends if end > passed_by), None)
    stream = TextStream(tokenizer, [stop], min_tokens=least)
    used = "".join(stream.push(token_id) for token_id in ids) + stream.finish()
    assert (used, stream.matched is None) == (whole if end is None else whole[: end - len(stop)], end is None)
    wanted = None if end is None else next(place for place, known in enumerate(certain) if known >= end)
    checker = StopChecker(tokenizer, [stop], least)
    assert next((place for place, token_id in enumerate(ids) if checker.push(token_id)), None) == wanted
