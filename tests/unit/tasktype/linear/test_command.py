"""``greenroom task-weights learn``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from greenroom.cli.task_weights import task_weights
from greenroom.core.errors import InvalidConfig
from greenroom.tasktype import open_extractor

PROMPTS = [
    {"prompt": wish.format(number), "task_type": task_type, "data_set": f"set {number % 2}"}
    for number in range(6)
    for task_type, wish in (("summarise", "Summarise chapter {} of the book."), ("question", "Who is in chapter {}?"))
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "labelled.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in PROMPTS))
    return path


def test_a_file_is_learnt_that_the_extractor_takes(prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "mine.json"
    given = ["learn", str(prompts), "--output", str(output), "--origin-field", "data_set", "--licence", "mine"]
    result = CliRunner().invoke(task_weights, given, catch_exceptions=False)
    report = json.loads(result.stdout)
    assert set(report["left_out"]["by_origin"]) == {"set 0", "set 1"}
    assert report["left_out"]["task_accuracy_unseen"] == 1.0
    extractor = open_extractor("linear", output)
    assert extractor.names == ("question", "summarise")
    assert extractor.extract("Summarise this book.").task_type == "summarise"
    assert json.loads(output.read_bytes())["card"]["licence"] == "mine"


def test_a_folder_that_is_not_there_is_named_before_anything_is_learnt(prompts: Path, tmp_path: Path) -> None:
    given = ["learn", str(prompts), "--output", str(tmp_path / "absent" / "mine.json")]
    with pytest.raises(InvalidConfig, match="absent"):
        CliRunner().invoke(task_weights, given, catch_exceptions=False)
