"""Waiting for what other tasks of the event loop do, where nothing tells of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LOOK_S = 0.001


async def until(holds: Callable[[], object], what: str = "what was waited for", *, within_s: float = 20.0) -> None:
    """Returns once it holds. Raises AssertionError where that takes too long."""
    try:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(f"in {within_s:g} seconds it did not come to: {what}") from None
