"""Files that are whole or not there; versions, pins, what a crash leaves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_by_safetensors

from greenroom.core.errors import InvalidConfig
from greenroom.core.files import PARTIAL
from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.kinds.statistics.snapshot import SNAPSHOTS, Snapshot, dump_snapshot, load_snapshot
from greenroom.predictor.versions.store import FileStore, MemoryStore, NotKept, VersionStore
from tests.unit.predictor.kinds.statistics.libraries import snapshot

KEEP = 3


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VersionStore[Snapshot]]:
    made: VersionStore[Snapshot] = (
        MemoryStore(KEEP, SNAPSHOTS) if request.param == "memory" else FileStore(tmp_path / "state", KEEP, SNAPSHOTS)
    )
    assert made.open() == []
    yield made
    made.close()


def versions(store: VersionStore[Snapshot], model: str = "m") -> list[int]:
    return [info.version for info in store.versions(model)]


# -- both -------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_listed_and_read(store: VersionStore[Snapshot]) -> None:
    assert (versions(store), store.next_version("m"), store.pinned("m")) == ([], 1, None)
    info = store.write(snapshot(1))
    assert store.versions("m") == [info]
    assert (info.model, info.version, info.kind, info.created_ms, info.sequences) == ("m", 1, "statistics", 1001, 2)
    data = store.read("m", 1)
    assert len(data) == info.bytes
    assert load_snapshot(data).tasks["question"].sequences == 2
    assert store.next_version("m") == 2


def test_the_last_versions_are_kept_and_the_pinned_one(store: VersionStore[Snapshot]) -> None:
    store.write(snapshot(1))
    store.pin("m", 1)
    for version in range(2, 8):
        store.write(snapshot(version))
    assert versions(store) == [1, 5, 6, 7]
    assert store.pinned("m") == 1
    store.pin("m", None)
    store.write(snapshot(8))
    assert versions(store) == [6, 7, 8]
    with pytest.raises(NotKept, match="kept: 6, 7, 8"):
        store.read("m", 1)
    with pytest.raises(NotKept):
        store.pin("m", 5)


def test_models_are_apart(store: VersionStore[Snapshot]) -> None:
    for model in ("m", "M", "org/m", "../../m", "x" * 256, "模型"):
        store.write(snapshot(1, model))
        store.pin(model, 1)
    store.forget("m")
    assert (versions(store), store.pinned("m"), store.next_version("m")) == ([], None, 1)
    for model in ("M", "org/m", "../../m", "x" * 256, "模型"):
        assert load_snapshot(store.read(model, 1)).model == model
        assert store.pinned(model) == 1
    store.forget("m")


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With versions 1 to 3, of which 2 is pinned."""
    store = FileStore(tmp_path / "state", KEEP, SNAPSHOTS)
    store.open()
    for version in (1, 2, 3):
        store.write(snapshot(version, sequences=version))
    store.pin("m", 2)
    store.close()
    return tmp_path / "state"


def reopened(folder: Path) -> tuple[FileStore[Snapshot], list[Snapshot]]:
    store = FileStore(folder, KEEP, SNAPSHOTS)
    return store, store.open()


def file_of(folder: Path, version: int) -> Path:
    (path,) = folder.glob(f"*/{version:012d}-*.safetensors")
    return path


def test_a_restart_finds_all_of_it(folder: Path) -> None:
    store, newest = reopened(folder)
    assert [(one.model, one.version, one.everything.sequences) for one in newest] == [("m", 3, 3)]
    assert (versions(store), store.pinned("m"), store.next_version("m")) == ([1, 2, 3], 2, 4)
    store.close()


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(data[:-1])
        case "empty":
            path.write_bytes(b"")
        case "a bit":
            path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        case "renamed":
            path.rename(path.with_name(path.name.replace("000000000003", "000000000009")))


