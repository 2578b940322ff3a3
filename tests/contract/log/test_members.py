"""Announcer and Directory on every log."""

from __future__ import annotations

from greenroom.core.messages import Member, MemberKind
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.topics import Topics, all_topics
from tests.contract.log.kinds import WAIT_S, Kind


async def test_joining_and_leaving_members_are_seen(kind: Kind) -> None:
    def worker(name: str) -> Member:
        return Member(member=MemberKind.WORKER, instance=name, address=f"{name}:1", ttl_ms=9000)

    async with kind.connect() as log, kind.connect() as other:
        await log.ensure(all_topics(Topics()))
        early = Announcer(log, lambda: worker("early"))
        await early.start()
        async with Directory(other, look_s=0.1) as directory:
            assert directory.get("early") == worker("early")
            late = Announcer(log, lambda: worker("late"))
            await late.start()
            assert await directory.wait_for(lambda there: len(there.of(MemberKind.WORKER)) == 2, WAIT_S)
            await early.stop()
            assert await directory.wait_for(lambda there: there.gone("early"), WAIT_S)
            await late.stop()
        async with Directory(other, look_s=0.1) as directory:
            assert directory.of(MemberKind.WORKER) == []
