"""The command lines of benchmarks that consist of stages."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click import Command
from click.testing import CliRunner

from benchmarks.emoe import cli as emoe
from benchmarks.emoe import stages as emoe_stages
from benchmarks.harness import stages as harness_stages
from benchmarks.moe_infinity import cli as moe_infinity
from benchmarks.pipeline import cli as pipeline


@pytest.fixture
def terminated() -> Iterator[list[object]]:
    """What SIGTERM does while a benchmark runs, to be appended by it."""
    before = signal.getsignal(signal.SIGTERM)
    yield []
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("cli", "begins"),
    [(emoe, (emoe, "run_stages")), (moe_infinity, (harness_stages, "run_named")), (pipeline, (pipeline, "JarBroker"))],
)
def test_sigterm_ends_each_in_order(
    cli: Any, begins: tuple[Any, str], terminated: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Brokers, services and folders go with it. The default would leave them."""

    def begun(*_: Any, **__: Any) -> Any:
        terminated.append(signal.getsignal(signal.SIGTERM))
        raise RuntimeError("as far as this test goes")

    monkeypatch.setattr(*begins, begun)
    CliRunner().invoke(cli.main, ["--quick", "--out", str(tmp_path)])
    (handler,) = terminated
    assert callable(handler)
    with pytest.raises(SystemExit):
        handler(signal.SIGTERM, None)


def test_the_last_line_of_bench_emoe_is_json_with_every_figure_that_has_an_aim(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_stages(chosen: Any, settings: Any, say: Any) -> dict[str, Any]:
        assert chosen == emoe_stages.STAGES
        assert settings.quick
        return dict.fromkeys(emoe_stages.AIMS)

    monkeypatch.setattr(emoe, "run_stages", no_stages)
    is_whole(emoe.main, set(emoe_stages.AIMS), tmp_path, "emoe.json")


def test_the_last_line_of_bench_moe_infinity_is_json_with_every_figure_that_has_an_aim(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []

    def no_stage(package: str, stage: str, settings: Any, say: Any) -> dict[str, Any]:
        assert settings.quick
        asked.append((package, stage))
        return {}

    monkeypatch.setattr(harness_stages, "run_module", no_stage)
    is_whole(moe_infinity.main, {*moe_infinity.AIMS, "gain_over_best_baseline"}, tmp_path, "moe-infinity.json")
    assert asked == [("benchmarks.moe_infinity", stage) for stage in moe_infinity.STAGES]


def is_whole(command: Command, figures: set[str], folder: Path, file: str) -> None:
    result = CliRunner().invoke(command, ["--quick", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert figures <= set(found)
    assert found == json.loads((folder / file).read_text())
    assert found["machine"]["cores"] > 0


def test_help_has_examples() -> None:
    told = CliRunner().invoke(moe_infinity.main, ["--help"]).output
    assert "make bench-moe-infinity QUICK=1" in told
    assert f"[{'|'.join(moe_infinity.STAGES)}]" in told
