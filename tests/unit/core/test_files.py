"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from greenroom.core.files import write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_it_replaces_what_was_there_and_leaves_nothing_beside(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    for data in (b"former", b"these", b""):
        write_whole(path, data, durable=durable)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_an_open_file_is_still_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"former")
    with path.open("rb") as reader:
        write_whole(path, b"these")
        assert reader.read() == b"former"


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("failing", ["open", "replace"])
def test_where_it_can_not_be_written_the_former_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, failing: str
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"former")

    def full(*arguments: object, **others: object) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(Path, failing, full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, b"these", durable=durable)
    assert path.read_bytes() == b"former"
    assert list(tmp_path.iterdir()) == [path]


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "file", b"")
