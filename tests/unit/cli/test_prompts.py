from __future__ import annotations

import json
from pathlib import Path

import pytest
from click import UsageError

from greenroom.cli.prompts import read_prompts


def test_a_line_ends_with_a_line_feed_and_with_nothing_else(tmp_path: Path) -> None:
    """JSON strings may hold U+0085, U+2028 and their like as they are."""
    file = tmp_path / "p.jsonl"
    texts = ["one\u0085line", "one\u2028line", "one\x0bline", "two\r\nof them"]
    lines = [json.dumps({"prompt": text, "task_type": "t"}, ensure_ascii=False) for text in texts]
    file.write_text("\r\n".join([*lines, "", "a text"]) + "\n", encoding="utf-8", newline="")
    found = read_prompts(file)
    assert [prompt.content for prompt in found] == [*texts, "a text"]
    assert found[0].task == "t"


def test_a_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u0085b"}\n\n{"no": 1}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="line 3"):
        read_prompts(file)
