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

from benchmarks.coserve import cli as coserve
from benchmarks.duoserve import cli as duoserve
from benchmarks.emoe import cli as emoe
from benchmarks.emoe import stages as emoe_stages
from benchmarks.expertflow import cli as expertflow
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
    [
        (coserve, (harness_stages, "run_named")),
        (duoserve, (harness_stages, "run_named")),
        (emoe, (emoe, "run_stages")),
        (expertflow, (harness_stages, "run_named")),
        (moe_infinity, (harness_stages, "run_named")),
        (pipeline, (pipeline, "JarBroker")),
    ],
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


@pytest.mark.parametrize(
    ("cli", "folder", "file", "beside"),
    [
        (coserve, "coserve", "coserve.json", set()),
        (duoserve, "duoserve", "duoserve.json", set()),
        (expertflow, "expertflow", "expertflow.json", set()),
        (moe_infinity, "moe_infinity", "moe-infinity.json", {"gain_over_best_baseline"}),
    ],
)
def test_the_last_line_of_one_whose_stages_are_modules_is_json_with_every_figure_that_has_an_aim(
    cli: Any, folder: str, file: str, beside: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []

    def no_stage(package: str, stage: str, settings: Any, say: Any) -> dict[str, Any]:
        assert settings.quick
        asked.append((package, stage))
        return {}

    monkeypatch.setattr(harness_stages, "run_module", no_stage)
    is_whole(cli.main, {*cli.AIMS, *beside}, tmp_path, file)
    assert asked == [(f"benchmarks.{folder}", stage) for stage in cli.STAGES]


def is_whole(command: Command, figures: set[str], folder: Path, file: str) -> None:
    result = CliRunner().invoke(command, ["--quick", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert figures <= set(found)
    assert found == json.loads((folder / file).read_text())
    assert found["machine"]["cores"] > 0


@pytest.mark.parametrize(
    ("cli", "target"),
    [
        (coserve, "bench-coserve"),
        (duoserve, "bench-duoserve"),
        (expertflow, "bench-expertflow"),
        (moe_infinity, "bench-moe-infinity"),
    ],
)
def test_help_has_examples(cli: Any, target: str) -> None:
    told = CliRunner().invoke(cli.main, ["--help"]).output
    assert f"make {target} QUICK=1" in told
    assert f"[{'|'.join(cli.STAGES)}]" in told
