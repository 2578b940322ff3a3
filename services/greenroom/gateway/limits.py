"""What each caller may do at once and in a minute. Pure: the time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.gateway.doorkeeper import Caller
from greenroom.gateway.keys import KeyLimits

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken now, and when it is worth another try."""

    code: str
    message: str
    retry_after_s: float


@dataclass(slots=True)
class TokenBucket:
    """Lets ``per_minute`` requests through at once, and then as many every minute, evenly.

    Invariant: 0 <= level <= capacity; in any span of t seconds at most capacity + t x rate are let through. A clock
    that goes backwards gives nothing.
    """

    per_minute: float
    level: float
    at: float

    @classmethod
    def full(cls, per_minute: float, now: float) -> TokenBucket:
        return cls(per_minute, max(1.0, per_minute), now)

    def set_rate(self, per_minute: float, now: float) -> None:
        """Another rate from now on; what was used stays used."""
        self._refill(now)
        used = max(1.0, self.per_minute) - self.level
        self.per_minute = per_minute
        self.level = min(max(0.0, max(1.0, per_minute) - used), max(1.0, per_minute))

    def wait_s(self, now: float) -> float:
        """How long until one is let through; 0: now. Changes nothing that matters."""
        self._refill(now)
        lacking = 1.0 - self.level
        return lacking * 60.0 / self.per_minute if lacking > _ROUNDING else 0.0

    def take(self, now: float) -> None:
        """To be called where ``wait_s`` is 0."""
        self._refill(now)
        self.level = max(0.0, self.level - 1.0)

    def _refill(self, now: float) -> None:
        gained = max(0.0, now - self.at) * self.per_minute / 60.0
        self.level = min(max(1.0, self.per_minute), self.level + gained)
        self.at = max(self.at, now)


@dataclass(slots=True)
class _Account:
    bucket: TokenBucket | None = None
    slots: dict[str, int] = field(default_factory=dict)


class Limits:
    """Counts by callers' names.

    A request holds a *slot*, named by its id. Whoever comes for the same request again (a retry under its idempotency
    key) shares it, so a retry is never refused for the place that it has already. A slot is free when all that hold
    it have left.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def in_use(self, name: str) -> int:
        """How many slots the caller holds."""
        account = self._accounts.get(name)
        return 0 if account is None else len(account.slots)

    def enter(self, caller: Caller, slot: str, now: float) -> Refusal | None:
        """Take a request in; the reason where it can not be, and then nothing was counted."""
        limits = caller.limits
        account = self._accounts.setdefault(caller.name, _Account())
        fresh = slot not in account.slots
        if limits.max_concurrent is not None and fresh and len(account.slots) >= limits.max_concurrent:
            return Refusal(
                "too_many_concurrent",
                f"{len(account.slots)} requests of this key are under way, as many as it is allowed at once",
                1.0,
            )
        bucket = account.bucket = _bucket(account.bucket, limits, now)
        if bucket is not None:
            wait_s = bucket.wait_s(now)
            if wait_s > 0:
                return Refusal(
                    "rate_limited", f"this key is allowed {limits.rate_per_minute:g} requests a minute", wait_s
                )
            bucket.take(now)
        account.slots[slot] = account.slots.get(slot, 0) + 1
        return None

    def hold(self, name: str, slot: str) -> None:
        """One more that needs the slot, which is in use."""
        self._accounts[name].slots[slot] += 1

    def leave(self, name: str, slot: str) -> None:
        """For every ``enter`` that let in, and for every ``hold``."""
        account = self._accounts[name]
        account.slots[slot] -= 1
        if account.slots[slot] == 0:
            del account.slots[slot]
        if not account.slots and account.bucket is None:
            del self._accounts[name]


def _bucket(bucket: TokenBucket | None, limits: KeyLimits, now: float) -> TokenBucket | None:
    if limits.rate_per_minute is None:
        return None
    if bucket is None:
        return TokenBucket.full(limits.rate_per_minute, now)
    if bucket.per_minute != limits.rate_per_minute:
        bucket.set_rate(limits.rate_per_minute, now)
    return bucket
