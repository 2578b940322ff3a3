"""Calls to one thread: bounded, with a deadline, and not begun after their caller has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from greenroom.predictor.serving.bounded_thread import BoundedThread, Crowded
from tests.waiting import until

LONG_S = 60.0


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


async def test_what_comes_back_and_what_is_raised(executor: ThreadPoolExecutor) -> None:
    thread = BoundedThread(executor, 1)
    assert await thread.call(LONG_S, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.call(LONG_S, lambda: 1 // 0)
    await until(lambda: len(thread) == 0)


@pytest.mark.parametrize("gone", ["late", "cancelled"])
async def test_a_thread_that_hangs_gathers_no_more_than_the_bound(executor: ThreadPoolExecutor, gone: str) -> None:
    """What has no caller any more is not begun when the thread is free again."""
    thread, go_on, begun, done = BoundedThread(executor, 3), threading.Event(), threading.Event(), list[int]()

    def hang() -> None:
        begun.set()
        assert go_on.wait(LONG_S)

    try:
        hanging = asyncio.create_task(thread.call(LONG_S, hang))
        await until(begun.is_set)
        for number in range(2):
            if gone == "late":
                with pytest.raises(TimeoutError):
                    await thread.call(0.001, lambda number=number: done.append(number))  # type: ignore[misc]
            else:
                task = asyncio.create_task(thread.call(LONG_S, lambda: None))
                await until(lambda number=number: len(thread) == 2 + number)  # type: ignore[misc]
                task.cancel()
                await asyncio.wait([task])
        assert len(thread) == 3
        with pytest.raises(Crowded):
            await thread.call(LONG_S, lambda: done.append(9))
    finally:
        go_on.set()
    await hanging
    await until(lambda: len(thread) == 0)
    assert done == []
    assert await thread.call(LONG_S, lambda: 1) == 1


async def test_no_time_is_no_time(executor: ThreadPoolExecutor) -> None:
    done: list[int] = []
    with pytest.raises(TimeoutError):
        await BoundedThread(executor, 1).call(0.0, lambda: done.append(1))
    assert done == []


async def test_a_failure_that_comes_after_its_caller_has_left_is_retrieved(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    thread, go_on, begun = BoundedThread(executor, 1), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert go_on.wait(LONG_S)
        raise OSError("later")

    task = asyncio.create_task(thread.call(LONG_S, fail))
    await until(begun.is_set)
    task.cancel()
    await asyncio.wait([task])
    go_on.set()
    await until(lambda: len(thread) == 0)
    assert "never retrieved" not in caplog.text
