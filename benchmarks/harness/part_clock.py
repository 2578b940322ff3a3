"""Exclusive time by part: while an inner part runs, the outer one's clock stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PartClock:
    """Belongs to one thread. ``seconds``: by part, without the parts that ran within it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        now = self._now()
        self._book(now)
        self._stack.append(name)
        self._since = now

    def leave(self) -> None:
        now = self._now()
        self._book(now)
        self._stack.pop()
        self._since = now

    def _book(self, now: float) -> None:
        if self._stack:
            name = self._stack[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
