"""Which members are here. Each says so again and again; its absence is certain only after a silence that was heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest

from greenroom.core.messages import Member, MemberKind, QueueDepth, decode, encode
from greenroom.fabric.log import AppendUnknown, LogUnavailable, MemoryBroker, MemoryLog, Position, Record
from greenroom.fabric.log.memory.memory_log import MemoryReader
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.topics import MEMBERS, Topics, all_topics
from tests.waiting import until

LOOK_S = 0.01


@dataclass
class Clock:
    """Time that goes when it is told to; ``unix`` is a second one that went with it until now."""

    now: float = 50.0
    unix_s: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.unix_s

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.unix_s += seconds


@dataclass
class Stage:
    clock: Clock
    log: MemoryLog
    directories: list[Directory] = field(default_factory=list)

    async def directory(self) -> Directory:
        directory = Directory(self.log, look_s=LOOK_S, clock=self.clock, unix=self.clock.unix)
        await directory.start(5.0)
        self.directories.append(directory)
        return directory

    async def say(self, member: Member) -> None:
        await self.log.append(MEMBERS, encode(member), key=member.instance.encode())

    async def listen(self, seconds: float) -> None:
        """Let time pass in steps in which a directory can look."""
        for _ in range(int(seconds)):
            self.clock.pass_by(1.0)
            await until(lambda: all(one._listened_at == self.clock.now for one in self.directories))


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    clock = Clock()
    stage = Stage(clock, MemoryLog(MemoryBroker(clock=clock.unix)))
    await stage.log.ensure(all_topics(Topics()))
    yield stage
    for directory in stage.directories:
        await directory.stop()


def worker(name: str, pool: int = 0, ttl_ms: int = 9000, **more: object) -> Member:
    return msgspec.structs.replace(
        Member(member=MemberKind.WORKER, instance=name, address=f"{name}:1", ttl_ms=ttl_ms, pool=pool), **more
    )


async def test_it_is_ready_when_it_has_read_to_the_end_and_follows_from_then_on(stage: Stage) -> None:
    await stage.say(worker("b"))
    await stage.say(worker("a", pool=1))
    await stage.say(msgspec.structs.replace(worker("g"), member=MemberKind.GATEWAY))
    directory = await stage.directory()
    assert directory.ready
    assert [member.instance for member in directory.of(MemberKind.WORKER)] == ["a", "b"]
    assert [member.instance for member in directory.of(MemberKind.WORKER, pool=1)] == ["a"]
    assert directory.get("g") is not None
    assert directory.get("unknown") is None
    assert not directory.gone("unknown")
    told: list[list[str]] = []
    end = directory.subscribe(lambda: told.append([member.instance for member in directory.of(MemberKind.WORKER)]))
    await stage.say(worker("c"))
    assert await directory.wait_for(lambda there: there.get("c") is not None, 5.0)
    assert told == [["a", "b", "c"]]
    await stage.say(worker("c"))  # nothing new
    end()
    await stage.say(worker("d"))
    assert await directory.wait_for(lambda there: there.get("d") is not None, 5.0)
    assert told == [["a", "b", "c"]]
    assert not await directory.wait_for(lambda there: there.get("e") is not None, 0.05)


async def test_who_is_here_is_told_as_it_is_now_and_is_the_askers_own(stage: Stage) -> None:
    await stage.say(worker("a"))
    directory = await stage.directory()
    directory.of(MemberKind.WORKER).clear()
    assert [member.instance for member in directory.of(MemberKind.WORKER)] == ["a"]
    await stage.say(worker("a", draining=True))
    assert await directory.wait_for(lambda there: there.of(MemberKind.WORKER)[0].draining, 5.0)
    await stage.say(worker("b", pool=1))
    assert await directory.wait_for(lambda there: len(there.of(MemberKind.WORKER)) == 2, 5.0)
    assert [member.instance for member in directory.of(MemberKind.WORKER, pool=1)] == ["b"]
    await stage.log.append(MEMBERS, None, key=b"b")
    assert await directory.wait_for(lambda there: there.gone("b"), 5.0)
    assert directory.of(MemberKind.WORKER, pool=1) == []
    assert [member.instance for member in directory.of(MemberKind.WORKER)] == ["a"]


async def test_a_member_that_says_so_is_gone_at_once(stage: Stage) -> None:
    await stage.say(worker("a"))
    directory = await stage.directory()
    await stage.log.append(MEMBERS, None, key=b"a")
    assert await directory.wait_for(lambda there: there.gone("a"), 5.0)
    assert directory.get("a") is None
    assert (await stage.directory()).gone("a")


async def test_a_member_that_is_silent_for_longer_than_its_ttl_is_gone_until_it_speaks(stage: Stage) -> None:
    directory = await stage.directory()
    await stage.say(worker("a", ttl_ms=9000))
    await stage.say(worker("b", ttl_ms=60_000))
    assert await directory.wait_for(lambda there: there.get("b") is not None, 5.0)
    await stage.listen(8)
    assert directory.get("a") is not None
    await stage.listen(3)
    assert directory.gone("a")
    assert directory.get("a") is None
    assert directory.get("b") is not None
    await stage.say(worker("a"))
    assert await directory.wait_for(lambda there: there.get("a") is not None, 5.0)
    assert not directory.gone("a")


async def test_a_silent_member_is_gone_for_good_after_more_of_its_lifetimes(stage: Stage) -> None:
    directory = await stage.directory()
    await stage.say(worker("a", ttl_ms=3000))
    await stage.say(worker("left", ttl_ms=3000))
    await stage.log.append(MEMBERS, None, key=b"left")
    assert await directory.wait_for(lambda there: there.gone("left") and there.get("a") is not None, 5.0)
    assert directory.gone("left", lifetimes=4)
    await stage.listen(8)
    assert directory.gone("a")
    assert not directory.gone("a", lifetimes=4)
    await stage.listen(6)
    assert directory.gone("a", lifetimes=4)
    assert not directory.gone("never heard of", lifetimes=4)


async def test_time_in_which_nothing_could_be_heard_is_no_silence(stage: Stage) -> None:
    """This process was stopped, or the log away. Then every record is old, and no member is gone for that."""
    directory = await stage.directory()
    await stage.say(worker("a", ttl_ms=9000))
    assert await directory.wait_for(lambda there: there.get("a") is not None, 5.0)
    stage.clock.pass_by(100.0)
    await stage.listen(8)
    assert directory.get("a") is not None
    await stage.listen(3)
    assert directory.gone("a")


async def test_what_was_written_long_before_it_began_is_old_already(stage: Stage) -> None:
    await stage.say(worker("old", ttl_ms=9000))
    stage.clock.pass_by(30.0)
    await stage.say(worker("new", ttl_ms=9000))
    directory = await stage.directory()
    assert directory.gone("old")
    assert directory.get("new") is not None


async def test_where_all_are_silent_our_own_clock_is_trusted_within_a_minute(stage: Stage) -> None:
    await stage.say(worker("a", ttl_ms=9000))
    stage.clock.unix_s += 60.0  # ours may be ahead of the broker's by so much
    directory = await stage.directory()
    assert directory.get("a") is not None
    stage.clock.unix_s += 600.0
    assert (await stage.directory()).gone("a")


async def test_what_can_not_be_read_is_passed_over(stage: Stage) -> None:
    await stage.log.append(MEMBERS, b"\xc1 nonsense", key=b"x")
    await stage.say(worker("a"))
    assert (await stage.directory()).get("a") is not None


async def test_a_subscriber_that_fails_does_not_stop_the_others(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    directory = await stage.directory()
    told: list[bool] = []

    def broken() -> None:
        raise RuntimeError("no")

    directory.subscribe(broken)
    directory.subscribe(lambda: told.append(True))
    await stage.say(worker("a"))
    assert await directory.wait_for(lambda there: there.get("a") is not None, 5.0)
    assert told
    assert "subscriber" in caplog.text


async def test_it_begins_anew_where_reading_fails(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    await stage.say(worker("a"))
    directory = Directory(_Failing(stage.log), look_s=LOOK_S, clock=stage.clock, unix=stage.clock.unix)  # type: ignore[arg-type]
    stage.directories.append(directory)
    await directory.start(5.0)
    assert directory.get("a") is not None
    assert "beginning anew" in caplog.text


class _Failing:
    """The first two readers of this log fail."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._readers = 0

    def reader(self, topic: str, partition: int) -> MemoryReader:
        self._readers += 1
        return self._log.reader("nothing" if self._readers < 3 else topic, partition)


