"""The worker's own clock."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def monotonic_ms() -> float:
    """Milliseconds that never jump. Where the system has such a clock they go on while the machine sleeps: a lease runs
    out in a suspended machine too."""
    return time.clock_gettime(_CLOCK) * 1000.0
