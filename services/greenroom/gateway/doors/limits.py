"""How much each caller may do at once and in a minute. Pure: the time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.gateway.doors.doorkeeper import Caller
from greenroom.gateway.doors.keys import KeyLimits

CANCELS_PER_MINUTE = 600.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken. ``retry_after_s``: when another try is worth it; None: never."""

    code: str
    message: str
    retry_after_s: float | None


@dataclass(slots=True)
class TokenBucket:
    """Lets ``per_minute`` sequences through at once (at least one), and then as many every minute, evenly.

    Invariant: 0 <= level <= capacity; in any span of t seconds at most capacity + t x rate are let through. A clock
    that goes backwards gives nothing.
    """

    per_minute: float
    level: float
    at: float

    @classmethod
    def full(cls, per_minute: float, now: float) -> TokenBucket:
        return cls(per_minute, max(1.0, per_minute), now)

    @property
    def capacity(self) -> float:
        """The most that is ever let through at once."""
        return max(1.0, self.per_minute)

    def set_rate(self, per_minute: float, now: float) -> None:
        """Another rate from now on. What was used stays used."""
        self._refill(now)
        used = self.capacity - self.level
        self.per_minute = per_minute
        self.level = min(max(0.0, self.capacity - used), self.capacity)

    def wait_s(self, now: float, count: int = 1) -> float:
        """Seconds until ``count`` (at most ``capacity``) are let through; 0: now. Takes nothing."""
        self._refill(now)
        lacking = count - self.level
        return lacking * 60.0 / self.per_minute if lacking > _ROUNDING else 0.0

    def take(self, now: float, count: int = 1) -> None:
        """Call this only where ``wait_s`` is 0."""
        self._refill(now)
        self.level = max(0.0, self.level - count)

    def give_back(self, count: int = 1) -> None:
        """Returns what was taken for a request that is refused after all."""
        self.level = min(self.capacity, self.level + count)

    def _refill(self, now: float) -> None:
        gained = max(0.0, now - self.at) * self.per_minute / 60.0
        self.level = min(self.capacity, self.level + gained)
        self.at = max(self.at, now)


@dataclass(slots=True)
class _Slot:
    """The place of one request. ``sequences``: all that it asks for, until its last holder leaves."""

    holders: int = 0
    sequences: int = 1


@dataclass(slots=True)
class _Account:
    bucket: TokenBucket | None = None
    cancels: TokenBucket | None = None
    slots: dict[str, _Slot] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        return sum(slot.sequences for slot in self.slots.values())


class Limits:
    """Counts sequences by callers' names: a request has ``n`` times its prompts of them.

    A request holds a *slot*, named by its id. A retry under its idempotency key shares the slot, so it is never refused
    for the place that it has already. A slot is free when all its holders have left. How many sequences a request has
    is known only once its body has been read: it counts as one when it enters, and is widened then.

    ``cancels_per_minute``: of one caller, for requests that are not known here. Each such cancel is written to the log,
    and the scheduler keeps it for as long as the request may yet come.
    """

    def __init__(self, cancels_per_minute: float = CANCELS_PER_MINUTE) -> None:
        self._cancels_per_minute = cancels_per_minute
        self._accounts: dict[str, _Account] = {}

    def in_use(self, name: str) -> int:
        """How many sequences the caller has under way."""
        account = self._accounts.get(name)
        return 0 if account is None else account.sequences

    def enter(self, caller: Caller, slot: str, now: float) -> Refusal | None:
        """Takes a request in, as one sequence. A Refusal where it can not be taken: then nothing was counted."""
        limits = caller.limits
        account = self._accounts.setdefault(caller.name, _Account())
        if slot not in account.slots and (refusal := _no_place(account, limits, 1)):
            return refusal
        bucket = account.bucket = _bucket(account.bucket, limits.rate_per_minute, now)
        if bucket is not None:
            if refusal := _too_soon(bucket, 1, now):
                return refusal
            bucket.take(now)
        account.slots.setdefault(slot, _Slot()).holders += 1
        return None

    def widen(self, caller: Caller, slot: str, sequences: int, now: float) -> Refusal | None:
        """A request that has entered has so many sequences. A Refusal where that is too many: then it no longer counts
        against the rate, and its slot stays as it was until it leaves."""
        limits = caller.limits
        account = self._accounts[caller.name]
        held = account.slots[slot]
        more = sequences - held.sequences
        if more <= 0:
            return None
        refusal = _too_many(limits, sequences) or _no_place(account, limits, more)
        bucket = account.bucket
        if bucket is not None:
            bucket.give_back()
            refusal = refusal or _too_soon(bucket, more + 1, now)
            if refusal is None:
                bucket.take(now, more + 1)
        if refusal is None:
            held.sequences = sequences
        return refusal

    def cancel(self, caller: Caller, now: float) -> Refusal | None:
        """Takes a cancel of a request that is not known here. A Refusal where it can not be taken."""
        account = self._accounts.setdefault(caller.name, _Account())
        bucket = account.cancels
        if bucket is None:
            bucket = account.cancels = TokenBucket.full(self._cancels_per_minute, now)
        wait_s = bucket.wait_s(now)
        if wait_s > 0:
            allowed = f"{self._cancels_per_minute:g} cancels a minute of requests that this gateway does not know"
            return Refusal("rate_limited", f"{allowed} are allowed", wait_s)
        bucket.take(now)
        return None

    def hold(self, name: str, slot: str) -> None:
        """Adds a holder to a slot that is in use."""
        self._accounts[name].slots[slot].holders += 1

    def leave(self, name: str, slot: str) -> None:
        """Call this once for every ``enter`` that was not refused, and for every ``hold``."""
        account = self._accounts[name]
        held = account.slots[slot]
        held.holders -= 1
        if held.holders == 0:
            del account.slots[slot]
        if not account.slots and account.bucket is None and account.cancels is None:
            del self._accounts[name]


def _too_many(limits: KeyLimits, sequences: int) -> Refusal | None:
    """The refusal of more sequences than the key is ever allowed, None where it may have them."""
    most, rate = limits.max_concurrent, limits.rate_per_minute
    if most is not None and sequences > most:
        allowed = f"{most} at once"
    elif rate is not None and sequences > max(1.0, rate):
        allowed = f"{rate:g} a minute"
    else:
        return None
    message = f"this asks for {sequences} sequences (n times its prompts); this key is allowed {allowed}"
    return Refusal("too_many_sequences", message, None)


def _no_place(account: _Account, limits: KeyLimits, more: int) -> Refusal | None:
    most = limits.max_concurrent
    if most is None or (under_way := account.sequences) + more <= most:
        return None
    message = f"{under_way} sequences of this key are under way; with {more} more it would have more than its {most}"
    return Refusal("too_many_concurrent", message, 1.0)


def _too_soon(bucket: TokenBucket, count: int, now: float) -> Refusal | None:
    wait_s = bucket.wait_s(now, count)
    message = f"this key is allowed {bucket.per_minute:g} sequences a minute"
    return Refusal("rate_limited", message, wait_s) if wait_s > 0 else None


def _bucket(bucket: TokenBucket | None, per_minute: float | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket.full(per_minute, now)
    if bucket.per_minute != per_minute:
        bucket.set_rate(per_minute, now)
    return bucket
