from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.emoe import cli, stages
from benchmarks.emoe.stages import Settings, run_stages


def test_a_stage_that_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def well(settings: Settings, say: Any) -> dict[str, Any]:
        return {"goodput_ratio_fcfs": 1.4, "rows": []}

    def badly(settings: Settings, say: Any) -> dict[str, Any]:
        raise OSError("no room")

    monkeypatch.setattr(stages, "_STAGES", {"memory": badly, "scheduling": well})
    said: list[str] = []
    found = run_stages(("memory", "scheduling"), Settings(quick=True, share=0.6, out=tmp_path), said.append)
    assert found["goodput_ratio_fcfs"] == 1.4
    assert found["memory"] == {"error": "OSError: no room"}
    assert found["recovered_at_60"] is None
    shown = "\n".join(said)
    assert "failed: OSError: no room" in shown
    assert "1.400   aim ≥ 1.3    met" in shown
    assert "not measured" in shown


def test_help_has_examples() -> None:
    assert "make bench-emoe QUICK=1" in CliRunner().invoke(cli.main, ["--help"]).output
