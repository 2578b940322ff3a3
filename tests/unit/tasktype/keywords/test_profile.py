"""The keywords file: what it may say, and how it is told what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype.keywords.profile import MAX_FILE_BYTES, load_profile, parse_profile

GOOD: dict[str, Any] = {
    "format": "greenroom-task-keywords",
    "version": 1,
    "task_types": [
        {"name": "summarise", "keywords": ["summary", "sum up"]},
        {"name": "question", "keywords": ["question"]},
    ],
}


def changed(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def types(*entries: tuple[str, list[str]]) -> list[dict[str, Any]]:
    return [{"name": name, "keywords": keywords} for name, keywords in entries]


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keywords.json"
    path.write_bytes(changed(revision="7", look_at={"head_chars": 10, "tail_chars": 0}))
    profile = load_profile(path)
    assert profile.names == ("summarise", "question")
    assert profile.revision == "7"
    assert (profile.look_at.head_chars, profile.look_at.tail_chars) == (10, 0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "must be a file of keywords"),
        (b"\xff\xfe", "must be a file of keywords"),
        (b"[" * 100_000, "must be a file of keywords"),
        (changed(version=2), "$.version"),
        (changed(format="other"), "$.format"),
        (changed(task_types=[]), "$.task_types"),
        (changed(taks_types=[]), "taks_types"),
        (changed(look_at={"head_chars": 5000}), "$.look_at.head_chars"),
        (changed(look_at={"head_chars": 0, "tail_chars": 0}), "$.look_at"),
        (changed(task_types=types(("a", ["x", 3]))), "$.task_types[0].keywords[1]"),  # type: ignore[list-item]
        (changed(task_types=types(("a", []))), "$.task_types[0].keywords"),
        (changed(task_types=types(("", ["x"]))), "$.task_types[0].name"),
        (changed(task_types=types(("a" * 65, ["x"]))), "$.task_types[0].name"),
        (changed(task_types=types(("a", ["x"]), ("unknown", ["y"]))), "$.task_types[1].name"),
        (changed(task_types=types(("a", ["x"]), ("b", ["y"]), ("a", ["z"]))), "$.task_types[2].name"),
        (changed(task_types=types(("a", ["x", "…!"]))), "$.task_types[0].keywords[1]"),
        (changed(task_types=types(("a", ["x", "sum up", "Sum  UP!"]))), "$.task_types[0].keywords[1] is the same"),
        (changed(task_types=types(("a", [" ".join("abcdefghijklmnopq")]))), "at most 16 words"),
    ],
)
def test_a_wrong_file_is_refused_and_the_place_named(data: bytes, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_profile(data, "mine.json")
    assert says in str(caught.value)
    assert "mine.json" in str(caught.value)


def test_a_keyword_may_speak_for_several_types() -> None:
    profile = parse_profile(changed(task_types=types(("a", ["x"]), ("b", ["x"]))), "mine.json")
    assert [task.keywords for task in profile.task_types] == [("x",), ("x",)]


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"absent\.json"):
        load_profile(tmp_path / "absent.json")
    with pytest.raises(InvalidConfig, match="keywords"):
        load_profile(tmp_path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "keywords.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InvalidConfig, match=str(MAX_FILE_BYTES)):
        load_profile(path)


def test_the_shipped_file_has_the_five_types() -> None:
    assert load_profile().names == ("summarise", "classify", "compare", "question", "converse")
