"""Stop strings: found as the tokens come, whichever way the tokens cut the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from greenroom.text.detokenize import Detokenizer


class _Tokenizer(Protocol):
    def detokenizer(self, *, behind_text: bool = False) -> Detokenizer: ...


class StopMatcher:
    """Lets text pass up to the first stop string.

    The first match is the one that ends first, and among those that end with the same character the longest: so it
    does not depend on how the text is cut into parts. Text that may be the beginning of a match is held back until
    it is decided. One step a character and stop string (Knuth, Morris, Pratt).
    """

    def __init__(self, stops: Sequence[str], *, keep_match: bool = False) -> None:
        """``keep_match``: the stop string itself still passes. Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string can not be empty")
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What passes now. After a match nothing does."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        end, found = self._advance(self._states, text)
        self._held += text[:end]
        if found is None:
            return self._release(max(self._states))
        self.matched = found
        passed = self._release(0 if self._keep_match else len(found))
        self._held = ""
        return passed

    def pass_by(self, text: str) -> str:
        """As ``push``, but a stop string that ends in ``text`` does not count. One that begins in it may."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        self._advance_by(self._states, text)
        return self._release(max(self._states))

    def would_match(self, text: str, *, behind: str = "") -> bool:
        """Whether ``push(text)`` would find a match, behind ``pass_by(behind)``; changes nothing."""
        if self.matched is not None or not self._stops:
            return False
        states = list(self._states)
        self._advance_by(states, behind)
        return self._advance(states, text)[1] is not None

    def flush(self) -> str:
        """What was held back, once no text follows."""
        return self._release(0)

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def _advance_by(self, states: list[int], text: str) -> None:
        """As ``_advance``, past all matches."""
        while text:
            end, _ = self._advance(states, text)
            text = text[end:]

    def _advance(self, states: list[int], text: str) -> tuple[int, str | None]:
        """Runs ``states`` (characters matched of each stop string) over ``text``; the length read and the match."""
        for place, character in enumerate(text, start=1):
            found: str | None = None
            for which, stop in enumerate(self._stops):
                borders, state = self._borders[which], states[which]
                while state and stop[state] != character:
                    state = borders[state - 1]
                state += stop[state] == character
                if state == len(stop):
                    if found is None or len(stop) > len(found):
                        found = stop
                    state = borders[state - 1]
                states[which] = state
            if found is not None:
                return place, found
        return len(text), None


def _borders(word: str) -> list[int]:
    """For each prefix of ``word`` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for place in range(1, len(word)):
        while length and word[place] != word[length]:
            length = borders[length - 1]
        length += word[place] == word[length]
        borders[place] = length
    return borders


class TextStream:
    """The text of one generated sequence: detokenised, ended by the first stop string.

    A match is looked for in what the tokens so far would read if they were all, so a stop string written in byte
    tokens is seen with its last byte and not one token later.
    """

    def __init__(
        self,
        tokenizer: _Tokenizer,
        stops: Sequence[str] = (),
        *,
        keep_match: bool = False,
        behind_text: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """``min_tokens``: no stop string ends in the text of so many tokens."""
        self._detokenizer = tokenizer.detokenizer(behind_text=behind_text)
        self._unchecked = min_tokens
        self._unchecked_pending = 0  # of the characters that are pending, those of unchecked tokens
        self._matcher = StopMatcher(stops, keep_match=keep_match)
        self.length = 0
        """Characters so far that are certain, those held back for a stop string included."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, None while none has."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """The text to give out now; nothing after a match."""
        text = self._detokenizer.push(token_id)
        self.length += len(text)
        pending = self._detokenizer.pending
        if self._unchecked > 0:
            self._unchecked -= 1
            still = 0 if text else self._unchecked_pending
            self._unchecked_pending = max(still, len(pending))
            return self._matcher.pass_by(text)
        passed = self._checked(text)
        unchecked, rest = pending[: self._unchecked_pending], pending[self._unchecked_pending :]
        if rest and self._matcher.would_match(rest, behind=unchecked):
            passed += self._checked(pending)
        return passed

    def finish(self) -> str:
        """The rest, once no token follows."""
        text = self._detokenizer.flush()
        self.length += len(text)
        return self._checked(text) + self._matcher.flush()

    def _checked(self, text: str) -> str:
        """What passes of ``text``, in which a stop string may end behind the characters of unchecked tokens."""
        if not self._unchecked_pending or not text:
            return self._matcher.push(text)
        unchecked, rest = text[: self._unchecked_pending], text[self._unchecked_pending :]
        self._unchecked_pending = 0
        return self._matcher.pass_by(unchecked) + self._matcher.push(rest)


class StopChecker:
    """Whether a stop string has come, for whoever generates: one a sequence, told every token in order."""

    def __init__(self, tokenizer: _Tokenizer, stop_strings: Sequence[str], min_tokens: int = 0) -> None:
        """``min_tokens``: no stop string ends in the text of so many tokens."""
        self._stream = TextStream(tokenizer, stop_strings, min_tokens=min_tokens) if stop_strings else None

    def push(self, token_id: int) -> bool:
        """Whether the text of all tokens so far holds a stop string, so that generation is to end here."""
        if self._stream is None:
            return False
        self._stream.push(token_id)
        return self._stream.matched is not None
