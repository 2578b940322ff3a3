"""Load generators that we did not write, as they are installed, against `greenroom serve` with the bundled model.

They live in .venv-clients (`make test-clients`), since what they need is large and is not ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.demo import bundled_model_path
from tests.integration.server import Server

CLIENTS = Path(__file__).parents[2] / ".venv-clients" / "bin"
DEADLINE_S = 300.0
REQUESTS = 6
OUTPUT_TOKENS = 12
MODEL = "greenroom-understudy"


def missing(package: str) -> pytest.MarkDecorator:
    found = list(CLIENTS.parent.glob(f"lib/python*/site-packages/{package}"))
    return pytest.mark.skipif(not found, reason=f"{package} is not set up: make test-clients")


pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (CLIENTS.parent / ".installed").exists(), reason="guidellm and aiperf are not set up: make test-clients"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server("--expert-memory", "50%", cache=tmp_path_factory.mktemp("cache")) as running:
        yield running


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment in which they find nothing of this machine's user, and keep their own files."""
    # HF_HUB_OFFLINE is left out: with it aiperf takes a folder's path for a repository's id.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GREENROOM_"))}
    return {**kept, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub"), "HF_DATASETS_OFFLINE": "1"}


def run(home: dict[str, str], folder: Path, tool: str, *arguments: str) -> None:
    """It has processes of its own, which end with it whatever happens."""
    with subprocess.Popen(
        [str(CLIENTS / tool), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=home, cwd=folder, start_new_session=True,
    ) as running:  # fmt: skip
        try:
            printed, _ = running.communicate(timeout=DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, printed[-8000:]


def answered(server: Server) -> float:
    """Sequences that came to their own end."""
    return sum(
        value for name, value in server.metrics().items()
        if name.startswith("greenroom_request_success_total") and ('"length"' in name or '"stop"' in name)
    )  # fmt: skip


def errors(server: Server) -> dict[str, float]:
    """What was refused, by its code. A client may leave when it has what it wants."""
    found = {name: value for name, value in server.metrics().items() if name.startswith("greenroom_http_errors_total")}
    return {name: value for name, value in found.items() if "client_gone" not in name}


def test_guidellm(server: Server, home: dict[str, str], tmp_path: Path) -> None:
    """It asks every request for usage in every part, and takes its counts from there."""
    before = answered(server)
    run(
        home, tmp_path, "guidellm", "run",
        "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={bundled_model_path()}",
        "--data", f"kind=synthetic_text,prompt_tokens=24,output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={tmp_path / 'found.json'}",
        "--disable-progress",
    )  # fmt: skip
    [benchmark] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    requests: dict[str, list[dict[str, Any]]] = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (REQUESTS, [])
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS
        assert request["input_metrics"]["text_tokens"] >= 24
    assert answered(server) - before >= REQUESTS
    assert errors(server) == {}


def test_aiperf(server: Server, home: dict[str, str], tmp_path: Path) -> None:
    before = answered(server)
    run(
        home, tmp_path, "aiperf", "profile", "--model", MODEL, "--url", server.url,
        "--endpoint-type", "chat", "--streaming", "--use-server-token-count",
        "--tokenizer", str(bundled_model_path()), "--concurrency", "2", "--request-count", str(REQUESTS),
        "--synthetic-input-tokens-mean", "24", "--output-tokens-mean", str(OUTPUT_TOKENS),
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(tmp_path / "found"), "--ui", "none",
    )  # fmt: skip
    found = json.loads((tmp_path / "found" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found.get("error_request_count", {}).get("avg", 0) == 0
    assert found["output_sequence_length"]["avg"] == OUTPUT_TOKENS
    assert found["time_to_first_token"]["avg"] > 0
    assert answered(server) - before >= REQUESTS
    assert errors(server) == {}


@missing("genai_bench")
def test_genai_bench(server: Server, home: dict[str, str], tmp_path: Path) -> None:
    """It counts tokens by the usage that comes behind the last part."""
    before = answered(server)
    run(
        {**home, "ENABLE_UI": "false"}, tmp_path, "genai-bench", "benchmark",
        "--api-backend", "vllm", "--api-base", server.url, "--api-key", "none", "--api-model-name", MODEL,
        "--model-tokenizer", str(bundled_model_path()), "--task", "text-to-text",
        "--traffic-scenario", f"D(24,{OUTPUT_TOKENS})", "--num-concurrency", "2",
        "--max-requests-per-run", str(REQUESTS), "--max-time-per-run", "5",
        "--experiment-base-dir", str(tmp_path), "--experiment-folder-name", "found",
    )  # fmt: skip
    [file] = (tmp_path / "found").glob("D*.json")
    found = json.loads(file.read_text())
    assert found["aggregated_metrics"]["num_error_requests"] == 0
    assert found["aggregated_metrics"]["num_completed_requests"] >= REQUESTS
    for request in found["individual_request_metrics"]:
        assert request["num_output_tokens"] == OUTPUT_TOKENS
        assert request["num_input_tokens"] >= 24
        assert request["ttft"] > 0
    assert answered(server) - before >= REQUESTS
    assert errors(server) == {}


@missing("vllm")
@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve(server: Server, home: dict[str, str], tmp_path: Path, backend: str, path: str) -> None:
    """Its client alone. It makes prompts of one length by asking the server for their tokens."""
    before = answered(server)
    run(
        home, tmp_path, "vllm", "bench", "serve", "--backend", backend, "--base-url", server.url, "--endpoint", path,
        "--model", MODEL, "--tokenizer", str(bundled_model_path()), "--dataset-name", "random",
        "--random-input-len", "24", "--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS),
        "--max-concurrency", "2", "--ignore-eos", "--save-result", "--save-detailed",
        "--result-dir", str(tmp_path), "--result-filename", "found.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"], found["errors"]) == (REQUESTS, 0, [""] * REQUESTS)
    assert found["output_lens"] == [OUTPUT_TOKENS] * REQUESTS
    assert all(found["generated_texts"])
    assert found["mean_ttft_ms"] > 0
    assert answered(server) - before >= REQUESTS
    assert errors(server) == {}
