"""Where a call goes, and whether and when it is sent again. Pure: time and chance are passed in."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from greenroom.client.errors import Failure

_NOT_TAKEN_HERE = frozenset({"draining", "not_ready", "stopping"})
"""The gateway said that it does not take requests now: another may."""
_NOT_TAKEN_NOW = frozenset({"saturated", "rate_limited", "too_many_concurrent"})
"""The gateway said that it did not take this one: it may later."""
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


class Route:
    """The addresses of one client, and the one that last answered, where calls go first."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self._first = 0

    def order(self) -> tuple[int, ...]:
        count = len(self.addresses)
        return tuple((self._first + step) % count for step in range(count))

    def answered(self, place: int) -> None:
        self._first = place


@dataclass(slots=True)
class Plan:
    """One call. ``order``: places of addresses, the first to try first. ``deadline``: on the clock that ``now`` is of.

    A call is sent again only where it was certainly not taken, or where an idempotency key makes it the same request;
    where a part of its answer has been had, only with a key. Moves to addresses that were not tried yet are free;
    everything else counts against ``retries`` and is waited for.
    """

    order: tuple[int, ...]
    deadline: float
    keyed: bool
    retries: int
    _at: int = 0
    _moves: int = 0
    _sent_again: int = 0

    @property
    def place(self) -> int:
        """The address to call."""
        return self.order[self._at]

    def after(self, failure: Failure, now: float, *, began: bool = False, chance: float = 0.5) -> float | None:
        """Seconds to wait before the next call at ``place``; None: give up. ``chance``: 0 to 1, spreads callers."""
        if not self._may(failure, began):
            return None
        elsewhere = failure.code not in _NOT_TAKEN_NOW
        if elsewhere and self._moves < len(self.order) - 1:
            self._moves += 1
            self._at = (self._at + 1) % len(self.order)
            return 0.0 if now < self.deadline else None
        if self._sent_again >= self.retries:
            return None
        wait_s: float = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0**self._sent_again) * (0.5 + chance)
        if failure.retry_after_s is not None:
            wait_s = failure.retry_after_s * (1.0 + 0.25 * chance)
        if now + wait_s >= self.deadline:
            return None
        self._sent_again += 1
        if elsewhere:
            self._at = (self._at + 1) % len(self.order)
        return wait_s

    def _may(self, failure: Failure, began: bool) -> bool:
        if self.keyed:
            return failure.status is grpc.StatusCode.UNAVAILABLE or failure.code in _NOT_TAKEN_NOW
        if began:
            return False
        return not failure.sent or failure.code in _NOT_TAKEN_HERE or failure.code in _NOT_TAKEN_NOW
