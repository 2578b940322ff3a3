from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS
from greenroom.profiling.config import STAGES, ProfileConfig, stages_of
from greenroom.profiling.folder import check_folder, written_whole
from greenroom.profiling.measures.costs import load_counts, prompt_row_counts, row_counts
from greenroom.profiling.prompts import has_bundled_tasks, of_bundled_tasks, of_file


def test_the_first_of_each_type_are_run_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = [f'{{"prompt": "p{place}", "task_type": "{task}", "other": 1}}' for place, task in enumerate("abababba")]
    file.write_text("\n".join([lines[0], "", *lines[1:]]))
    prompts = of_file(file, 2)
    assert [(one.prompt, one.task_type) for one in prompts.run] == [("p0", "a"), ("p1", "b"), ("p2", "a"), ("p3", "b")]
    assert len(prompts.labelled) == 8
    assert prompts.run[0].answer is None


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("no json", "line 2"),
        ('{"prompt": "x"}', "task_type"),
        ('{"prompt": "", "task_type": "a"}', "line 2"),
        ('{"prompt": "x", "task_type": "unknown"}', "unknown"),
        ('{"prompt": "x", "task_type": "a", "answer": 3}', "answer"),
        (b"\xff\xfe", "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, named: str) -> None:
    file = tmp_path / "p.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(b'{"prompt": "x", "task_type": "a"}\n' + bad + b"\n")
    with pytest.raises(InvalidConfig, match=named):
        of_file(file, 2)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("\n\n")
    with pytest.raises(InvalidConfig, match="it has none"):
        of_file(file, 2)


def test_the_bundled_tasks_are_mixed_have_answers_and_follow_from_the_seed() -> None:
    prompts = of_bundled_tasks(3, seed=5, labelled_per_task=10)
    assert Counter(one.task_type for one in prompts.run) == dict.fromkeys(TASKS, 3)
    assert Counter(one.task_type for one in prompts.labelled) == dict.fromkeys(TASKS, 10)
    assert all(one.answer for one in prompts.run)
    assert len({one.task_type for one in prompts.run[:5]}) > 1
    assert prompts == of_bundled_tasks(3, seed=5, labelled_per_task=10)
    assert prompts.run != of_bundled_tasks(3, seed=6, labelled_per_task=10).run


def test_only_the_bundled_model_has_tasks_of_its_own(tmp_path: Path) -> None:
    assert has_bundled_tasks(bundled_model_path())
    assert not has_bundled_tasks(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not has_bundled_tasks(tmp_path)


def test_stages_come_in_their_order() -> None:
    assert stages_of("all") == STAGES
    assert stages_of("costs, sensitivity") == ("sensitivity", "costs")
    with pytest.raises(UnknownName, match="observations"):
        stages_of("speed")


@pytest.mark.parametrize(
    ("field", "value"),
    [("seeds", 2), ("prompts_per_task", 0), ("threshold", 0.0), ("threshold", 1.1), ("share", 0.0), ("max_tokens", 0)],
)
def test_a_bad_setting_is_named(field: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=field):
        ProfileConfig(**{field: value})  # type: ignore[arg-type]


def test_sizes_to_measure() -> None:
    assert row_counts(32) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert row_counts(5) == [1, 2, 3, 4]
    assert prompt_row_counts(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert prompt_row_counts(512)[-3:] == [256, 384, 512]
    assert prompt_row_counts(8192)[-1] == 2048
    assert load_counts(96) == [1, 2, 4, 8, 16, 32]
    assert load_counts(2) == [1]
    assert load_counts(6144)[-1] == 64


def test_a_folder_appears_whole_and_keeps_what_it_had(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    with written_whole(folder) as new:
        (new / "profile.json").write_text("1")
        assert not folder.exists()
    with written_whole(folder) as new:
        assert (new / "profile.json").read_text() == "1"
        (new / "profile.json").write_text("2")
        (new / "more").write_text("x")
        assert (folder / "profile.json").read_text() == "1"
    assert {path.name for path in folder.iterdir()} == {"profile.json", "more"}
    assert (folder / "profile.json").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_nothing_changes_where_it_is_cut_short(tmp_path: Path) -> None:
    folder = tmp_path / "p"

    def interrupted() -> None:
        with written_whole(folder) as new:
            (new / "profile.json").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with written_whole(folder) as new:
        (new / "profile.json").write_text("whole")
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert (folder / "profile.json").read_text() == "whole"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidConfig, match="earlier profile"):
        check_folder(tmp_path)
    with pytest.raises(InvalidConfig, match="not a file"):
        check_folder(tmp_path / "mine")
    with pytest.raises(InvalidConfig, match="within one that exists"):
        check_folder(tmp_path / "none" / "p")
    check_folder(tmp_path / "new")
