"""Wordings of each task type that come with greenroom, and texts to put into them.

Real prompts of a few data sets hold a few ways to word a wish. These hold more: `wordings.json` was written for the
project, by type, with places such as `{article}` that its `contents` fill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from random import Random
from typing import Final, Literal

import msgspec

from greenroom.tasktype.evaluate import LabelledPrompt

_PLACE: Final = re.compile(r"\{(\w+)\}")
_PAIRS: Final = ("{a}\n{b}", "1. {a}\n2. {b}", "Sentence 1: {a}\nSentence 2: {b}", '"{a}" and "{b}"', "A: {a}\nB: {b}")
_WITHOUT_A_WISH: Final = ("article", "dialogue", "review", "sentence", "code", "items")


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    article: tuple[str, ...]
    dialogue: tuple[str, ...]
    review: tuple[str, ...]
    sentence: tuple[str, ...]
    pair: tuple[tuple[str, str], ...]
    question: tuple[str, ...]
    options: tuple[str, ...]
    thing: tuple[str, ...]
    other: tuple[str, ...]
    labels: tuple[str, ...]
    code: tuple[str, ...]
    items: tuple[str, ...]


class _Wordings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["greenroom-task-wordings"]
    version: Literal[1]
    contents: _Contents
    task_types: dict[str, tuple[str, ...]]


@cache
def _shipped() -> _Wordings:
    file = resources.files("greenroom.tasktype.linear") / "wordings.json"
    return msgspec.json.decode(file.read_bytes(), type=_Wordings)


def worded_prompts(each: int, seed: int) -> list[LabelledPrompt]:
    """Up to ``each`` different prompts of every wording. The same seed gives the same."""
    found = []
    for task_type, wordings in _shipped().task_types.items():
        for wording in sorted(set(wordings)):
            random = Random(f"{seed}|{wording}")
            prompts = {_filled(wording, random) for _ in range(each)}
            found += [LabelledPrompt(prompt, task_type, wording) for prompt in sorted(prompts)]
    return found


def texts_without_a_wish() -> Iterator[str]:
    """Texts that ask for nothing: contents as they stand."""
    contents = _shipped().contents
    for kind in _WITHOUT_A_WISH:
        yield from getattr(contents, kind)


def _filled(wording: str, random: Random) -> str:
    contents = _shipped().contents
    one, other = random.choice(contents.pair)

    def content(place: re.Match[str]) -> str:
        match place[1]:
            case "a":
                return one
            case "b":
                return other
            case "pair":
                return random.choice(_PAIRS).replace("{a}", one).replace("{b}", other)
            case kind:
                return str(random.choice(getattr(contents, kind)))

    return _PLACE.sub(content, wording)
