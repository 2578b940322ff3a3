"""A text as the sequence of words in which keywords are looked for."""

from __future__ import annotations

import re
import unicodedata

# Written without spaces between words: every character counts as a word, so a keyword is found inside a sentence.
_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(f"[{_SPACELESS}]|[^\\W_{_SPACELESS}]+")


def words(text: str) -> list[str]:
    """The words of ``text``, folded so that case, width and the way accents are stored make no difference.

    A word is a run of letters and digits of any script; whatever else stands between (hyphens, apostrophes,
    underscores) parts words. Takes time linear in the text, but for long runs of combining marks: bound the text.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _WORD.findall(folded)


def bounded(text: str, head_chars: int, tail_chars: int) -> list[str]:
    """The parts of ``text`` that are looked at: its beginning and its end, one part where they meet."""
    if len(text) <= head_chars + tail_chars:
        return [text]
    return [text[:head_chars], text[len(text) - tail_chars :]] if tail_chars else [text[:head_chars]]
