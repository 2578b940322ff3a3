"""Costs are measured once a machine, and kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.coserve import costs
from benchmarks.coserve.costs import FILE, documented, kept_or_measured
from benchmarks.coserve.random_experts import SHAPES
from greenroom.core.machine import machine_name


@pytest.fixture
def measurings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []

    def measured(folders: object) -> costs.Costs:
        made.append(folders)
        return msgspec.structs.replace(documented(), machine=machine_name(), made="measured")

    monkeypatch.setattr(costs, "measured", measured)
    return made


def test_what_was_measured_here_is_kept(measurings: list[object], tmp_path: Path) -> None:
    folders = {"type": [tmp_path]}
    first = kept_or_measured(folders, tmp_path / "kept")
    assert kept_or_measured(folders, tmp_path / "kept") == first
    assert measurings == [folders]


@pytest.mark.parametrize("spoilt", [b"", b"{}", msgspec.json.encode(documented())])
def test_of_another_machine_or_unreadable_they_are_measured_anew(
    spoilt: bytes, measurings: list[object], tmp_path: Path
) -> None:
    (tmp_path / FILE).write_bytes(spoilt)
    assert kept_or_measured({"type": [tmp_path]}, tmp_path).machine == machine_name()
    assert len(measurings) == 1


def test_documented_costs_are_of_every_role_and_say_so() -> None:
    found = documented()
    assert found.models.keys() == SHAPES.keys()
    assert found.made == "documented"
    assert all(own.batches.by_executors.keys() == {1, 2, 3, 4} for own in found.models.values())
    assert all(own.torch_ms > own.batches.load_ms for own in found.models.values())
