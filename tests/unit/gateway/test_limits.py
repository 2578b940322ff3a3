"""Rates and places by key, under any order of comings and goings."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from greenroom.gateway.doorkeeper import Caller
from greenroom.gateway.keys import KeyLimits
from greenroom.gateway.limits import Limits, TokenBucket

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
def test_whoever_waits_as_told_is_let_through_and_not_sooner(rate: float, pauses: list[float]) -> None:
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
    """Against a model: who holds which slot how often."""
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
    assert "2 requests a minute" in refusal.message
    assert limits.in_use("ann") == 0


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
