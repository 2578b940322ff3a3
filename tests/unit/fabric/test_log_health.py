"""Whether the log answers, and how far the clocks are apart: what is made of acknowledgements."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.fabric.log import MemoryBroker, MemoryLog
from greenroom.fabric.log.health import HealthConfig, LogHealth, Skew, clock_skew_ms, expired_early
from greenroom.fabric.log_monitor import ClockSkewed, LogMonitor, MonitoredLog
from greenroom.fabric.members import Directory
from greenroom.fabric.topics import Topics, all_topics
from tests.pipeline.troubled_log import TroubledLog
from tests.waiting import until

HOURS_MS = 2 * 3_600_000.0


@pytest.mark.parametrize(
    ("sent", "stamp", "acknowledged", "skew"),
    [(100, 100, 110, 0), (100, 107, 110, 0), (100, 40, 110, 60), (100, 170, 110, -60), (100, 170, 5000, 0)],
)
def test_clocks_differ_by_what_no_way_of_the_record_explains(
    sent: float, stamp: float, acknowledged: float, skew: float
) -> None:
    assert clock_skew_ms(sent, stamp, acknowledged) == skew


def test_it_is_silent_from_its_bound_on_and_no_longer_once_it_has_answered() -> None:
    health = LogHealth(HealthConfig(silent_ms=15_000), now=1_000.0)
    assert health.trouble(15_999.0) is None
    assert health.trouble(31_000.0) == "the log has acknowledged nothing for 30 s"
    health.acknowledged(31_000.0, 31_001.0, 31_002.0)
    assert health.trouble(31_003.0) is None


@pytest.mark.parametrize(
    ("ahead_ms", "skew", "told"),
    [
        (0.0, Skew.FINE, "0.0 s"),
        (1_000.0, Skew.FINE, "1.0 s ahead of"),
        (-10_000.0, Skew.WARN, "10.0 s behind"),
        (10_000.0, Skew.WARN, "10.0 s ahead of"),
        (300_000.0, Skew.TOO_MUCH, "5.0 minutes ahead of"),
        (-HOURS_MS, Skew.TOO_MUCH, "2.0 hours behind"),
    ],
)
def test_what_is_made_of_a_difference(ahead_ms: float, skew: Skew, told: str) -> None:
    health = LogHealth(now=0.0)
    health.acknowledged(0.0, -ahead_ms, 0.0)
    assert health.skew is skew
    assert told in health.told_skew()


def test_ended_as_expired_before_its_time() -> None:
    assert expired_early(0.0, 600_000.0, 100.0)
    assert not expired_early(0.0, 600_000.0, 599_900.0)


@pytest.mark.parametrize("field", ["silent_ms", "warn_skew_ms", "most_skew_ms"])
def test_a_bad_value_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        HealthConfig(**{field: 0})
    assert refused.value.field == field


def watched(log: MemoryLog, *, ahead_ms: float = 0.0, **bounds: float) -> MonitoredLog:
    return MonitoredLog(log, HealthConfig(**bounds), clock=lambda: time.time() * 1000 + ahead_ms)


@pytest.mark.parametrize(("ahead_ms", "said"), [(-HOURS_MS, "2.0 hours behind"), (HOURS_MS, "2.0 hours ahead of")])
async def test_a_process_does_not_start_where_the_clocks_are_too_far_apart(ahead_ms: float, said: str) -> None:
    async with watched(MemoryLog(), ahead_ms=ahead_ms) as log:
        await log.ensure(all_topics(Topics()))
        with pytest.raises(ClockSkewed, match=said):
            await LogMonitor(log, "g").start()


async def test_a_smaller_difference_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with watched(MemoryLog(), ahead_ms=10_000.0) as log:
        await log.ensure(all_topics(Topics()))
        watch = LogMonitor(log, "g", every_s=0.001)
        with caplog.at_level(logging.WARNING, "greenroom.fabric.log_monitor"):
            await watch.start()
            await until(lambda: caplog.records, "it was told")
        await watch.stop()
        assert "ahead of the log's: requests may expire" in caplog.text
        assert "since this process began, start it anew" in caplog.text, "its own clock is set once"
        assert len(caplog.records) == 1, "once in ten minutes"


async def test_not_ready_while_nothing_is_acknowledged_and_ready_again_by_itself() -> None:
    troubled = TroubledLog(MemoryBroker())
    async with watched(troubled, silent_ms=50.0) as log:
        await log.ensure(all_topics(Topics()))
        watch = LogMonitor(log, "g", every_s=0.001)
        await watch.start()
        assert watch.unready is None
        troubled.trouble = lambda topic, value: "lost"
        await until(lambda: watch.unready, "the silence was noticed")
        troubled.trouble = lambda topic, value: None
        await until(lambda: watch.unready is None, "it is ready again")
        await watch.stop()


async def test_what_a_monitor_appends_wakes_no_subscriber_of_the_directory() -> None:
    async with watched(MemoryLog()) as log:
        await log.ensure(all_topics(Topics()))
        watch = LogMonitor(log, "g", every_s=0.001)
        await watch.start()
        async with Directory(log, look_s=0.001) as directory:
            told: list[Any] = []
            directory.subscribe(lambda: told.append(None))
            asked = troubled_end(log)
            before = asked()
            await until(lambda: asked() > before + 20, "it has appended more")
            assert len(told) <= 1
        await watch.stop()


def troubled_end(log: MonitoredLog) -> Any:
    """How many records ``members`` has had."""
    inner: Any = log._log
    return lambda: inner.broker.topic("members").partitions[0].end
