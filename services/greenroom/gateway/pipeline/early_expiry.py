"""A request that was ended as expired before its time, by the clock here."""

from __future__ import annotations

import dataclasses

from greenroom.core.generation import Finished, FinishReason
from greenroom.fabric.log.health import LogHealth, Skew, expired_early, told_ms


def with_clocks(
    end: Finished, began: float, timeout_ms: float, now: float, *, keyed: bool, health: LogHealth | None
) -> Finished:
    """Explains an expiry that is too early by the clock here: the clocks differ. Under a key the request may have
    begun with an earlier call, so there the log's stamps must show the difference too.

    ``began``, ``now``: of the call, in milliseconds. ``timeout_ms``: what the request had.
    """
    skewed = health is not None and health.skew is not Skew.FINE
    if end.reason is not FinishReason.EXPIRED or not expired_early(began, timeout_ms, now):
        return end
    if keyed and not skewed:
        return end
    message = (
        f"it was ended as expired {told_ms(now - began)} after it came, of {told_ms(timeout_ms)} that it had: the "
        "clocks of the gateway and the scheduler differ"
    )
    if health is not None and skewed:
        message += f" ({health.told_skew()})"
    return dataclasses.replace(end, error=message)