# -- announcing


@dataclass
class Wire:
    """A log that counts, and can lose acknowledgements."""

    log: MemoryLog
    lost: bool = False
    said: list[tuple[float, Member | None]] = field(default_factory=list)

    async def append(self, topic: str, value: bytes | None, *, key: bytes, timeout_s: float) -> Position:
        member = None if value is None else decode(value, Member)
        self.said.append((asyncio.get_running_loop().time(), member))
        if self.lost:
            raise AppendUnknown("no acknowledgement")
        return await self.log.append(topic, value, key=key, timeout_s=timeout_s)


async def records(log: MemoryLog) -> list[Record]:
    async with log.reader(MEMBERS, 0) as reader:
        return await reader.poll(0.0)


async def test_it_says_that_it_is_here_again_and_again_and_that_it_leaves(stage: Stage) -> None:
    wire = Wire(stage.log)
    announcer = Announcer(wire, lambda: worker("a", ttl_ms=300))  # type: ignore[arg-type]
    await announcer.start()
    assert len(await records(stage.log)) == 1
    await until(lambda: len(wire.said) >= 4)
    gaps = [later - sooner for (sooner, _), (later, _) in zip(wire.said, wire.said[1:], strict=False)]
    assert all(0.09 < gap < 0.3 for gap in gaps), gaps
    await announcer.stop()
    assert wire.said[-1][1] is None
    assert (await records(stage.log))[-1].value is None
    said = len(wire.said)
    await asyncio.sleep(0.2)  # nothing is said behind it
    assert len(wire.said) == said


