"""The whole benchmark on small models: it runs to its end and its last line is the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine.figures import AIMS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_quick_run_measures_everything(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine", "--quick", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {row["model"]: row["error"] for row in result["rows"] if row["error"]} == {}
    assert all(result[figure] is not None for figure in AIMS)
    assert result["third_ratio_device_map"] is not None
    assert {row["model"] for row in result["rows"]} == {"widened", "random", "bundled"}
    agreeing = [row["same_tokens_as_resident"] for row in result["rows"] if row["system"] == "greenroom"]
    assert agreeing
    assert set(agreeing) == {1.0}, "no budget and no policy changes a token"
    assert (tmp_path / "engine.png").exists()
    assert json.loads((tmp_path / "engine.json").read_text()) == result
