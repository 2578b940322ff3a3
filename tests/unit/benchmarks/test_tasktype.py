"""The benchmark of task types: what is left out, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.tasktype.cli import main
from benchmarks.tasktype.origins import read_prompts
from tests.real_data import real_data

LINES = [
    ("summarise", "P3(T0)/self-instruct repo", "samsum_Summarize_", "Summarize: Ann: hi Ben: hello"),
    ("summarise", "P3(T0)/self-instruct repo", "xsum_DOC_tldr", "It rained.\n\nTL;DR:"),
    ("classify", "P3(T0)/self-instruct repo", "imdb_Reviewer_Enjoyment", "Great! Is this review positive?"),
    ("classify", "P3(T0)/self-instruct repo", "rotten_tomatoes_Reviewer_Enjoyment", "zzz"),
    ("converse", "FastChat/vicuna_bench", "generic", "Tell me a joke."),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "prompts").mkdir()
    rows = [dict(zip(("task_type", "source", "source_task", "prompt"), line, strict=True)) for line in LINES]
    (tmp_path / "prompts" / "task-types.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


def test_the_last_line_has_the_figures_by_left_out_origin(data: Path) -> None:
    result = CliRunner().invoke(main, ["--data", str(data), "--variant", "keywords"], catch_exceptions=False)
    row = json.loads(result.stdout.splitlines()[-1])["task_accuracy_unseen"]["keywords"]
    told = {"imdb": 1.0, "rotten_tomatoes": 0.0, "samsum": 1.0, "vicuna": 1.0, "xsum": 1.0}
    assert row["by_origin"] == told
    assert row["task_accuracy_unseen"] == pytest.approx(0.8)
    assert row["by_type"] == {"classify": 0.5, "converse": 1.0, "summarise": 1.0}
    assert row["unknown"] == pytest.approx(0.2)
    assert 0 < row["ms_p50"] <= row["ms_p99"]


def test_families_go_together(data: Path) -> None:
    given = ["--data", str(data), "--variant", "keywords", "--families"]
    result = CliRunner().invoke(main, given, catch_exceptions=False)
    row = json.loads(result.stdout.splitlines()[-1])["task_accuracy_unseen"]["keywords"]
    assert row["by_origin"] == {"chat": 1.0, "reviews": 0.5, "samsum": 1.0, "xsum": 1.0}


def test_an_unknown_source_is_named(data: Path) -> None:
    path = data / "prompts" / "task-types.jsonl"
    path.write_text(path.read_text().replace("samsum_Summarize_", "elsewhere_1"))
    result = CliRunner().invoke(main, ["--data", str(data)])
    assert result.exit_code == 1
    assert "elsewhere_1" in result.output


def test_every_real_prompt_is_of_a_known_data_set() -> None:
    path = real_data("prompts/task-types.jsonl")
    assert len({one.origin for one in read_prompts(path)}) == 35
    assert len({one.origin for one in read_prompts(path, families=True)}) == 27
