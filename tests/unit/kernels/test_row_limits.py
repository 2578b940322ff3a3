"""Up to how many rows products are compiled ones: decided from timings, measured within a budget, kept, overruled."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.forward import row_limits
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.forward.row_limits import PRODUCT_ROWS, Measured, Timing, limit_of, limits_for, time_both
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import MoePackSource
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import ANY_ROWS, NativeRows, RowLimits, native_rows
from greenroom.worker.model.config import WorkerConfig
from tests.mxfp4_checkpoints import save_mxfp4

COUNTS = (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture
def native() -> NativeRows:
    try:
        return native_rows().for_a_model()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def timings(ratios: list[float]) -> list[Timing]:
    """``ratios``: torch's time over that of the compiled ones."""
    return [Timing(rows, 0.001, 0.001 * ratio) for rows, ratio in zip(COUNTS, ratios, strict=False)]


@pytest.mark.parametrize(
    ("ratios", "limit"),
    [
        ([1.7, 1.5, 1.4, 1.2, 0.6, 0.4, 0.2], 8),  # instructions for bf16, large weights
        ([1.7, 2.5, 3.4, 6.0, 6.7, 5.0, 3.0], ANY_ROWS),  # small ones, where a step is mostly Python
        ([1.7, 1.5, 0.7, 1.4, 1.3, 1.3, 1.2], ANY_ROWS),  # another process was busy meanwhile
        ([0.5, 0.5, 0.4, 0.3, 0.2, 0.2, 0.1], 0),
        ([0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99], ANY_ROWS),  # as good as equal: rows are the same in any company
        ([1.5, 1.4], 2),  # there was no time for more
    ],
)
def test_the_limit_is_where_least_is_lost(ratios: list[float], limit: int) -> None:
    assert limit_of(timings(ratios), COUNTS[-1]) == limit


def test_what_was_not_reached_goes_by_what_is_known_of_products() -> None:
    assert limit_of(timings([1.5, 1.4]), COUNTS[-1], beyond=8) == 8
    assert limit_of(timings([1.5, 1.4]), COUNTS[-1], beyond=ANY_ROWS) == ANY_ROWS
    assert limit_of(timings([1.5, 0.4]), COUNTS[-1], beyond=ANY_ROWS) == 1