@pytest.mark.parametrize("how", ["cut", "empty", "a bit", "renamed"])
def test_a_damaged_one_is_passed_over_with_a_warning(folder: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    damage(file_of(folder, 3), how)
    with caplog.at_level(logging.WARNING):
        store, newest = reopened(folder)
    assert [one.version for one in newest] == [2]
    assert "passed over" in caplog.text
    assert versions(store) == [1, 2]
    assert store.next_version("m") == (10 if how == "renamed" else 4)
    store.write(snapshot(store.next_version("m")))
    store.close()
    store, newest = reopened(folder)
    assert newest[0].version == (10 if how == "renamed" else 4)
    store.close()


def test_one_that_is_damaged_while_it_is_served_is_not_handed_out(folder: Path) -> None:
    store, _ = reopened(folder)
    damage(file_of(folder, 2), "a bit")
    with pytest.raises(NotKept, match="kept: 1, 3"):
        store.read("m", 2)
    assert versions(store) == [1, 3]
    assert store.pinned("m") is None
    file_of(folder, 1).unlink()
    with pytest.raises(NotKept):
        store.pin("m", 1)
    store.close()


@pytest.mark.parametrize("text", [b"", b"{", b'{"version": 9}', b'{"version": null}', b"[]"])
def test_a_pin_that_says_nothing_is_passed_over(folder: Path, text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (pin,) = folder.glob("*/serving.json")
    pin.write_bytes(text)
    with caplog.at_level(logging.WARNING):
        store, _ = reopened(folder)
    assert store.pinned("m") is None
    assert "newest" in caplog.text
    store.close()


@pytest.mark.parametrize("point", ["write", "fsync", "replace"])
def test_what_a_crash_leaves_is_the_former_state(folder: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = reopened(folder)

    def crash(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    target = {
        "write": "pathlib.Path.open",
        "fsync": "greenroom.core.files.os.fsync",
        "replace": "pathlib.Path.replace",
    }
    with monkeypatch.context() as patch:
        patch.setattr(target[point], crash)
        with pytest.raises(OSError, match="No space"):
            store.write(snapshot(4))
    assert (versions(store), store.next_version("m")) == ([1, 2, 3], 4)
    store.close()
    store, newest = reopened(folder)
    assert [one.version for one in newest] == [3]
    assert not list(folder.rglob(f"*{PARTIAL}"))
    assert store.write(snapshot(4)).version == 4
    store.close()


def test_half_a_file_from_a_crash_is_removed(folder: Path) -> None:
    half = file_of(folder, 3).with_name(f".000000000004-0.safetensors.1{PARTIAL}")
    half.write_bytes(b"half")
    store, _ = reopened(folder)
    assert not half.exists()
    store.close()


def test_two_can_not_share_a_folder(folder: Path) -> None:
    store, _ = reopened(folder)
    with pytest.raises(InvalidConfig, match="another predictor"):
        reopened(folder)
    store.close()
    reopened(folder)[0].close()


def test_a_folder_that_can_not_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidConfig, match="state_dir"):
        FileStore(tmp_path / "file" / "state", KEEP, SNAPSHOTS).open()


# -- the format -------------------------------------------------------------------------------------------------------


def test_the_file_is_what_safetensors_reads() -> None:
    data = dump_snapshot(snapshot(1))
    arrays = load_by_safetensors(data)
    assert set(arrays) == {"all.popularity", "all.affinity", "task.0.popularity", "task.0.affinity", "seen"}
    ours, metadata = load_tensors(data)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ours[name])
    assert metadata["model"] == "m"


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        load_snapshot(data)


@given(st.data())
def test_any_change_of_the_header_is_refused_or_harmless(data: st.DataObject) -> None:
    good = dump_snapshot(snapshot(1))
    place = data.draw(st.integers(0, 900))
    changed = good[:place] + data.draw(st.binary(min_size=1, max_size=1)) + good[place + 1 :]
    try:
        loaded = load_snapshot(changed)
    except Damaged:
        return
    assert loaded.everything.popularity.shape == (loaded.shape.layers, loaded.shape.experts)


def test_arrays_of_no_size_travel_too() -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "a": np.empty((0, 4, 4), np.float32),
        "b": np.arange(3, dtype=np.uint8),
        "c": np.empty((0, 16), np.uint8),
    }
    loaded, metadata = load_tensors(dump_tensors(arrays, {"x": "ü"}))
    assert {name: array.shape for name, array in loaded.items()} == {"a": (0, 4, 4), "b": (3,), "c": (0, 16)}
    assert metadata == {"x": "ü"}
