"""The stage `real`, but for the engine that serves: experts that are made, and what is foretold."""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from benchmarks.coserve import random_experts as made
from benchmarks.coserve.boards import definition
from benchmarks.coserve.checkpoints import NoRoom, check_room, checkpoints, smaller, write_definition
from benchmarks.coserve.random_experts import LABELS, Shape
from benchmarks.coserve.real import QUICK, table
from benchmarks.coserve.real.foretold import first_time_dearer, slower_by
from benchmarks.coserve.real.samba import _first
from benchmarks.coserve.real.stage import poisson, row_of
from benchmarks.coserve.settings import Setting
from greenroom.coe.graph.definition_file import read_definition
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.coe.simulation.simulate import Served, Way
from tests.quiet_transformers import no_progress_bars as no_progress_bars


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {role: Shape((4, 8), (1, 1), stem=4) for role in ("type", "half", "equal")}
    monkeypatch.setattr(made, "SHAPES", shapes)
    made._weights.cache_clear()
    made._config.cache_clear()


@pytest.mark.usefixtures("tiny")
def test_experts_are_checkpoints_that_differ_and_are_made_once(tmp_path: Path) -> None:
    board = smaller(definition("A"), 3)
    folders = checkpoints(tmp_path / "experts", list(board.experts))
    weights = [load_file(folder / "model.safetensors")["classifier.1.weight"] for folder in folders.values()]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])
    name = next(iter(folders))
    loaded = AutoModelForImageClassification.from_pretrained(folders[name])
    assert torch.equal(loaded.state_dict()["classifier.1.weight"], weights[0])
    stamp = (folders[name] / "model.safetensors").stat().st_mtime_ns
    assert checkpoints(tmp_path / "experts", list(board.experts)) == folders
    assert (folders[name] / "model.safetensors").stat().st_mtime_ns == stamp

    file = write_definition(tmp_path / "board.toml", board, folders)
    read = read_definition(file)
    assert read.quantities == board.quantities
    assert {key: one.next for key, one in read.experts.items()} == {key: one.next for key, one in board.experts.items()}
    collaboration = read_collaboration(file)
    assert collaboration.experts[0].labels == tuple(f"{collaboration.graph.names[0]}: {label}" for label in LABELS)
    made._weights.cache_clear()
    made._config.cache_clear()


def test_a_smaller_board_has_the_detectors_that_its_types_lead_to() -> None:
    whole = definition("A")
    board = smaller(whole, 4)
    assert list(board.quantities) == list(whole.quantities)[:4]
    followers = {edge.expert for name in board.quantities for edge in board.experts[name].next}
    assert set(board.experts) == {*board.quantities, *followers}
    assert followers


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 3 * 2**30))
    check_room(tmp_path, 2**30)
    with pytest.raises(NoRoom, match=r"take 1\.5 GiB, .* has 3 GiB free, .*GREENROOM_CACHE"):
        check_room(tmp_path, 3 * 2**29)
    assert "skipped: the disk" in table({"skipped": "the disk"})


def test_the_first_read_is_checked() -> None:
    load_ms = first_time_dearer([10.0, 20.0], [1.0, 2.0])
    assert [load_ms(1), load_ms(1), load_ms(0), load_ms(1), load_ms(0)] == [22.0, 20.0, 11.0, 20.0, 10.0]


def served(**more: Any) -> Served:
    return Served(**{"latencies_ms": (5.0, 10.0), "total_ms": 100.0, "loads": 3, "link_busy_ms": 30.0,
                     "computed_ms": 200.0, "batches": 2, **more})  # fmt: skip


def test_batches_are_slower_by_what_is_done_beside_them_while_all_compute() -> None:
    assert slower_by(0.0, served(), 2) == 1.0
    assert slower_by(40.0, served(), 2) == pytest.approx(1 / 0.8)
    assert slower_by(40.0, served(computed_ms=100.0), 2) == pytest.approx(1 / 0.9)
    assert slower_by(1e9, served(), 2) == 2.0
    # Of one executor every thread waits for the one whose core is shared.
    assert slower_by(40.0, served(computed_ms=100.0), 1) == pytest.approx(1 / 0.6)


def test_a_row_is_held_against_what_was_foretold() -> None:
    runs = [{"per_s": rate, "switches": 3} for rate in (16.0, 25.0, 20.0)]
    row = row_of(runs, served(), Setting(2, 100), [Way(0.0, (0, 1)), Way(1.0, (0,))])
    assert row["per_s"] == {"median": 20.0, "min": 16.0, "max": 25.0}
    assert row["foretold"]["per_s"] == 20.0
    assert row["foretold"]["batch"] == 1.5
    assert row["replay_error"] == 0.0


def test_poisson_arrivals_come_at_the_rate_and_are_the_same_for_a_seed() -> None:
    found = poisson(4000, 50.0, 1)
    assert found == sorted(found) == poisson(4000, 50.0, 1)
    assert 4000 / found[-1] * 1000 == pytest.approx(50.0, rel=0.05)


def test_samba_takes_those_of_one_expert_from_the_front() -> None:
    ways = [Way(0.0, (7,)), Way(0.0, (8,)), Way(0.0, (3, 7))]
    waiting = deque([(0, 0), (2, 1), (1, 0), (0, 0)])
    assert list(_first(waiting, ways, 7, 8)) == [(0, 0), (2, 1)]
    assert list(waiting) == [(1, 0), (0, 0)]
    assert list(_first(deque([(0, 0), (2, 1)]), ways, 7, 1)) == [(0, 0)]


def test_the_quick_scale_needs_little_disk() -> None:
    assert QUICK.types is not None
    assert QUICK.types <= 32
