"""The command lines of benchmarks that consist of stages."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.emoe import cli as emoe
from benchmarks.emoe import stages as emoe_stages
from benchmarks.moe_infinity import cli as moe_infinity
from benchmarks.moe_infinity import stages as moe_infinity_stages


@pytest.mark.parametrize(
    ("cli", "stages", "file"),
    [(emoe, emoe_stages, "emoe.json"), (moe_infinity, moe_infinity_stages, "moe-infinity.json")],
)
def test_the_last_line_is_json_with_every_figure_that_has_an_aim(
    cli: ModuleType, stages: ModuleType, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_stages(chosen: Any, settings: Any, say: Any) -> dict[str, Any]:
        assert chosen == stages.STAGES
        assert settings.quick
        return dict.fromkeys(stages.AIMS)

    monkeypatch.setattr(cli, "run_stages", no_stages)
    result = CliRunner().invoke(cli.main, ["--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert set(stages.AIMS) <= set(found)
    assert found == json.loads((tmp_path / file).read_text())
    assert found["machine"]["cores"] > 0


def test_help_has_examples() -> None:
    assert "make bench-moe-infinity QUICK=1" in CliRunner().invoke(moe_infinity.main, ["--help"]).output
