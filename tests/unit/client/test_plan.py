"""Where a call goes next: never twice where it might have been taken, never past its deadline."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.client.errors import (
    BadRequest,
    ClientError,
    Failure,
    LimitExceeded,
    ServerFailed,
    Unavailable,
    read_failure,
)
from greenroom.client.plan import Plan, Route

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
REFUSED = Failure(UNAVAILABLE, "connection refused", sent=False)
BROKEN = Failure(UNAVAILABLE, "socket closed")
DRAINING = Failure(UNAVAILABLE, "stopping", "draining", 5.0)
SATURATED = Failure(EXHAUSTED, "full", "saturated", 2.0)
FAILURES = st.builds(
    Failure,
    st.sampled_from(list(grpc.StatusCode)),
    st.just("x"),
    st.sampled_from([None, "draining", "not_ready", "saturated", "rate_limited", "shed", "cancelled", "expired"]),
    st.none() | st.floats(0, 20),
    st.booleans(),
)


def plan(addresses: int = 2, *, keyed: bool = False, retries: int = 2, deadline: float = 100.0) -> Plan:
    return Plan(tuple(range(addresses)), deadline, keyed=keyed, retries=retries)


def test_after_a_refusal_the_other_gateway_is_called_at_once() -> None:
    for failure in (REFUSED, DRAINING):
        one = plan()
        assert one.after(failure, 0.0) == 0.0
        assert one.place == 1


def test_when_all_have_refused_they_are_tried_again_after_a_while() -> None:
    one = plan()
    assert one.after(REFUSED, 0.0) == 0.0
    waits = [one.after(REFUSED, 0.0) for _ in range(3)]
    assert waits[0] is not None
    assert waits[1] is not None
    assert 0 < waits[0] < waits[1]
    assert waits[2] is None


def test_what_may_have_been_taken_is_sent_again_only_under_a_key() -> None:
    assert plan().after(BROKEN, 0.0) is None
    assert plan(keyed=True).after(BROKEN, 0.0) == 0.0


def test_half_an_answer_is_gone_on_with_only_under_a_key() -> None:
    for failure in (REFUSED, DRAINING, SATURATED):
        assert plan().after(failure, 0.0, began=True) is None
        assert plan(keyed=True).after(failure, 0.0, began=True) is not None


def test_a_full_gateway_is_waited_for_as_it_says() -> None:
    one = plan()
    wait_s = one.after(SATURATED, 0.0, chance=0.0)
    assert (wait_s, one.place) == (2.0, 0)
    assert plan(deadline=1.5).after(SATURATED, 0.0) is None


@pytest.mark.parametrize(
    "status", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED]
)
def test_what_would_fail_again_is_not_tried_again(status: grpc.StatusCode) -> None:
    assert plan(keyed=True).after(Failure(status, "x"), 0.0) is None


@given(
    failures=st.lists(st.tuples(FAILURES, st.booleans(), st.floats(0, 1)), max_size=20),
    keyed=st.booleans(),
    addresses=st.integers(1, 4),
    retries=st.integers(0, 4),
)
def test_it_ends_in_time_and_never_doubles(
    failures: list[tuple[Failure, bool, float]], keyed: bool, addresses: int, retries: int
) -> None:
    one = plan(addresses, keyed=keyed, retries=retries, deadline=30.0)
    now, again = 0.0, 0
    for failure, began, chance in failures:
        wait_s = one.after(failure, now, began=began, chance=chance)
        if wait_s is None:
            break
        safe = not failure.sent or failure.code in ("draining", "not_ready", "stopping", "saturated", "rate_limited")
        assert keyed or (safe and not began)
        again += 1
        now += wait_s
        assert now < 30.0
        assert 0 <= one.place < addresses
    assert again <= retries + addresses - 1


def test_calls_go_first_where_the_last_one_went_well() -> None:
    route = Route(("a:1", "b:1", "c:1"))
    assert route.order() == (0, 1, 2)
    route.answered(1)
    assert route.order() == (1, 2, 0)


class _Raised(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._all = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._all[0]

    def details(self) -> str:
        return self._all[1]

    def trailing_metadata(self) -> Any:
        return self._all[2]


@pytest.mark.parametrize(
    ("raised", "kind", "code", "after_s", "sent"),
    [
        (_Raised(UNAVAILABLE, "failed to connect to all addresses; last error: x"), Unavailable, None, None, False),
        (_Raised(UNAVAILABLE, "Socket closed"), Unavailable, None, None, True),
        (_Raised(UNAVAILABLE, "failed to connect: said a server", (("greenroom-code", "x"),)), Unavailable, "x", None,
         True),
        (_Raised(EXHAUSTED, "full", (("greenroom-code", "saturated"), ("retry-after", "3"))), LimitExceeded,
         "saturated", 3.0, True),
        (_Raised(EXHAUSTED, "full", (("retry-after", "soon"),)), LimitExceeded, None, None, True),
        (_Raised(grpc.StatusCode.INVALID_ARGUMENT, "n is bad"), BadRequest, None, None, True),
        (_Raised(grpc.StatusCode.DATA_LOSS, ""), ServerFailed, None, None, True),
    ],
)  # fmt: skip
def test_what_grpc_raises_is_read(
    raised: _Raised, kind: type[ClientError], code: str | None, after_s: float | None, sent: bool
) -> None:
    failure = read_failure(raised)
    error = failure.error()
    assert type(error) is kind
    assert (error.code, error.retry_after_s, failure.sent) == (code, after_s, sent)
    assert error.status == raised.code().name
    assert str(error)
