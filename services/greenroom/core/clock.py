"""Unix time that never jumps: what deadlines are counted on within a process."""

from __future__ import annotations

import time


class SteadyClock:
    """Milliseconds since 1970, anchored once; from then on it goes with the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return (self._offset + time.monotonic()) * 1000.0
