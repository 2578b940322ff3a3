from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.turn import Trace
from benchmarks.micro.profile_step import Profile, picture, profile_of, table
from tests.unit.benchmarks.made_turns import turn


def profile(share: str = "33%", concurrency: int = 1) -> Profile:
    """Two rounds of ten steps; 1.0 s plain, 1.2 s instrumented."""
    parts = {"experts": 0.5, "waiting": 0.5, "loop": 0.2}
    plain = turn(1.0, steps=10, bytes_moved=600, link=1000.0)
    turns = [(plain, turn(1.2, steps=10, inside=parts))] * 2
    return profile_of("widened", share, concurrency, turns, Trace(50, 0, 0), {"expert_bytes": 10}, 2000.0)


def test_parts_are_milliseconds_a_step_and_rates_stand_beside_the_machines() -> None:
    found = profile()
    assert found.parts == pytest.approx({"experts": 50.0, "waiting": 50.0, "loop": 20.0})
    assert found.step_ms == pytest.approx(100.0)
    assert found.instrumented_ms == pytest.approx(120.0)
    assert found.overhead == pytest.approx(0.2)
    assert found.expert_read == pytest.approx(50 * 10 / 0.5)
    assert found.moved == pytest.approx(600.0)
    assert found.link == pytest.approx(1000.0)


def test_the_table_has_a_line_a_part_and_a_column_a_case() -> None:
    lines = table([profile("100%"), profile("33%", 8)]).splitlines()
    assert lines[0] == "| ms a step | widened, 100% | widened, 33%, ×8 |"
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "experts", "waiting", "loop", "a step", "not instrumented",
    ]  # fmt: skip
    assert "50.00 (42%); 0.0 of 0.0 GB/s of memory read" in lines[2]
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_the_picture_is_one(tmp_path: Path) -> None:
    picture([profile("100%"), profile("33%")], tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
