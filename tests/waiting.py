"""Waiting for something, where nothing tells of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 90.0
"""For a hang. A machine that is busy with something else is slow, and passes."""
_LOOK_S = 0.001
_ASK_S = 0.05


async def until(
    holds: Callable[[], object], what: str = "what was waited for", *, within_s: float = DEADLINE_S
) -> None:
    """Returns once it holds, by what other tasks of the event loop do. Raises AssertionError if that takes too long."""
    try:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(f"in {within_s:g} seconds it did not come to: {what}") from None


def until_others(
    holds: Callable[[], object], what: Callable[[], object] | str, *, within_s: float = DEADLINE_S
) -> None:
    """The same for what other processes do. ``holds`` asks them and may take a while. A callable ``what`` says how
    things stand in the end."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"in {within_s:g} seconds it did not come to: {what() if callable(what) else what}")
        time.sleep(_ASK_S)
