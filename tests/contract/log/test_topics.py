"""Topics are created where they are absent, and refused where they contradict."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.fabric.log import LogFailed, Topic
from greenroom.fabric.topics import Topics, all_topics
from tests.contract.log.kinds import Kind, topic_on


async def test_all_topics_can_be_created_and_asked_for_again(kind: Kind) -> None:
    topics = all_topics(Topics(pools=2))
    async with kind.connect() as log, kind.connect() as other:
        await asyncio.gather(log.ensure(topics), other.ensure(topics))  # as services do that start together
        await log.ensure(topics)
        assert {topic.name: await other.partitions(topic.name) for topic in topics} == {
            topic.name: topic.partitions for topic in topics
        }


@pytest.mark.parametrize(
    ("there", "asked", "problem"),
    [
        (Topic("things", 2), Topic("things", 3), "partitions"),
        (Topic("things", compacted=True), Topic("things"), "compact"),
        (Topic("things"), Topic("things", compacted=True), "compact"),
        (Topic("things", max_message_bytes=70_000), Topic("things", max_message_bytes=80_000), "80000"),
    ],
)
async def test_a_topic_that_contradicts_is_refused(kind: Kind, there: Topic, asked: Topic, problem: str) -> None:
    async with kind.connect() as log:
        await log.ensure([there])
        with pytest.raises(LogFailed, match=f"things.*{problem}"):
            await log.ensure([asked])


async def test_more_than_is_asked_for_is_fine(kind: Kind) -> None:
    async with kind.connect() as log:
        await log.ensure([Topic("things", 4, max_message_bytes=2_000_000)])
        await log.ensure([Topic("things", 2, max_message_bytes=1_000_000)])
        assert await log.partitions("things") == 4


async def test_a_topic_has_an_identity_of_its_own_that_every_connection_sees(kind: Kind) -> None:
    async with topic_on(kind) as log, kind.connect() as other:
        await log.ensure([Topic("others")])
        identity = await log.identity("things")
        assert identity
        assert await other.identity("things") == identity
        assert await log.identity("others") != identity
        with pytest.raises(LogFailed, match="no topic"):
            await log.identity("nothing")


async def test_a_topic_that_is_made_anew_has_another_identity(kind: Kind) -> None:
    async with topic_on(kind) as log:
        before = await log.identity("things")
    await kind.delete_topics()
    async with topic_on(kind) as log:
        assert await log.identity("things") not in (before, "")
