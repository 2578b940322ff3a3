"""One function over many items, each in a process of its own: results in order, a clean end."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from greenroom.core.errors import GreenroomError

T = TypeVar("T")
R = TypeVar("R")

_LOOK_S = 0.2
"""How often Ctrl-C is noticed while nothing finishes."""


class ProcessLost(GreenroomError):
    """A process ended while it worked; most likely the machine ran out of memory."""


class Stopped(Exception):
    """The work is no longer wanted."""


def in_processes(
    work: Callable[[T, Callable[[], None]], R], items: Sequence[T], jobs: int, finished: Callable[[], object]
) -> list[R]:
    """``work(item, go_on)`` of each item, in their order, in ``jobs`` processes at a time, started afresh.

    Items and results go through pipes; nothing is written to a file. ``work`` calls ``go_on`` from time to time, which
    raises Stopped when it is to give up. ``finished`` is called in this process after each item, in whatever order they
    end. What ``work`` raises ends the others and is raised here, as is KeyboardInterrupt. Raises ProcessLost when a
    process dies. A script that calls this needs ``if __name__ == "__main__"``.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.RawValue(ctypes.c_bool, False)
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(work, stop))
    try:
        with _interrupts_held_back():
            futures: list[Future[R]] = [executor.submit(_run, item) for item in items]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                finished()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise ProcessLost(f"one of {jobs} processes was lost, perhaps for want of memory; try fewer --jobs") from error
    finally:
        stop.value = True
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Processes started meanwhile ignore Ctrl-C, which a terminal sends to all processes. This process stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the other processes ----------------------------------------------------------------------------------------

_work: Callable[[Any, Callable[[], None]], Any]
_stop: Any


def _begin(work: Callable[[Any, Callable[[], None]], Any], stop: Any) -> None:
    global _work, _stop
    _work, _stop = work, stop
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(item: Any) -> Any:
    return _work(item, _go_on)


def _go_on() -> None:
    if _stop.value:
        raise Stopped
