"""Rates and places by key, under any order of comings and goings."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from greenroom.gateway.doors.doorkeeper import Caller
from greenroom.gateway.doors.keys import KeyLimits
from greenroom.gateway.doors.limits import Limits, TokenBucket

RATES = st.floats(0.1, 10_000)
PAUSES = st.lists(st.floats(0, 300), min_size=1, max_size=80)


@given(rate=RATES, pauses=PAUSES)
def test_a_bucket_never_lets_more_through_than_its_rate(rate: float, pauses: list[float]) -> None:
    bucket = TokenBucket.full(rate, 0.0)
    now, passed = 0.0, []
    for pause in pauses:
        now += pause
        if bucket.wait_s(now) == 0:
            bucket.take(now)
            passed.append(now)
        assert 0 <= bucket.level <= max(1.0, rate)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            span = passed[last] - passed[first]
            assert last - first + 1 <= max(1.0, rate) + span * rate / 60 + 1e-6


@given(rate=RATES, pauses=PAUSES)
def test_a_caller_that_waits_as_told_is_let_through_and_not_sooner(rate: float, pauses: list[float]) -> None:
    bucket = TokenBucket.full(rate, 0.0)
    now = 0.0
    for pause in pauses:
        now += pause / rate
        wait_s = bucket.wait_s(now)
        if wait_s > 1e-3:
            assert bucket.wait_s(now + wait_s * 0.99) > 0
        now += wait_s
        assert bucket.wait_s(now + 1e-6) == 0
        bucket.take(now + 1e-6)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket.full(60, 100.0)
    for _ in range(60):
        bucket.take(100.0)
    assert bucket.wait_s(50.0) == bucket.wait_s(100.0) == 1.0
    assert bucket.wait_s(101.0) == 0


@given(before=RATES, after=RATES, taken=st.integers(0, 20))
def test_another_rate_forgives_nothing(before: float, after: float, taken: int) -> None:
    bucket = TokenBucket.full(before, 0.0)
    used = 0
    for _ in range(taken):
        if bucket.wait_s(0.0) == 0:
            bucket.take(0.0)
            used += 1
    bucket.set_rate(after, 0.0)
    assert 0 <= bucket.level <= max(1.0, after)
    assert bucket.level <= max(0.0, max(1.0, after) - used) + 1e-6


STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "hold", "leave"]), st.sampled_from(["ann", "bob"]), st.integers(0, 5)),
    max_size=120,
)


@given(steps=STEPS, most=st.integers(1, 4))
def test_places_are_counted_exactly(steps: list[tuple[str, str, int]], most: int) -> None:
    """Against a model: how often each request holds which slot."""
    limits = Limits()
    held: Counter[tuple[str, int]] = Counter()
    for what, name, slot in steps:
        caller = Caller(name, KeyLimits(max_concurrent=most))
        mine = {other for (owner, other), count in held.items() if owner == name and count}
        if what == "enter":
            refusal = limits.enter(caller, f"slot-{slot}", 0.0)
            assert (refusal is None) == (slot in mine or len(mine) < most)
            if refusal is None:
                held[name, slot] += 1
            else:
                assert refusal.code == "too_many_concurrent"
        elif held[name, slot]:
            if what == "hold":
                limits.hold(name, f"slot-{slot}")
                held[name, slot] += 1
            else:
                limits.leave(name, f"slot-{slot}")
                held[name, slot] -= 1
        assert limits.in_use(name) == len({o for (owner, o), count in held.items() if owner == name and count}) <= most


def test_a_refusal_costs_nothing() -> None:
    limits = Limits()
    caller = Caller("ann", KeyLimits(rate_per_minute=2, max_concurrent=1))
    assert limits.enter(caller, "a", 0.0) is None
    for _ in range(5):
        refusal = limits.enter(caller, "b", 0.0)
        assert refusal is not None
        assert refusal.code == "too_many_concurrent"
    limits.leave("ann", "a")
    assert limits.enter(caller, "b", 0.0) is None
    limits.leave("ann", "b")
    refusal = limits.enter(caller, "c", 0.0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("rate_limited", 30.0)
    assert "2 sequences a minute" in refusal.message
    assert limits.in_use("ann") == 0


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["enter", "leave"]), st.integers(0, 5), st.integers(1, 9), st.floats(0, 30)),
        max_size=80,
    ),
    most=st.integers(1, 12),
    rate=st.floats(1, 60),
)
def test_sequences_are_counted(steps: list[tuple[str, int, int, float]], most: int, rate: float) -> None:
    """However many a request has: at once never more than the key's, and in any span of time never more than its
    rate."""
    limits = Limits()
    caller = Caller("ann", KeyLimits(max_concurrent=most, rate_per_minute=rate))
    held: dict[int, int] = {}
    passed: list[tuple[float, int]] = []
    now = 0.0
    for what, slot, sequences, pause in steps:
        now += pause
        if what == "leave" and slot in held:
            limits.leave("ann", f"slot-{slot}")
            del held[slot]
        if what == "enter" and slot not in held and limits.enter(caller, f"slot-{slot}", now) is None:
            refusal = limits.widen(caller, f"slot-{slot}", sequences, now)
            if refusal is None:
                held[slot] = sequences
                passed.append((now, sequences))
            else:
                limits.leave("ann", f"slot-{slot}")
                never = sequences > most or sequences > max(1.0, rate)
                assert (refusal.code == "too_many_sequences") == (refusal.retry_after_s is None) == never
        assert limits.in_use("ann") == sum(held.values()) <= most
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            taken = sum(count for _, count in passed[first : last + 1])
            assert taken <= max(1.0, rate) + (passed[last][0] - passed[first][0]) * rate / 60 + 1e-6


def test_a_retry_shares_its_sequences_and_is_charged_as_one() -> None:
    limits = Limits()
    caller = Caller("ann", KeyLimits(max_concurrent=4, rate_per_minute=6))
    assert limits.enter(caller, "a", 0.0) is None
    assert limits.widen(caller, "a", 4, 0.0) is None
    assert limits.enter(caller, "a", 0.0) is None
    assert limits.widen(caller, "a", 4, 0.0) is None
    assert limits.in_use("ann") == 4
    limits.leave("ann", "a")
    assert limits.in_use("ann") == 4
    limits.leave("ann", "a")
    assert limits.in_use("ann") == 0
    refusal = limits.enter(caller, "b", 0.0) or limits.widen(caller, "b", 2, 0.0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("rate_limited", 10.0), "5 of 6 were used, and 2 are asked for"


def test_a_caller_that_waits_as_told_is_let_through_with_all_its_sequences() -> None:
    limits = Limits()
    caller = Caller("ann", KeyLimits(rate_per_minute=60))
    assert limits.enter(caller, "a", 0.0) is None
    assert limits.widen(caller, "a", 50, 0.0) is None
    assert limits.enter(caller, "b", 0.0) is None
    refusal = limits.widen(caller, "b", 30, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == 20.0
    limits.leave("ann", "b")
    assert limits.enter(caller, "b", 20.0) is None
    assert limits.widen(caller, "b", 30, 20.0) is None


def test_cancels_of_what_is_not_known_are_few() -> None:
    limits = Limits(cancels_per_minute=60)
    ann, bob = Caller("ann"), Caller("bob")
    assert [limits.cancel(ann, 0.0) for _ in range(60)] == [None] * 60
    refusal = limits.cancel(ann, 0.0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("rate_limited", 1.0)
    assert limits.cancel(bob, 0.0) is None
    assert limits.cancel(ann, 1.0) is None
    assert limits.cancel(ann, 1.0) is not None


def test_callers_do_not_share() -> None:
    limits = Limits()
    for name in ("ann", "bob"):
        caller = Caller(name, KeyLimits(rate_per_minute=1))
        assert limits.enter(caller, "a", 0.0) is None
        assert limits.enter(caller, "b", 0.0) is not None


def test_without_limits_nothing_is_kept() -> None:
    limits = Limits()
    for number in range(100):
        assert limits.enter(Caller(), str(number), 0.0) is None
        limits.leave("", str(number))
    assert limits._accounts == {}
