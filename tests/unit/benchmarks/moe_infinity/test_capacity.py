"""Fig. 12: which capacity is enough, and the stage on the smallest scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.moe_infinity import capacity
from tests.unit.benchmarks.moe_infinity.tiny_worlds import serially, tiny


def test_enough_is_where_recall_stops_to_rise() -> None:
    recalls = {0: 0.0, 1: 0.3, 10: 0.601, 50: 0.595, 100: 0.6}
    rows = [{"capacity": members, "recall": {"mean": recall}} for members, recall in recalls.items()]
    assert capacity.enough(rows) == 10
    assert capacity.enough([row | {"recall": {"mean": row["capacity"]}} for row in rows]) == 100


def test_the_stage_gives_a_row_a_capacity_and_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "in_processes", serially)
    monkeypatch.setattr(capacity, "MODELS", {"tiny": tiny()})
    found = capacity.run(capacity.Scale(seeds=2, capacities=(1, 8), learnt=8, served=2, models=("tiny",)))

    assert [row["capacity"] for row in found["rows"]] == [0, 1, 8]
    none, one, all_of_them = found["rows"]
    assert none["recall"]["mean"] == 0
    assert none["over_none"] == {"mean": 1.0, "within": 0.0}
    assert 0 < one["recall"]["mean"] < all_of_them["recall"]["mean"]
    json.dumps(found)
    assert "enough" in capacity.table(found)
    capacity.draw(found, tmp_path / "capacity.png")
    assert (tmp_path / "capacity.png").stat().st_size > 0
