"""The file of keywords by task type. docs/architecture/tasktype.md describes its format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.tasktype.extractor import UNKNOWN
from greenroom.tasktype.extractor_file import read_extractor_file
from greenroom.tasktype.words import words

MAX_FILE_BYTES = 16 * MIB
MAX_KEYWORD_WORDS = 16
MAX_LOOKED_AT_CHARS = 4096

Keyword = Annotated[str, Meta(min_length=1, max_length=256)]
Chars = Annotated[int, Meta(ge=0, le=MAX_LOOKED_AT_CHARS)]


class LookAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many characters of a prompt are looked at, at its beginning and at its end: tasks are described there."""

    head_chars: Chars = 300
    tail_chars: Chars = 200


class TypeKeywords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words and phrases that speak for a task type."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    keywords: Annotated[tuple[Keyword, ...], Meta(min_length=1, max_length=100_000)]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keywords by task type. Where types tie, the one that stands earlier wins.

    ``version``: of the format. ``revision``: of the contents, in whatever way their author counts.
    """

    format: Literal["greenroom-task-keywords"]
    version: Literal[1]
    task_types: Annotated[tuple[TypeKeywords, ...], Meta(min_length=1, max_length=1000)]
    revision: str = ""
    look_at: LookAt = LookAt()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.task_types)


def load_profile(path: Path | None = None) -> Profile:
    """Read ``path``; None: the keywords that come with greenroom. Raises InvalidConfig, naming the place."""
    shipped = "greenroom.tasktype.keywords", "default_keywords.json"
    return parse_profile(*read_extractor_file(path, "keywords", shipped, MAX_FILE_BYTES))


def parse_profile(data: bytes, name: str) -> Profile:
    """``data`` as a profile; ``name`` is what messages call it. Raises InvalidConfig, naming the place in it."""
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidConfig("keywords", name, f"it must be a file of keywords by task type: {error}") from error
    if profile.look_at.head_chars + profile.look_at.tail_chars == 0:
        raise _at(name, "$.look_at", 0, "at least one of head_chars and tail_chars is above 0")
    seen: dict[str, int] = {}
    for number, task in enumerate(profile.task_types):
        place = f"$.task_types[{number}]"
        if task.name == UNKNOWN:
            raise _at(name, f"{place}.name", task.name, "it is kept for prompts that no keyword is found in")
        if task.name in seen:
            raise _at(name, f"{place}.name", task.name, f"$.task_types[{seen[task.name]}] has that name")
        seen[task.name] = number
        _check_keywords(name, place, task)
    return profile


def dump_profile(profile: Profile) -> bytes:
    """As JSON that people can read, and ``load_profile`` too."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def _check_keywords(name: str, place: str, task: TypeKeywords) -> None:
    seen: dict[tuple[str, ...], int] = {}
    for number, keyword in enumerate(task.keywords):
        where = f"{place}.keywords[{number}]"
        parts = tuple(words(keyword))
        if not parts:
            raise _at(name, where, keyword, "a keyword has at least one letter or digit")
        if len(parts) > MAX_KEYWORD_WORDS:
            raise _at(name, where, keyword, f"a keyword has at most {MAX_KEYWORD_WORDS} words")
        if parts in seen:
            raise _at(name, where, keyword, f"{place}.keywords[{seen[parts]}] is the same one")
        seen[parts] = number


def _at(name: str, place: str, value: object, allowed: str) -> InvalidConfig:
    return InvalidConfig(f"keywords ({name}), at {place}", value, allowed)
