"""The in-process stream: order, bound, end."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.fabric.rpc.local.pipe import EOF, Pipe


@given(limit=st.integers(1, 5), count=st.integers(0, 40), pauses=st.lists(st.sampled_from("rw"), max_size=40))
def test_everything_comes_in_order_and_never_too_much_is_between(limit: int, count: int, pauses: list[str]) -> None:
    async def both() -> None:
        pipe = Pipe(asyncio.get_running_loop(), limit)
        most = 0

        async def write() -> None:
            nonlocal most
            for number in range(count):
                for _ in range(pauses.count("w")):
                    await asyncio.sleep(0)
                assert await pipe.put(number)
                most = max(most, len(pipe))
            pipe.close()

        async def read() -> list[int]:
            got = []
            while (item := await pipe.get()) is not EOF:
                got.append(item)
                for _ in range(pauses.count("r")):
                    await asyncio.sleep(0)
            return got

        _, got = await asyncio.wait_for(asyncio.gather(write(), read()), 10)
        assert got == list(range(count))
        assert most <= limit

    asyncio.run(both())


async def test_a_writer_that_waits_is_let_go_when_it_is_closed() -> None:
    pipe = Pipe(asyncio.get_running_loop(), 1)
    assert await pipe.put(1)
    waiting = asyncio.create_task(pipe.put(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    pipe.close(discard=True)
    assert await waiting is False
    assert await pipe.get() is EOF


async def test_a_reader_that_waits_is_let_go_when_it_is_closed() -> None:
    pipe = Pipe(asyncio.get_running_loop(), 1)
    waiting = asyncio.create_task(pipe.get())
    await asyncio.sleep(0)
    pipe.close()
    assert await waiting is EOF


async def test_what_is_in_it_can_be_got_after_the_end() -> None:
    pipe = Pipe(asyncio.get_running_loop(), 2)
    await pipe.put(1)
    pipe.close()
    assert await pipe.put(2) is False
    assert await pipe.get() == 1
    assert await pipe.get() is EOF


async def test_a_cancelled_reader_loses_nothing() -> None:
    pipe = Pipe(asyncio.get_running_loop(), 2)
    reader = asyncio.create_task(pipe.get())
    await asyncio.sleep(0)
    await pipe.put(1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await pipe.get() == 1


async def test_two_readers_or_two_writers_are_refused() -> None:
    pipe = Pipe(asyncio.get_running_loop(), 1)
    reader = asyncio.create_task(pipe.get())
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.UsageError, match="another read"):
        await pipe.get()
    await pipe.put(1)
    await reader
    await pipe.put(2)
    writer = asyncio.create_task(pipe.put(3))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.UsageError, match="another write"):
        await pipe.put(4)
    pipe.close(discard=True)
    assert await writer is False