class Clock:
    """Each run takes ``seconds(rows, compiled)``."""

    def __init__(self, seconds: Callable[[int, bool], float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.ran: list[tuple[int, bool]] = []

    def __call__(self) -> float:
        return self.now

    def run(self, rows: int, compiled: bool) -> None:
        self.ran.append((rows, compiled))
        self.now += self.seconds(rows, compiled)


def test_both_are_timed_by_turns_and_the_quickest_run_counts() -> None:
    hiccups = iter([0.0, 0.0, 9.0] + [0.0] * 1000)
    clock = Clock(lambda rows, compiled: 0.001 * rows * (1 if compiled else 3) + next(hiccups))
    found = time_both(clock.run, (1, 2), budget_s=60.0, clock=clock)
    assert [(one.rows, round(one.compiled_s, 6), round(one.torch_s, 6)) for one in found] == [
        (1, 0.001, 0.003),
        (2, 0.002, 0.006),
    ]
    assert [compiled for _, compiled in clock.ran[:4]] == [True, False, True, False]


def test_a_slow_model_does_not_make_the_start_longer_than_the_budget() -> None:
    clock = Clock(lambda rows, compiled: 0.01 * rows)
    found = time_both(clock.run, (1, 2, 4, 8, 16, 32), budget_s=1.0, clock=clock)
    assert 1 < len(found) < 6
    assert clock.now < 1.5
    slow = Clock(lambda rows, compiled: 10.0)
    assert [one.rows for one in time_both(slow.run, (4, 8), budget_s=1.0, clock=slow)] == [4]


def test_expanding_an_expert_leaves_time_to_measure_all_rows(
    native: NativeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's products pay for it at any number of rows. Were it done in each run, a limit of a row or two would send
    all others that way."""
    checkpoint = resolve(str(save_mxfp4(tmp_path)))
    loaded = load(checkpoint, expert_format=MXFP4)
    manifest = MoePackSource(ExpertPlan(checkpoint, loaded.dtype, MXFP4)).manifest("")
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    def expand(*arguments: Any, own: Callable[..., None] = MXFP4.expand) -> None:
        nonlocal now
        now += 0.25
        own(*arguments)

    monkeypatch.setattr(MXFP4, "expand", expand)
    found = row_limits.measure(loaded, RaggedModel(loaded.model, native=loaded.native), manifest, clock=clock)
    assert [one.rows for one in found.products] == list(PRODUCT_ROWS)
    assert all(one.torch_s > 0.25 > one.compiled_s for one in found.products)
    assert found.limits.product == ANY_ROWS


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for the measurement; lists what it was made of."""
    made: list[str] = []

    def measure(loaded: Any, ragged: Any, manifest: Any, of: str) -> Measured:
        made.append(of)
        return Measured(of, RowLimits(8, 64, 16), tuple(timings([1.5])))

    monkeypatch.setattr(row_limits, "measure", measure)
    monkeypatch.setattr(row_limits, "_here", {})
    return made


def asked(native: NativeRows | None, pack: Path, how: str, dense: tuple[str, ...] = ()) -> RowLimits | None:
    manifest = SimpleNamespace(model_type="some", dtype="bfloat16", source_digest="abc", layers=())
    loaded: Any = SimpleNamespace(dense_formats=dense)
    ragged: Any = SimpleNamespace(native=native)
    opened: Any = SimpleNamespace(path=pack, manifest=manifest)
    return limits_for(loaded, ragged, opened, how)


def test_it_is_measured_once_where_the_processor_multiplies_bf16(
    native: NativeRows, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tmp_path / "some.pack"
    native.multiplies_bf16 = True
    assert asked(native, pack, "auto") == RowLimits(8, 64, 16)
    assert asked(native, tmp_path / "elsewhere" / "some.pack", "auto") == RowLimits(8, 64, 16), "of the same model"
    assert len(measured) == 1
    monkeypatch.setattr(row_limits, "_here", {})  # the next process
    assert asked(native, pack, "auto") == RowLimits(8, 64, 16)
    assert len(measured) == 1
    (kept,) = tmp_path.glob("*.rows.json")
    kept.write_text("{}")
    monkeypatch.setattr(row_limits, "_here", {})
    assert asked(native, pack, "auto") == RowLimits(8, 64, 16)
    assert len(measured) == 2, "what is no profile of this model on this machine is measured anew"


def test_processes_that_share_a_pack_compute_alike(
    native: NativeRows, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.multiplies_bf16 = True
    pack = tmp_path / "some.pack"
    assert asked(native, pack, "auto") == RowLimits(8, 64, 16)
    monkeypatch.setattr(row_limits, "_here", {})
    monkeypatch.setattr(platform, "node", lambda: "the same container, made anew")
    assert asked(native, pack, "auto") == RowLimits(8, 64, 16)
    assert len(measured) == 1

    (kept,) = tmp_path.glob("*.rows.json")
    kept.unlink()
    monkeypatch.setattr(row_limits, "_here", {})
    mine = row_limits.measure

    def measure(loaded: Any, ragged: Any, manifest: Any, of: str) -> Measured:
        row_limits._save(kept, Measured(of, RowLimits(4, 32, 8)))  # a replica was quicker
        return mine(loaded, ragged, manifest, of)

    monkeypatch.setattr(row_limits, "measure", measure)
    assert asked(native, pack, "auto") == RowLimits(4, 32, 8)
    monkeypatch.setattr(row_limits, "_here", {})
    assert asked(native, pack, "auto") == RowLimits(4, 32, 8)


def test_dense_layers_that_are_kept_otherwise_are_measured_apart(
    native: NativeRows, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.multiplies_bf16 = True
    for dense in ((), ("int8",), ("int8", "q6_k"), ()):
        monkeypatch.setattr(row_limits, "_here", {})  # the next process
        asked(native, tmp_path / "some.pack", "auto", dense)
    assert len(measured) == 3, "steps of the modules take another time, and each kind finds its own again"


def test_another_version_of_greenroom_measures_anew(
    native: NativeRows, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.multiplies_bf16 = True
    asked(native, tmp_path / "some.pack", "auto")
    monkeypatch.setattr(row_limits, "_here", {})  # the next process
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0")
    asked(native, tmp_path / "some.pack", "auto")
    assert len(measured) == 2, "its products may be faster or slower"


def test_it_is_not_measured_where_it_is_known_or_fixed(native: NativeRows, measured: list[str], tmp_path: Path) -> None:
    native.multiplies_bf16 = False
    assert asked(native, tmp_path / "some.pack", "auto") == RowLimits(ANY_ROWS, ANY_ROWS, ANY_ROWS)
    native.multiplies_bf16 = True
    assert asked(native, tmp_path / "some.pack", "4") == RowLimits(4, 4, 4)
    assert asked(native, tmp_path / "some.pack", "4,64,16") == RowLimits(4, 64, 16)
    assert asked(None, tmp_path / "some.pack", "measure") is None
    assert not measured
    native.multiplies_bf16 = False
    assert asked(native, tmp_path / "some.pack", "measure") == RowLimits(8, 64, 16)


def test_a_models_limits_are_its_own(native: NativeRows) -> None:
    other = native.for_a_model()
    other.limits = RowLimits(1, 2, 3)
    assert native.limits != other.limits
    assert other.most_rows == 1
    with other.alone():
        assert other.most_rows == ANY_ROWS
    assert other.most_rows == 1


@pytest.mark.parametrize("text", ["", "few", "-1", "1,2", "1,2,3,4", "8.5"])
def test_what_are_no_rows_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="compiled_rows"):
        WorkerConfig(model="some", compiled_rows=text)
