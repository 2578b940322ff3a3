"""What every task's builder makes, and what builders share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Draft:
    """One sample before it is assigned to a split.

    `kind` is the variant within the task, `key` the content that decides the split, `facts` what the answer follows
    from, as strings that all occur in the prompt (values of kind "rule" decide the answer without being quoted).
    """

    kind: str
    key: str
    facts: Mapping[str, str]
    prompt: str
    answer: str


def cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def content_key(*parts: str) -> str:
    return "|".join(parts)


def two_digits(rng: Random) -> int:
    return rng.randint(10, 99)
