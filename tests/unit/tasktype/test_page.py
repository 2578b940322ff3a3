"""docs/architecture/tasktype.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from greenroom.tasktype import TaskTypeMetrics
from greenroom.tasktype.keywords import KeywordExtractor, load_profile, parse_profile
from greenroom.tasktype.keywords.profile import LookAt, Profile, TypeKeywords

PAGE = (Path(__file__).parents[3] / "docs" / "architecture" / "tasktype.md").read_text()


def test_every_metric_is_on_the_page() -> None:
    registry = CollectorRegistry()
    TaskTypeMetrics(registry, ["a"], "linear")
    names = {family.name.removeprefix("greenroom_tasktype_") for family in registry.collect()}
    assert len(names) == 7
    assert [name for name in names if not re.search(rf"`{name}(_total)?(\{{|`)", PAGE)] == []


def test_the_example_is_a_file_that_works() -> None:
    example = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    extractor = KeywordExtractor(parse_profile(example[1].encode(), "the page's example"))
    assert extractor.extract("Help me to summarise a summary").task_type == "summarise"


def test_every_field_of_the_file_is_on_the_page() -> None:
    for kind in (Profile, LookAt, TypeKeywords):
        for field in kind.__struct_fields__:
            assert re.search(rf"[`.]{field}[`.]", PAGE), field
    assert f"default {LookAt().head_chars} and {LookAt().tail_chars}" in PAGE
    shipped = load_profile().look_at
    assert f"({shipped.head_chars} and {shipped.tail_chars} characters by default)" in PAGE