async def test_changes_are_said_soon_as_they_are_then_and_not_too_often(stage: Stage) -> None:
    wire = Wire(stage.log)
    depth = 0
    announcer = Announcer(
        wire,  # type: ignore[arg-type]
        lambda: worker("a", ttl_ms=600_000, depth=QueueDepth(waiting=depth, limit=9)),
    )
    await announcer.start()
    loop = asyncio.get_running_loop()
    began = loop.time()
    announcer.changed()  # though it is not: nothing is said
    while loop.time() < began + 1.0:
        depth += 1
        announcer.changed()
        await asyncio.sleep(0.002)
    await until(lambda: _waiting(wire) == depth)
    assert 3 <= len(wire.said) <= 7
    said = len(wire.said)
    announcer.changed()
    await asyncio.sleep(0.3)
    assert len(wire.said) == said
    await announcer.stop()


def _waiting(wire: Wire) -> int:
    member = wire.said[-1][1]
    assert member is not None
    assert member.depth is not None
    return member.depth.waiting


async def test_where_the_log_is_away_it_tries_again(stage: Stage) -> None:
    wire = Wire(stage.log, lost=True)
    announcer = Announcer(wire, lambda: worker("a", ttl_ms=300))  # type: ignore[arg-type]
    with pytest.raises(LogUnavailable, match="we are here"):
        await announcer.start(0.3)
    starting = asyncio.create_task(announcer.start(5.0))
    await until(lambda: len(wire.said) > 3)
    wire.lost = False
    await starting
    wire.lost = True
    await announcer.stop()  # says what it could not do, and returns


async def test_what_can_not_be_made_up_at_the_start_is_raised(stage: Stage) -> None:
    def broken() -> Member:
        raise RuntimeError("no address")

    with pytest.raises(RuntimeError, match="no address"):
        await Announcer(stage.log, broken).start(5.0)
