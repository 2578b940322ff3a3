"""Unix time that never jumps: deadlines within a process are counted on it."""

from __future__ import annotations

import time


class SteadyClock:
    """Milliseconds since 1970: read once, and advanced by the monotonic clock from then on."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return (self._offset + time.monotonic()) * 1000.0
