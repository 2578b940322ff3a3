"""The load generator against `greenroom serve` with the bundled model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.demo.tasks import TASKS
from tests.integration.server import Server
from tests.kafka.broker import free_port

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(grpc_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cache = tmp_path_factory.mktemp("cache")
    with Server("--expert-memory", "50%", "--grpc-port", str(grpc_port), cache=cache) as running:
        yield running


def load(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "greenroom_load", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_poisson_load_is_answered_and_the_answers_are_right(server: Server, tmp_path: Path) -> None:
    """Counts agree with the server's own, and times with its histogram to within what the connection adds."""
    before = server.metrics()
    text = load(
        "run", "--url", server.url, "--request-rate", "12", "--num-requests", "40", "--seed", "1",
        "--json", str(tmp_path / "r.json"), "--slo", "ttft:20000",
    )  # fmt: skip
    after = server.metrics()
    result = json.loads((tmp_path / "r.json").read_text())

    def grown(name: str) -> float:
        name = next(each for each in after if each.startswith(name))
        return after[name] - before.get(name, 0)

    assert (result["completed"], result["failed"]) == (40, 0)
    assert result["model_id"] == "greenroom-understudy"
    assert set(result["tasks"]) == set(TASKS)
    assert result["answers_checked"] == 40
    assert result["answers_right"] >= 32, "the bundled model's own rate is above 0.9"
    assert result["slo_attainment"] == 1.0
    warm_up = result["setup"]["warmup_requests"]
    assert grown("greenroom_request_success_total") == 40 + warm_up
    assert grown("greenroom_generation_tokens_total") >= result["total_output_tokens"]
    assert "40 completed" in text
    server_side_ms = grown("greenroom_time_to_first_token_seconds_sum") * 1e3 / (40 + warm_up)
    assert result["mean_ttft_ms"] == pytest.approx(server_side_ms, rel=0.5, abs=30)


def test_a_closed_loop_with_longer_prompts(server: Server, tmp_path: Path) -> None:
    load(
        "run", "--url", server.url, "--request-rate", "inf", "--max-concurrency", "4", "--num-requests", "12",
        "--input-len", "fixed:120", "--output-len", "fixed:20", "--ignore-eos", "--task-mix", "summarise=1",
        "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    result = json.loads((tmp_path / "r.json").read_text())

    assert result["completed"] == 12
    assert result["total_output_tokens"] == 12 * 20
    assert 80 <= result["total_input_tokens"] / 12 <= 300
    assert result["max_concurrent_requests"] == 4
    assert result["tasks"].keys() == {"summarise"}


def test_over_grpc_it_is_the_same(server: Server, grpc_port: int, tmp_path: Path) -> None:
    """The same seed, so the same prompts and answers; one may round differently in another batch."""
    found = []
    for number, url in enumerate((server.url, f"grpc://127.0.0.1:{grpc_port}")):
        load(
            "run", "--url", url, "--request-rate", "10", "--num-requests", "20", "--seed", "2", "--slo", "e2e:60000",
            "--send-slo", "headers" if number == 0 else "fields", "--send-task-type",
            "--save-requests", str(tmp_path / f"{number}.jsonl"),
        )  # fmt: skip
        lines = (tmp_path / f"{number}.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])

    for name in ("prompt", "task", "prompt_tokens"):
        assert [one[name] for one in found[0]] == [one[name] for one in found[1]], name
    answers = [[(one["text"], one["output_tokens"], one["finish_reason"]) for one in own] for own in found]
    assert sum(one != other for one, other in zip(*answers, strict=True)) <= 1
    assert all(one["ok"] for one in found[0])
