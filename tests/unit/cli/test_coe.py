from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from greenroom.cli.main import main
from greenroom.experts.pack.pack_file import PackFile
from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.random_experts import save_board


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_board(tmp_path)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["coe", *arguments])
    return done.exit_code, done.output


def test_what_a_board_is(file: Path) -> None:
    code, out = run("check", str(file))
    assert code == 0, out
    assert "the parameter 'component', 2 values" in out
    assert "1.62 experts on average" in out
    rows = [line.split()[:2] for line in out.splitlines()[-3:]]
    assert rows == [["resistor", "75.00%"], ["turned", "62.50%"], ["chip", "25.00%"]]


def test_as_json(file: Path) -> None:
    code, out = run("check", str(file), "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["experts"] for one in found["architectures"]] == [2, 1]
    assert found["experts"][2]["task"] == "object detection"
    assert found["bytes"] == sum(expert["bytes"] for expert in found["experts"])


def test_what_is_wrong_is_named(file: Path) -> None:
    (file.parent / "experts" / "chip" / "config.json").unlink()
    code, out = run("check", str(file))
    assert code != 0
    assert f"{file}: experts.chip: experts/chip has no config.json" in out.replace("\n", "")


def test_a_pack_is_made(file: Path, tmp_path: Path) -> None:
    code, out = run("pack", str(file), "--cache-dir", str(tmp_path / "cache"))
    assert code == 0, out
    PackFile.open(Path(out.splitlines()[-1])).verify()
