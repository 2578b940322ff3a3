"""What a group's member keeps of its partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.fabric.group_positions import GroupPositions
from greenroom.fabric.log import LogUnavailable, Record


class Consumer:
    def __init__(self) -> None:
        self.commits: list[dict[int, int]] = []
        self.takes = True
        self.meanwhile: Callable[[], object] = lambda: None

    async def commit(self, positions: Any) -> bool:
        self.commits.append(dict(positions))
        self.meanwhile()
        return self.takes


class Ends:
    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        if partition == 1:
            raise LogUnavailable("away")
        return 10


def held() -> GroupPositions:
    made = GroupPositions("requests")
    made.take({0: 4, 1: 0})
    return made


def finish(made: GroupPositions, partition: int, offset: int) -> None:
    made.trackers[partition].start(offset)
    made.trackers[partition].finish(offset)


async def test_only_what_has_moved_is_committed_and_only_once() -> None:
    made, consumer = held(), Consumer()
    await made.commit(consumer)  # type: ignore[arg-type]
    finish(made, 0, 4)
    await made.commit(None)
    await made.commit(consumer)  # type: ignore[arg-type]
    await made.commit(consumer)  # type: ignore[arg-type]
    assert consumer.commits == [{0: 5}]


async def test_what_was_not_committed_is_tried_again() -> None:
    made, consumer = held(), Consumer()
    finish(made, 0, 4)
    consumer.takes = False
    await made.commit(consumer)  # type: ignore[arg-type]
    consumer.takes = True
    await made.commit(consumer)  # type: ignore[arg-type]
    assert consumer.commits == [{0: 5}, {0: 5}]


async def test_a_partition_that_is_given_up_during_a_commit_is_forgotten() -> None:
    made, consumer = held(), Consumer()
    finish(made, 0, 4)
    consumer.meanwhile = lambda: made.give([0])
    await made.commit(consumer)  # type: ignore[arg-type]
    assert made.give([0, 1, 7]) == [1]
    made.take({0: 5})
    await made.commit(consumer)  # type: ignore[arg-type]
    assert len(consumer.commits) == 1


async def test_lag_is_told_of_those_whose_end_is_known() -> None:
    made = held()
    assert [told async for told in made.lags(Ends())] == [(0, 6)]  # type: ignore[arg-type]


def test_what_is_read_is_begun_where_its_partition_is_held() -> None:
    made = held()
    records = [Record("requests", partition, offset, 0, None, b"") for partition, offset in ((0, 4), (7, 0), (0, 5))]
    assert [(record.offset, tracker is made.trackers[0]) for record, tracker in made.begin(records)] == [
        (4, True),
        (5, True),
    ]
    assert (made.trackers[0].position, made.trackers[0].open) == (4, 2)
