"""Which kinds of artifacts are made: always, when asked for, or none."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.errors import InvalidConfig


def kinds_of(field: str, said: str, known: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """From a command line's word: kinds separated by commas, ``asked``, or ``none``. The kinds that are always made,
    and whether others are when someone asks for them; who takes them looks whether they are known. Raises
    InvalidConfig."""
    words = [word.strip() for word in said.split(",") if word.strip()]
    if not words or ("none" in words and len(words) > 1):
        raise InvalidConfig(field, said, f"asked, none, or some of {', '.join(known)} separated by commas")
    kinds = tuple(dict.fromkeys(word for word in words if word not in ("asked", "none")))
    return kinds, "asked" in words
