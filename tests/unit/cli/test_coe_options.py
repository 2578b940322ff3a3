"""`--coe` of serve and worker: what is refused before anything is loaded, by the option's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from greenroom.cli.main import main
from greenroom.coe.serving import runtime
from greenroom.core.errors import InvalidConfig
from greenroom.worker.inference_engine import TAKES_AT_ONCE

commands = pytest.mark.parametrize("command", ["serve", "worker"])


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    return result.output


@commands
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--coe", "nowhere.toml"], "coe: 'nowhere.toml'"),
        (["--coe", "demo", "--kv-memory", "1GiB"], "kv_memory"),
        (["--coe", "demo", "--model", "somebody/model"], "model"),
        (["--coe", "demo", "--policy", "belady"], "known: coserve, decayed, fifo, lfu, lru, pull"),
        (["--coe", "demo", "--policy", "coserve:literal=5"], "literal"),
        (["--coe", "demo", "--executors", "0"], "executors"),
        (["--coe", "demo", "--expert-share", "1.5"], "expert_share"),
        (["--coe", "demo", "--memory-each"], "with the scheduling pull all executors share one memory"),
        (["--coe", "demo", "--scheduling", "pull", "--scheduling-options", '{"patience": 1}'], "age_ms, ahead"),
        (["--coe", "demo", "--max-pixels", "0"], "max_pixels"),
        (["--coe", "demo", "--max-pixels", "100000000"], "a number from 1 to 89000000"),
        (["--max-pixels", "1000"], "name one with --coe"),
        (["--executors", "2"], "name one with --coe"),
        (["--expert-share", "0.5"], "name one with --coe"),
        (["--one-memory"], "name one with --coe"),
    ],
)
def test_refused_by_name(command: str, options: list[str], said: str) -> None:
    assert said in refused(command, *options)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve", ["--state-dir", "state"]),
        ("serve", ["--forecast-every", "5"]),
        ("serve", ["--forecast-predictor", "statistics"]),
        ("serve", ["--artifact-every", "3"]),
        ("serve", ["--max-new-tokens", "3"]),
        ("serve", ["--max-prompt-tokens", "3"]),
        ("worker", ["--traces", "off"]),
        ("worker", ["--trace-rows", "3"]),
        ("worker", ["--trace-tokens"]),
        ("serve", ["--trace-tokens"]),
        ("worker", ["--forecast-every", "5"]),
        ("worker", ["--forecast-timeout", "3"]),
        ("worker", ["--forecast-predictor", "statistics"]),
        ("worker", ["--artifact-every", "3"]),
        ("worker", ["--predictor", "localhost:1"]),
    ],
)
def test_what_would_do_nothing_is_refused(command: str, options: list[str]) -> None:
    name = options[0].removeprefix("--").replace("-", "_")
    assert f"{name}: " in (said := refused(command, "--coe", "demo", "--expert-memory", "100KiB", *options))
    assert "it says nothing of a collaboration" in said


def test_schedulings_among_workers_are_none_of_executors() -> None:
    assert "known: coserve, fcfs, pull" in refused("serve", "--coe", "demo", "--scheduling", "edf")
    assert "known: edf, emoe, emoe-literal, fcfs" in refused("serve", "--scheduling", "pull")
    assert "edf" in refused("worker", "--coe", "demo", "--scheduling", "edf")


@commands
def test_an_expert_that_does_not_fit_is_named(command: str, tmp_path: Path) -> None:
    options = ["--expert-memory", "100KiB", "--cache-dir", str(tmp_path)]
    ports = ["--port", "0"] if command == "serve" else []
    said = refused(command, "--coe", "demo", *ports, *options)
    assert "expert 'resistor' alone takes 412 KiB: the least that works is" in said


def test_the_engine_of_a_worker_has_room_for_what_it_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: object, most_requests: int, **more: object) -> None:
        raise InvalidConfig("room", most_requests, "enough")

    monkeypatch.setattr(runtime, "CollaborationRuntime", made)
    options = ["--coe", "demo", "--max-queued", "20000", "--listen", "127.0.0.1:0"]
    assert f"room: {2 * (TAKES_AT_ONCE + 20_000)}" in refused("worker", *options)
    assert "max_queued: 1000001" in refused("worker", "--coe", "demo", "--max-queued", "1000001")
