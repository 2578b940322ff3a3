from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.stages import Settings, run_module, run_named, scale_of
from greenroom.core.pictures import PlotUnavailable


@dataclass(frozen=True)
class Much:
    rows: int = 1000
    seeds: int = 5
    trace: Path | None = None


class Stage(ModuleType):
    """Says how much it was told to do."""

    Scale = Much
    QUICK = Much(rows=10, seeds=2)

    def run(self, scale: Much) -> dict[str, Any]:
        return {"rows": scale.rows, "oracle_gap_points": 4.0}

    def table(self, found: dict[str, Any]) -> str:
        return f"{found['rows']} rows"

    def draw(self, found: dict[str, Any], path: Path) -> None:
        raise PlotUnavailable("no colours")


def test_a_stage_gives_figures_table_and_picture_and_one_that_is_missing_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "paper.cache", Stage("cache"))
    said: list[str] = []
    settings = Settings(quick=True, out=tmp_path)
    runs = {name: partial(run_module, "paper", name, settings, said.append) for name in ("drift", "cache")}
    aims = {"oracle_gap_points": Aim(5.0, at_least=False), "real_gap_points": Aim(8.0, at_least=False)}
    found = run_named(runs, aims, said.append)
    assert found["oracle_gap_points"] == 4.0
    assert found["cache"]["rows"] == 10
    assert found["drift"]["error"].startswith("ModuleNotFoundError")
    assert found["real_gap_points"] is None
    shown = "\n".join(said)
    assert "10 rows\nno picture: no colours" in shown
    assert "4.000   aim ≤ 5      met" in shown


def test_options_go_to_the_stages_that_know_them(tmp_path: Path) -> None:
    trace = tmp_path / "t.npz"
    assert scale_of(Stage("cache"), Settings(quick=False, out=tmp_path)) == Much()
    asked = Settings(quick=True, out=tmp_path, seeds=9, trace=trace)
    assert scale_of(Stage("cache"), asked) == Much(10, 9, trace)


def test_no_figure_of_a_stage_takes_the_place_of_another_stage() -> None:
    found = run_named({"line": lambda: {"rate": 1.0}, "real": lambda: {"line": "another one"}}, {}, lambda _: None)
    assert found["line"] == {"rate": 1.0}
    assert found["real"] == {"line": "another one"}
