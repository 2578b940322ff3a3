"""Clients that we did not write, as they are installed, against `greenroom serve` with the bundled model.

They live in .venv-clients (`make test-clients`), since what they need is large and is not ours.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.demo import bundled_model_path
from tests.integration.server import Server
from tests.integration.test_load_clients import CLIENTS, MODEL, errors, home, missing, run

__all__ = ["home"]
CALLS = Path(__file__).parents[1] / "clients"
DEADLINE_S = 300.0
QUESTIONS = [
    {"question": "The opposite of cold is", "choices": [" hot", " cold and wet", " seven"], "answer": 0},
    {"question": "2 + 2 =", "choices": [" 5", " 4"], "answer": 1},
    {"question": "Count: 1 2 3 4", "choices": [" 5 6", " 9", " banana"], "answer": 0},
]
CHOICE_TASK = """
task: likelihoods
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
TEXT_TASK = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server("--expert-memory", "50%", "--dtype", "float32", cache=tmp_path_factory.mktemp("cache")) as running:
        yield running


def told(server: Server, home: dict[str, str], script: str) -> dict[str, Any]:
    """What a script of tests/clients prints."""
    done = subprocess.run(
        [str(CLIENTS / "python"), str(CALLS / script), server.url, MODEL],
        capture_output=True, text=True, env=home, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@missing("litellm")
def test_litellm(server: Server, home: dict[str, str]) -> None:
    found = told(server, home, "litellm_calls.py")
    assert found["whole"] == found["stream"] == found["async"] != ""
    assert 2 <= found["usage"] <= 8
    assert found["text"]
    assert found["refused"] == "NotFoundError"


@missing("langchain_openai")
def test_langchain(server: Server, home: dict[str, str]) -> None:
    before = errors(server)
    found = told(server, home, "langchain_calls.py")
    assert found["whole"] == found["stream"] == found["async"] != ""
    assert found["batch"] == [found["whole"]] * 2
    assert found["usage"] == found["streamed_usage"] == found["logprobs"]
    assert found["text"]
    assert errors(server) == before


@missing("lm_eval")
def test_lm_eval(server: Server, home: dict[str, str], tmp_path: Path) -> None:
    """Texts and likelihoods by its command. The likelihoods are those of transformers' own forward."""
    before = errors(server)
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "choice.yaml").write_text(CHOICE_TASK.format(file=file))
    (tasks / "text.yaml").write_text(TEXT_TASK.format(file=file))
    given = {
        "model": MODEL, "base_url": f"{server.url}/v1/completions", "tokenizer": str(bundled_model_path()),
        "tokenizer_backend": "huggingface", "max_length": 256, "num_concurrent": 2, "max_retries": 1,
    }  # fmt: skip
    run(
        home, tmp_path, "lm_eval", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in given.items()),
        "--tasks", "likelihoods,texts", "--include_path", str(tasks),
        "--output_path", str(tmp_path / "found"), "--log_samples",
    )  # fmt: skip
    [choices] = (tmp_path / "found").rglob("samples_likelihoods_*.jsonl")
    [texts] = (tmp_path / "found").rglob("samples_texts_*.jsonl")
    samples = sorted(map(json.loads, choices.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    for sample, question in zip(samples, QUESTIONS, strict=True):
        wanted = [_likelihood(str(question["question"]), choice) for choice in question["choices"]]  # type: ignore[attr-defined]
        found = [float(likelihood) for likelihood, _ in sample["filtered_resps"]]
        assert found == pytest.approx(wanted, abs=0.01)
    answers = [json.loads(line)["filtered_resps"][0] for line in texts.read_text().splitlines()]
    assert len(answers) == len(QUESTIONS)
    assert any(answers)
    assert errors(server) == before


def _likelihood(context: str, continuation: str) -> float:
    """By one forward of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32).eval()
    before = tokenizer(context).input_ids
    ids = tokenizer(context + continuation).input_ids
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return sum(float(logprobs[place - 1, ids[place]]) for place in range(len(before), len(ids)))
