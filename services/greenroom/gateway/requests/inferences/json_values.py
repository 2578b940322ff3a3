"""How many values a JSON text has, before they take memory. Pure."""

from __future__ import annotations

import re

_NEXT = re.compile(rb'["\[{]|[^"\[{\]},:\s]+')
_QUOTE = ord('"')
_BACKSLASH = ord("\\")
_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Of a string, behind its quote."""


def has_more_values(text: bytes, most: int) -> bool:
    """Whether there are more than ``most`` strings, numbers, words, lists and objects; names of fields are strings too.

    Decoded, a value takes some ten times as much as ``[],``. Text that is no JSON has some number of values too.
    """
    if len(text) <= most:  # each has a character at least
        return False
    at = found = 0
    while (one := _NEXT.search(text, at)) is not None:
        found += 1
        if found > most:
            return True
        at = _end_of_string(text, one.end()) if text[one.start()] == _QUOTE else one.end()
    return False


def _end_of_string(text: bytes, begin: int) -> int:
    """Behind its last quote. Base64 has no escapes, and finding a byte is the fastest way through megabytes."""
    end = text.find(b'"', begin)
    if end < 0:
        return len(text)
    if text[end - 1] != _BACKSLASH:
        return end + 1
    rest = _REST.match(text, begin)
    assert rest is not None, "it may be empty"
    return rest.end()
