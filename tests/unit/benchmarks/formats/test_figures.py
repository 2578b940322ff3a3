"""What the benchmark of formats makes of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.formats import arms, speed_plot, tables
from benchmarks.formats.arms import BF16, BF16_THIRD, OWN_THIRD, Prepared
from benchmarks.formats.figures import aims, figures, row_json
from benchmarks.formats.models import MODELS
from benchmarks.harness.children.child_rounds import Stage
from benchmarks.harness.inputs.token_streams import random_stream
from benchmarks.harness.rows import RESIDENT, Row
from tests.unit.benchmarks.made_turns import turn

NAME = "mxfp4"
SPEEDS = {
    (BF16, RESIDENT): 20,
    (BF16, BF16_THIRD): 5,
    (NAME, RESIDENT): 50,
    (NAME, BF16_THIRD): 40,
    (NAME, OWN_THIRD): 10,
}


def prepared(limit: int | None = 1 << 30) -> Prepared:
    stream = random_stream(2048, 8)
    return Prepared(NAME, Path("/m"), MODELS[NAME], stream, 16 * 22_000_000, limit, (Path("/m"),))


def stage() -> Stage:
    return arms.stage(prepared(), "look-ahead", 3, 60.0)


def rows() -> list[Row]:
    found = []
    for arm in stage().arms:
        row = arm.row
        size = 22_000_000 if row.system == BF16 else 5_900_000
        slots = {RESIDENT: 48, BF16_THIRD: 16 if row.system == BF16 else 48, OWN_THIRD: 16}[row.share]
        row.facts = {"slots": slots, "experts": 48, "expert_bytes": size, "experts_bytes": slots * size}
        for round_, factor in ((1, 1), (2, 2)):
            tokens = SPEEDS[row.system, row.share] * factor * (2 if row.concurrency > 1 else 1)
            row.turns[round_] = turn(seconds=1.0, tokens=tokens)
        found.append(row)
    return found


def test_both_have_the_same_bytes_and_the_same_limit_where_they_are_bounded() -> None:
    bounded = [arm for arm in stage().arms if arm.row.share == BF16_THIRD]
    assert {arm.child.limit_bytes for arm in bounded} == {1 << 30}
    assert all(arm.cold for arm in bounded)
    assert {arm.child.limit_bytes for arm in stage().arms if arm.row.share != BF16_THIRD} == {None}
    assert [('"share": "352000000"' in arm.child.settings) for arm in bounded] == [False, True, False, True]


def test_gains_are_over_bf16_in_the_same_round() -> None:
    found = figures(rows(), {NAME: 5_890_000})
    assert found["mxfp4_third_gain"] == pytest.approx(8.0)
    assert found["mxfp4_resident_gain"] == pytest.approx(2.5)
    own = found["by_format"][NAME]
    assert own["third_gain_8"] == {"median": 8.0, "min": 8.0, "max": 8.0}
    assert own["own_third"]["median"] == pytest.approx(0.2)
    assert own["all_fit_in_a_third"] is True
    assert found["stored_bytes_ratio"] == pytest.approx(1.0017)
    assert own["bytes_ratio"] == pytest.approx(0.2682)


def test_what_failed_is_not_measured_and_is_told() -> None:
    own = rows()
    for row in own:
        if row.system == BF16:
            row.turns.clear()
            row.error = "no memory"
    found = figures(own, {})
    assert found["mxfp4_third_gain"] is None
    assert found["stored_bytes_ratio"] is None
    assert "failed: no memory" in tables.table(own)
    assert "not measured" in tables.summary(found)
    assert figures([], {})["by_format"] == {}


def test_the_table_has_a_line_for_each_arm_and_the_summary_each_aim(tmp_path: Path) -> None:
    own = rows()
    found = figures(own, {NAME: 5_890_000})
    assert len(tables.table(own).splitlines()) == 1 + len(own) == 11
    assert all(name in tables.summary(found) for name in aims())
    assert "all of its experts fit into bf16's third" in tables.summary(found)
    assert row_json(own[0])["experts"] == BF16
    speed_plot.plot(own, tmp_path / "formats.png")
    assert (tmp_path / "formats.png").stat().st_size > 10_000
