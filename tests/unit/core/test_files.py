"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.core.files import check_new_folder, whole_folder, write_whole


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


def _write_half(path: Path, error: BaseException) -> None:
    with whole_folder(path) as draft:
        (draft / "file").write_text("half")
        raise error


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "parent" / "folder"
    if there:
        path.mkdir(parents=True)
    with pytest.raises(GreenroomError, match="nothing was left behind"):
        _write_half(path, OSError(28, os.strerror(28)))
    with pytest.raises(KeyboardInterrupt):
        _write_half(path, KeyboardInterrupt())
    assert [one for one in path.parent.iterdir() if one != path] == []
    assert path.exists() == there
    with whole_folder(path) as draft:
        (draft / "file").write_text("whole")
        assert not (path / "file").exists()
    assert (path / "file").read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_only_a_free_or_empty_folder_is_taken(tmp_path: Path) -> None:
    check_new_folder(tmp_path / "free")
    (tmp_path / "empty").mkdir()
    check_new_folder(tmp_path / "empty")
    for taken in (tmp_path, Path(__file__)):
        with pytest.raises(InvalidConfig, match=r"--out.*name a new folder"):
            check_new_folder(taken, "--out")
