"""The topics' configuration, and their page, which holds every field of every payload."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.fabric.topics import DEADLINES_RETAINED, Topics, all_topics
from tests.contract.payloads.schema import present

PAGE = Path(__file__).resolve().parents[3] / "docs" / "architecture" / "topics.md"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"pools": 0}, "pools"),
        ({"request_partitions": 0}, "request_partitions"),
        ({"trace_partitions": 100_000}, "trace_partitions"),
        ({"longest_deadline_s": 0}, "longest_deadline_s"),
        ({"longest_deadline_s": float("nan")}, "longest_deadline_s"),
        ({"longest_deadline_s": 10_000}, "retention_s"),
        ({"retention_s": float("inf")}, "retention_s"),
        ({"journal_bytes": 1000}, "journal_bytes"),
        ({"request_bytes": 64 * MIB}, "request_bytes"),
    ],
)
def test_what_is_not_allowed_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        Topics(**change)
    assert raised.value.field == field


def test_every_topic_keeps_what_a_service_that_comes_back_needs() -> None:
    config = Topics(pools=3, longest_deadline_s=3600, retention_s=36_000)
    topics = {topic.name: topic for topic in all_topics(config)}
    assert topics["tasks"].partitions == topics["journal"].partitions == 3
    for topic in topics.values():
        assert topic.compacted or (topic.retention_ms or 0) >= DEADLINES_RETAINED * 3600 * 1000
    assert topics["members"].compacted
    assert topics["tasks"].max_message_bytes > topics["requests"].max_message_bytes
    assert topics["dead-letters"].max_message_bytes > max(
        topic.max_message_bytes for topic in topics.values() if topic.name != "dead-letters"
    )


def _sections(page: str) -> dict[str, str]:
    parts = re.split(r"^#+ (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", sorted(present()))
def test_the_page_has_every_field_of_every_payload(name: str) -> None:
    described = present()[name]
    section = _sections(PAGE.read_text())[described["tag"] or name]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| ([^|]+) \| \d+ \| \S.* \|$", section, flags=re.MULTILINE)
    assert [(field, kind) for field, kind, _ in rows] == [
        (field, info["type"].replace(" | ", " or ")) for field, info in described["fields"].items()
    ]
    assert {field for field, _, default in rows if default == "must be there"} == {
        field for field, info in described["fields"].items() if info["required"]
    }


def test_the_page_has_every_topic_as_it_is_created() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (\d+|one a pool) \| .* \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    created = {topic.name: topic for topic in all_topics(Topics(pools=7))}
    assert {name: 7 if partitions == "one a pool" else int(partitions) for name, partitions, _ in rows} == {
        name: topic.partitions for name, topic in created.items()
    }
    for name, _, largest in rows:
        assert created[name].max_message_bytes == sum(
            int(number) * {"MiB": MIB, "KiB": 1024}[unit] for number, unit in re.findall(r"(\d+) (MiB|KiB)", largest)
        )
