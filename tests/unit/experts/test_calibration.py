"""The disk link is measured once for a pack, a host and a file system; the simplest setting wins unless beaten."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig, PackError
from greenroom.core.units import MIB
from greenroom.experts.copying import disk_calibration
from greenroom.experts.copying.disk_calibration import (
    CANDIDATES,
    SIMPLEST,
    MeasuredLink,
    Sample,
    choose,
    load_or_measure,
    measure,
)
from greenroom.experts.pack.direct_io import PREFETCH_READ_BYTES, ReadSettings, page_aligned
from greenroom.experts.pack.layout import PackLayer, PackManifest, RecordLayout
from greenroom.experts.pack.pack_file import PackFile, PackWriter

LAYOUT = RecordLayout.of([("w", (64, 128), "float32")])
SPLIT = ReadSettings(read_bytes=8192, threads=2, depth=2)
DEEP = ReadSettings(threads=2, depth=2)


def write_pack(path: Path, digest: str = "abc") -> Path:
    manifest = PackManifest("fake", "float32", digest, (PackLayer("a.experts", 6, 2, LAYOUT),))
    with PackWriter(path, manifest) as writer:
        for expert in range(6):
            writer.write(0, expert, [torch.full((64, 128), float(expert))])
    return path


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(disk_calibration, "SMALL_PACK_BYTES", 0)
    opened = PackFile.open(write_pack(tmp_path / "x.pack"))
    yield opened
    opened.close()


def samples(**seconds: list[float]) -> dict[ReadSettings, list[Sample]]:
    named = {"simple": SIMPLEST, "split": SPLIT, "deep": DEEP}
    return {named[name]: [Sample(s, s) for s in turns] for name, turns in seconds.items()}


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        (samples(simple=[1, 1, 1, 1], split=[0.95] * 4, deep=[0.96] * 4), SIMPLEST),
        (samples(simple=[1, 1, 1, 1], split=[0.8] * 4, deep=[0.5] * 4), DEEP),
        (samples(simple=[1, 1, 1, 1], split=[0.52] * 4, deep=[0.5] * 4), SPLIT),
        (samples(simple=[1, 9, 1, 1], split=[1, 8.9, 1, 1], deep=[1.1, 9.9, 1.1, 1.1]), SIMPLEST),  # one bad turn
        (samples(simple=[1, 5, 1, 5], split=[0.5, 2.5, 0.5, 2.5], deep=[1, 5, 1, 5]), SPLIT),  # bad turns fall on all
        (samples(simple=[1, 1, 1, 1], split=[0.1, 1.2, 1.2, 1.2]), SIMPLEST),  # luck once is no advantage
        (samples(simple=[1]), SIMPLEST),
    ],
)
def test_choose(measured: dict[ReadSettings, list[Sample]], chosen: ReadSettings) -> None:
    assert choose(measured) == chosen


@given(
    st.integers(1, 9).flatmap(
        lambda turns: st.lists(
            st.lists(st.floats(1e-4, 1.0), min_size=turns, max_size=turns), min_size=1, max_size=len(CANDIDATES)
        )
    )
)
def test_what_is_chosen_is_never_clearly_slower_than_the_simplest(times: list[list[float]]) -> None:
    measured = {
        settings: [Sample(s, s) for s in own] for settings, own in zip(CANDIDATES, times, strict=False)
    }  # fmt: skip
    chosen = choose(measured)
    ratios = [a.alone_s / b.alone_s for a, b in zip(measured[SIMPLEST], measured[chosen], strict=True)]
    assert statistics.median(ratios) * disk_calibration.CLEARLY >= 1.0


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        choose({})


def test_a_profile_is_kept_and_used_again(pack: PackFile, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = load_or_measure(pack, on_measure=said.append, budget_s=0.02)
    assert first is not None
    assert first.record_bytes == LAYOUT.nbytes
    assert first.bytes_per_s > 0
    assert first.latency_s >= 0
    assert first.seconds(0) == first.latency_s
    assert len(said) == 1
    monkeypatch.setattr(disk_calibration, "measure", None)  # would fail where it is called
    assert load_or_measure(pack, on_measure=said.append) == first
    assert disk_calibration.load(pack) == first
    assert len(said) == 1
    assert [p.name for p in pack.path.parent.iterdir() if "partial" in p.name] == []


def test_it_is_measured_again_where_that_is_asked_for(pack: PackFile) -> None:
    load_or_measure(pack, budget_s=0.02)
    _edited(disk_calibration.profile_path(pack.path), bytes_per_s=1.0)
    assert disk_calibration.load(pack) is not None
    again = load_or_measure(pack, budget_s=0.02, anew=True)
    assert again is not None
    assert again.bytes_per_s > 1
    assert disk_calibration.load(pack) == again


def _edited(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "change",
    [
        {"host": "another"},
        {"filesystem": "8:1 xfs /dev/sda1 direct"},
        {"pack": "another"},
        {"version": 0},
        {"bytes_per_s": 0.0},
        {"reads": {"read_bytes": 5, "threads": 1, "depth": 1}},
        {"reads": None},
    ],
)
def test_a_profile_of_anything_else_is_made_anew(pack: PackFile, change: dict[str, Any]) -> None:
    first = load_or_measure(pack, budget_s=0.02)
    path = disk_calibration.profile_path(pack.path)
    _edited(path, **change)
    assert disk_calibration.load(pack) is None
    again = load_or_measure(pack, budget_s=0.02)
    assert again is not None
    assert first is not None
    assert (again.pack, again.host, again.filesystem) == (first.pack, first.host, first.filesystem)
    assert disk_calibration.load(pack) == again


def test_a_file_that_can_not_be_read_is_made_anew(pack: PackFile) -> None:
    path = disk_calibration.profile_path(pack.path)
    path.write_bytes(b'{"reads": ')
    assert load_or_measure(pack, budget_s=0.02) == disk_calibration.load(pack) is not None


def test_the_pack_made_anew_from_other_weights_is_measured_again(pack: PackFile) -> None:
    assert load_or_measure(pack, budget_s=0.02) is not None
    write_pack(pack.path, "other")
    other = PackFile.open(pack.path)
    assert disk_calibration.load(other) is None
    other.close()


def test_a_folder_that_can_not_be_written_to_is_no_error(pack: PackFile) -> None:
    # A folder under each of the two names: neither file can be made, not even by root.
    disk_calibration.profile_path(pack.path).mkdir()
    disk_calibration.profile_path(pack.path).with_suffix(".lock").mkdir()
    assert load_or_measure(pack, budget_s=0.02) is not None


def test_a_small_pack_is_not_measured(tmp_path: Path) -> None:
    small = PackFile.open(write_pack(tmp_path / "x.pack"))
    assert load_or_measure(small, on_measure=lambda _: pytest.fail("measured")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["x.pack"]
    small.close()


def test_a_disk_that_fails_is_reported(pack: PackFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(layer: int, expert: int, start: int, buffer: memoryview) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pack, "read_part", broken)
    with pytest.raises(PackError, match=r"x\.pack can not be read: .*Input/output"):
        load_or_measure(pack, budget_s=0.02)


def test_a_slow_disk_is_tried_with_the_simplest_setting_alone(pack: PackFile) -> None:
    ticks = itertools.count()  # every look at the clock is a second: dearer than the budget
    profile = measure(pack, budget_s=1.5, clock=lambda: float(next(ticks)))
    assert profile.reads == SIMPLEST
    assert len(profile.tried) == 1


@pytest.mark.parametrize("settings", [*CANDIDATES, SPLIT, ReadSettings(read_bytes=4096)])
def test_the_parts_together_are_the_record(pack: PackFile, settings: ReadSettings) -> None:
    part = settings.part_bytes(LAYOUT.nbytes, prefetch=False)
    record = page_aligned(LAYOUT.nbytes)
    for start in range(0, LAYOUT.nbytes, part):
        pack.read_part(0, 5, start, record[start : min(start + part, LAYOUT.nbytes)])
    assert (np.frombuffer(record, dtype=np.float32)[: 64 * 128] == 5).all()
    pack.check(0, 5, record[: LAYOUT.nbytes])


@given(nbytes=st.integers(1, 9000).map(lambda pages: pages * 4096), read=st.integers(1, 4096), prefetch=st.booleans())
def test_parts_are_equal_pages_and_no_longer_than_asked_for(nbytes: int, read: int, prefetch: bool) -> None:
    part = ReadSettings(read_bytes=read * 4096).part_bytes(nbytes, prefetch=prefetch)
    assert part % 4096 == 0
    assert 0 < part <= read * 4096
    assert not prefetch or part <= PREFETCH_READ_BYTES
    parts = -(-nbytes // part)
    assert parts * part - nbytes < part
    assert parts == -(-nbytes // min(read * 4096, PREFETCH_READ_BYTES if prefetch else nbytes))


def test_whole_records_are_one_read_unless_they_are_prefetched() -> None:
    assert SIMPLEST.part_bytes(22 * MIB, prefetch=False) == 22 * MIB
    assert SIMPLEST.part_bytes(22 * MIB, prefetch=True) == 22 * MIB // 3 // 4096 * 4096 + 4096


@pytest.mark.parametrize("field", ["read_bytes", "threads", "depth"])
def test_settings_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        dataclasses.replace(SIMPLEST, **{field: 0})


def test_a_profile_tells_how_long_a_fetch_takes() -> None:
    profile = MeasuredLink(SIMPLEST, 1e9, 0.001, 11 * MIB, "p", "h", "f", "t")
    assert profile.seconds(10**9) == pytest.approx(1.001)
    assert profile.describe() == "whole records, 1 thread, 1 in flight, 954 MiB/s"
