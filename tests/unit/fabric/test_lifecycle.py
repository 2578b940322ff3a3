"""A process's life, with parts that do as they are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.fabric.lifecycle import Ended, Entered, Life, LifeConfig, Part, Tasks, reached
from tests.contract.rpc.wires import DEADLINE_S
from tests.waiting import until

QUICK = LifeConfig(start_timeout_s=0.2, drain_timeout_s=0.2, stop_timeout_s=0.2)


class Scripted(Part):
    """Notes what becomes of it in ``diary``."""

    def __init__(self, name: str, diary: list[str]) -> None:
        super().__init__(name)
        self.diary = diary
        self.why: str | None = None

    @property
    def unready(self) -> str | None:
        return self.why

    async def start(self) -> None:
        self.diary.append(f"{self.name} starts")

    async def drain(self, timeout_s: float) -> None:
        self.diary.append(f"{self.name} drains")

    async def stop(self) -> None:
        self.diary.append(f"{self.name} stops")
        await super().stop()


async def _never() -> None:
    await asyncio.Event().wait()


async def test_started_in_order_and_ended_in_reverse() -> None:
    diary: list[str] = []
    life = Life([Scripted("log", diary), Scripted("server", diary)])
    assert life.unready == "starting"
    living = asyncio.create_task(life.run())
    await until(lambda: life.unready is None, "ready")
    life.stop()
    assert await living == 0
    assert life.unready == "stopping"
    assert diary == [
        "log starts", "server starts", "server drains", "log drains", "server stops", "log stops"
    ]  # fmt: skip


async def test_readiness_is_that_of_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    part = Scripted("scheduler", [])
    part.why = "reads the journal"
    life = Life([part])
    living = asyncio.create_task(life.run())
    await until(lambda: life.unready == "scheduler: reads the journal", "not ready, with the reason")
    await until(lambda: "not ready: scheduler: reads the journal" in caplog.messages, "the log says so")
    part.why = None
    await until(lambda: "ready" in caplog.messages, "the log says so")
    assert life.unready is None
    life.stop()
    assert await living == 0


async def test_while_it_drains_it_is_not_ready() -> None:
    seen: list[str | None] = []

    class Looks(Part):
        async def drain(self, timeout_s: float) -> None:
            seen.append(life.unready)

    life = Life([Looks("server")])
    living = asyncio.create_task(life.run())
    await until(lambda: life.unready is None, "ready")
    life.stop()
    await living
    assert seen == ["stopping"]


async def test_a_part_that_fails_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    diary: list[str] = []
    part, other = Scripted("worker", diary), Scripted("other", diary)
    life = Life([other, part])
    living = asyncio.create_task(life.run())
    await until(lambda: life.unready is None, "ready")

    async def breaks() -> None:
        raise OSError("the disk is full")

    part.tasks.start(breaks(), name="loop")
    assert await living == 1
    assert "ending, since worker failed: OSError: the disk is full" in caplog.messages
    assert diary[-2:] == ["worker stops", "other stops"]
    assert "worker drains" not in diary


async def test_a_part_that_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    diary: list[str] = []

    class Refuses(Scripted):
        async def start(self) -> None:
            raise InvalidConfig("port", 80, "it can not be listened on")

    life = Life([Scripted("log", diary), Refuses("server", diary), Scripted("last", diary)])
    assert await life.run() == 1
    assert diary == ["log starts", "log stops"]
    assert "server did not start: port: 80 is not allowed; it can not be listened on" in caplog.messages


class Slow(Part):
    async def start(self) -> None:
        await _never()


async def test_a_part_that_takes_too_long_to_start(caplog: pytest.LogCaptureFixture) -> None:
    assert await Life([Slow("model")], QUICK).run() == 1
    assert "model did not start within 0.2 seconds" in caplog.messages


async def test_a_part_that_fails_while_another_starts(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Part):
        async def start(self) -> None:
            self.tasks.start(self._break(), name="loop")

        async def _break(self) -> None:
            raise OSError("gone")

    assert await asyncio.wait_for(Life([Broken("log"), Slow("model")]).run(), DEADLINE_S) == 1
    assert "ending, since log failed: OSError: gone" in caplog.messages


async def test_asked_to_stop_while_it_starts() -> None:
    diary: list[str] = []
    starting = asyncio.Event()

    class Starting(Scripted):
        async def start(self) -> None:
            starting.set()
            await _never()

    life = Life([Scripted("log", diary), Starting("model", diary)])
    living = asyncio.create_task(life.run())
    await asyncio.wait_for(starting.wait(), DEADLINE_S)
    life.stop()
    assert await living == 0
    assert diary[-1] == "log stops"


@pytest.mark.parametrize("verb", ["drain", "stop"])
async def test_every_step_of_the_end_is_bounded(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Scripted):
        async def drain(self, timeout_s: float) -> None:
            await (_never() if verb == "drain" else super().drain(timeout_s))

        async def stop(self) -> None:
            await (_never() if verb == "stop" else super().stop())

    diary: list[str] = []
    life = Life([Scripted("log", diary), Stuck("server", diary)], QUICK)
    living = asyncio.create_task(life.run())
    await until(lambda: life.unready is None, "ready")
    life.stop()
    # What a client still had is lost either way; only a part that does not stop makes it a failure.
    assert await asyncio.wait_for(living, DEADLINE_S) == (1 if verb == "stop" else 0)
    assert diary[-1] == "log stops"
    assert any("server took longer than" in message for message in caplog.messages)


async def test_a_part_that_fails_to_stop_does_not_keep_the_others() -> None:
    class Clumsy(Scripted):
        async def stop(self) -> None:
            raise OSError("no")

    diary: list[str] = []
    life = Life([Scripted("log", diary), Clumsy("server", diary)])
    living = asyncio.create_task(life.run())
    await until(lambda: life.unready is None, "ready")
    life.stop()
    assert await living == 1
    assert diary[-1] == "log stops"


async def test_a_context_manager_as_a_part() -> None:
    diary: list[str] = []

    @asynccontextmanager
    async def log() -> AsyncIterator[None]:
        diary.append("entered")
        yield
        diary.append("left")

    life = Life([Entered("log", log())])
    living = asyncio.create_task(life.run())
    await until(lambda: life.unready is None, "ready")
    assert diary == ["entered"]
    life.stop()
    assert await living == 0
    assert diary == ["entered", "left"]


@pytest.mark.parametrize(
    ("field", "value"), [("start_timeout_s", 0), ("drain_timeout_s", -1), ("stop_timeout_s", float("inf"))]
)
def test_what_a_life_can_not_be(field: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=field):
        LifeConfig(**{field: value})


# -- tasks -------------------------------------------------------------------------------------------------------


async def test_tasks_are_ended_together() -> None:
    tasks = Tasks("worker")
    started = [tasks.start(_never(), name=f"loop {number}", forever=True) for number in range(3)]
    await asyncio.sleep(0)
    await tasks.stop()
    assert all(task.cancelled() for task in started)
    assert len(tasks) == 0
    with pytest.raises(RuntimeError, match="stopping"):
        tasks.start(_never(), name="late")


async def test_the_first_failure_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks("worker")

    async def breaks(text: str) -> None:
        raise OSError(text)

    tasks.start(breaks("first"), name="one")
    tasks.start(breaks("second"), name="two")
    error = await asyncio.wait_for(tasks.failed(), DEADLINE_S)
    assert str(error) == "first"
    assert await tasks.failed() is error
    await tasks.stop()
    assert "worker: one failed: first" in caplog.messages
    assert "worker: two failed: second" in caplog.messages


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_task_for_ever_that_ends_is_a_failure(cancelled: bool) -> None:
    tasks = Tasks("worker")
    let_go = asyncio.Event()
    task = tasks.start(_until_set(let_go), name="loop", forever=True)
    other = tasks.start(_until_set(let_go), name="short")
    await asyncio.sleep(0)
    if cancelled:
        task.cancel()
    let_go.set()
    assert isinstance(await asyncio.wait_for(tasks.failed(), DEADLINE_S), Ended)
    await asyncio.wait_for(asyncio.gather(other, return_exceptions=True), DEADLINE_S)
    await tasks.stop()


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_task_that_will_not_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks("worker")
    let_go = asyncio.Event()

    async def stubborn() -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    task = tasks.start(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    await tasks.stop(timeout_s=0.05)
    assert "worker: stubborn did not end within 0.05 seconds" in caplog.messages
    let_go.set()
    await asyncio.wait_for(task, DEADLINE_S)


async def test_a_point_is_reached_or_its_task_says_why_not() -> None:
    point, go_on = asyncio.Event(), asyncio.Event()

    async def passing(error: Exception | None) -> None:
        await go_on.wait()
        if error is not None:
            raise error
        point.set()
        await asyncio.Event().wait()

    failing = asyncio.create_task(passing(OSError("no disk")))
    awaited = asyncio.create_task(reached(point, failing))
    await asyncio.sleep(0)
    assert not awaited.done()
    go_on.set()
    with pytest.raises(OSError, match="no disk"):
        await asyncio.wait_for(awaited, DEADLINE_S)

    going = asyncio.create_task(passing(None))
    await asyncio.wait_for(reached(point, going), DEADLINE_S)
    assert not going.done()
    going.cancel()
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(reached(asyncio.Event(), going))
    await asyncio.sleep(0)
    waiting.cancel()
    await until(lambda: asyncio.all_tasks() <= before, "no task left behind")
