"""A clock that stands still until the test moves it."""

from __future__ import annotations


class HandClock:
    """``now``: what it says, in whatever unit its reader counts."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
