"""The topics of the pipeline, by name, and how they are created. docs/architecture/topics.md says what is in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import KIB, MIB
from greenroom.fabric.log.base import Topic

REQUESTS = "requests"
TASKS = "tasks"
JOURNAL = "journal"
TRACES = "traces"
DEAD_LETTERS = "dead-letters"
MEMBERS = "members"

DEADLINES_RETAINED = 10
_WRAPPING_BYTES = 64 * KIB
"""By how much a record grows, at most, when another record carries it."""
_WEEK_S = 7 * 24 * 3600.0
_LARGEST_BYTES = 48 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """How the topics are created. Raises InvalidConfig, naming the field.

    ``pools``: partitions of ``tasks`` and ``journal``. ``request_partitions``, ``trace_partitions``: how many
    processes can share the work on them. ``longest_deadline_s``: the longest that a request may have; records are
    retained for at least ten times as long. ``request_bytes``, ``journal_bytes``, ``trace_bytes``: the largest record
    of each.
    """

    pools: int = 1
    request_partitions: int = 8
    trace_partitions: int = 4
    longest_deadline_s: float = 3600.0
    retention_s: float = 24 * 3600.0
    request_bytes: int = 4 * MIB
    journal_bytes: int = 16 * MIB
    trace_bytes: int = 4 * MIB

    def __post_init__(self) -> None:
        for name in ("pools", "request_partitions", "trace_partitions"):
            if not 1 <= getattr(self, name) <= 10_000:
                raise InvalidConfig(name, getattr(self, name), "it is a number from 1 to 10000")
        for name in ("request_bytes", "journal_bytes", "trace_bytes"):
            if not 64 * KIB <= getattr(self, name) <= _LARGEST_BYTES:
                allowed = f"it is a number of bytes from {64 * KIB} to {_LARGEST_BYTES}"
                raise InvalidConfig(name, getattr(self, name), allowed)
        if not 0 < self.longest_deadline_s < math.inf:
            raise InvalidConfig("longest_deadline_s", self.longest_deadline_s, "it is a number of seconds above 0")
        least = DEADLINES_RETAINED * self.longest_deadline_s
        if not least <= self.retention_s < math.inf:
            allowed = f"it is at least {DEADLINES_RETAINED} times longest_deadline_s, here {least:g}"
            raise InvalidConfig("retention_s", self.retention_s, allowed)


def all_topics(config: Topics) -> list[Topic]:
    """Every topic, for ``Log.ensure``."""
    retained = round(config.retention_s * 1000)
    largest = max(config.request_bytes, config.journal_bytes, config.trace_bytes)
    return [
        Topic(REQUESTS, config.request_partitions, retained, max_message_bytes=config.request_bytes),
        Topic(TASKS, config.pools, retained, max_message_bytes=config.request_bytes + _WRAPPING_BYTES),
        Topic(JOURNAL, config.pools, retained, max_message_bytes=config.journal_bytes),
        Topic(TRACES, config.trace_partitions, retained, max_message_bytes=config.trace_bytes),
        Topic(
            DEAD_LETTERS,
            retention_ms=round(max(config.retention_s, _WEEK_S) * 1000),
            max_message_bytes=largest + 2 * _WRAPPING_BYTES,
        ),
        Topic(MEMBERS, compacted=True),
    ]
