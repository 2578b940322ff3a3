"""What a scheduler logs about a request, and what it asks of a worker for it, carries that request's id: no other's."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import msgspec
import pytest

from greenroom.core.generation import FinishReason
from greenroom.core.messages import JournalRecord, Outcome, decode
from greenroom.fabric.lifecycle.logs import JsonLines
from greenroom.fabric.topics import JOURNAL
from tests.contract.rpc.wires import Wire
from tests.unit.protocol.one_scheduler import HEADERS, OneAtATime, scheduling, task
from tests.waiting import until

CARRIED = "r-2"
ODD = "r 3 \u00e9"
"""No metadata can carry it."""


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the scheduler logs, as JSON."""
    stream, logger = io.StringIO(), logging.getLogger("greenroom.scheduler")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_run_started_by_another_runs_end_carries_its_own_request(wire: Wire, lines: io.StringIO) -> None:
    worker = OneAtATime(CARRIED)
    await wire.serve(worker)  # type: ignore[arg-type]  # any servicer
    async with scheduling(wire, lines) as scheduler:
        for name in ("r-1", CARRIED, ODD):
            await scheduler.feed(task(name))
        await scheduler.until_all_ended()
    assert {("r-1", "r-1"), (CARRIED, CARRIED), (ODD, "")} == set(worker.runs)
    assert scheduler.ids_of("its call to w broke") == [CARRIED]


async def test_an_outcome_that_is_not_acknowledged_is_of_its_request(wire: Wire, lines: io.StringIO) -> None:
    await wire.serve(OneAtATime())  # type: ignore[arg-type]
    async with scheduling(wire, lines) as scheduler:
        scheduler.log.unknown = CARRIED
        for name in ("r-1", CARRIED):
            await scheduler.feed(task(name))
        await scheduler.until_all_ended()
    assert scheduler.ids_of("is not acknowledged") == [CARRIED]


async def test_an_outcome_that_is_too_large_for_the_journal_fails_its_request_once(
    wire: Wire, lines: io.StringIO
) -> None:
    await wire.serve(OneAtATime())  # type: ignore[arg-type]
    async with scheduling(wire, lines) as scheduler:
        scheduler.log.largest = CARRIED
        for name in ("r-1", CARRIED):
            await scheduler.feed(task(name))
        await scheduler.until_all_ended()
        async with scheduler.log.reader(JOURNAL, 0) as reader:
            found: list[JournalRecord] = [
                decode(record.value or b"", JournalRecord) for record in await reader.poll(1.0)
            ]
    outcomes = {record.request_id: record for record in found if isinstance(record, Outcome)}
    assert (outcomes["r-1"].reason, outcomes["r-1"].token_ids) == (FinishReason.STOP, (7,))
    failed = outcomes[CARRIED]
    assert (failed.reason, failed.token_ids) == (FinishReason.FAILED, ())
    assert "larger than the journal takes" in failed.message
    assert scheduler.ids_of("the journal refuses a record") == [CARRIED]


async def test_a_dead_letter_is_of_its_request_and_what_comes_after_it_is_not(
    wire: Wire, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenroom.scheduler.dead_letters._AGAIN_S", 0.0)
    await wire.serve(OneAtATime())  # type: ignore[arg-type]
    broken = msgspec.msgpack.encode({"v": 9, "kind": "task", "request": {"request_id": CARRIED, "pool": 0}})
    async with scheduling(wire, lines) as scheduler:
        scheduler.log.refuses = True
        await scheduler.feed(broken, HEADERS)
        await scheduler.feed(b"\xc1 of no request")
        await scheduler.until_all_ended()
        assert [tuple(headers) for headers in await scheduler.letters_carried()] == [HEADERS, HEADERS, ()]
    assert scheduler.ids_of("was not written, trying again") == [CARRIED]
    assert scheduler.ids_of("goes to the dead letters") == [CARRIED, None]


async def test_every_call_names_its_scheduler_and_the_journal_that_its_epoch_is_of(
    wire: Wire, lines: io.StringIO
) -> None:
    worker = OneAtATime()
    await wire.serve(worker)  # type: ignore[arg-type]
    async with scheduling(wire, lines) as scheduler:
        await scheduler.feed(task("r-1"))
        await scheduler.until_all_ended()
        await until(lambda: "CancelRunRequest" in worker.callers, "the run is released")
        journal = await scheduler.log.identity(JOURNAL)
    calls = ("LeaseHello", "ListRunsRequest", "RunRequest", "CancelRunRequest")
    assert worker.callers == {call: {("s/0", journal)} for call in calls}
