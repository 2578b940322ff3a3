"""Headers: what is said beside the body, and the ids that come of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import Slo
from greenroom.gateway.doors.doorkeeper import Caller
from greenroom.gateway.requests.call_headers import CallHeaders, base_id, call_headers, owned_id

NAMES = st.text("abcdefghij.-_0123456789", min_size=0, max_size=20)
KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128)


def call(*headers: tuple[str, str], name: str = "ann") -> CallHeaders:
    def values(wanted: str) -> Sequence[str]:
        return [value for header, value in headers if header == wanted]

    return call_headers(values, Caller(name))


def test_nothing_said() -> None:
    said = call()
    assert (said.slo, said.priority, said.keyed, said.patience_s) == (Slo(), None, False, None)
    assert said.base != call().base


def test_all_that_can_be_said() -> None:
    said = call(
        ("x-slo-ttft-ms", "200"), ("x-slo-tpot-ms", "1.25e1"), ("x-slo-e2e-ms", " 3000 "), ("x-priority", "-7"),
        ("idempotency-key", "order-1"),
    )  # fmt: skip
    assert said.slo == Slo(ttft_ms=200, tpot_ms=12.5, e2e_ms=3000)
    assert (said.priority, said.keyed, said.base) == (-7, True, base_id("ann", "order-1"))


BAD_NUMBERS = ["", "0", "-1", "x", "1e999", "nan", "inf", "1,5", "٣", "1" * 30, "0x10", "0.0", "1_0"]


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_a_bad_number_of_milliseconds_names_its_header(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-slo-tpot-ms takes a number of milliseconds above 0") as caught:
        call(("x-slo-tpot-ms", value))
    assert caught.value.param == "x-slo-tpot-ms"


@pytest.mark.parametrize("value", ["", "101", "-101", "1.5", "high", "+5", "٣"])
def test_a_bad_priority(value: str) -> None:
    with pytest.raises(InvalidRequest, match="whole number from -100 to 100"):
        call(("x-priority", value))


@pytest.mark.parametrize("key", ["", "a b", "ä", "x" * 129, "\x7f", "a\tb"])
def test_a_bad_idempotency_key(key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call(("idempotency-key", key))
    assert caught.value.code == "invalid_idempotency_key"


@pytest.mark.parametrize("header", ["x-priority", "idempotency-key", "x-slo-e2e-ms"])
def test_a_header_twice_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{header} was sent 2 times"):
        call((header, "1"), (header, "1"))


@given(tenant=NAMES, other=NAMES, key=KEYS, second=KEYS)
def test_ids_follow_from_tenant_and_key(tenant: str, other: str, key: str, second: str) -> None:
    made = base_id(tenant, key)
    assert re.fullmatch("[0-9a-f]{40}", made)
    assert made == base_id(tenant, key)
    assert (made == base_id(other, second)) == ((tenant, key) == (other, second))


@given(tenant=NAMES, other=NAMES, key=st.none() | KEYS, number=st.integers(0, 127))
def test_only_its_tenant_owns_an_id(tenant: str, other: str, key: str | None, number: int) -> None:
    base = base_id(tenant, key)
    assert owned_id(base, tenant) == owned_id(f"chatcmpl-{base}", tenant) == (base, 0)
    assert owned_id(f"{base}-{number}", tenant) == owned_id(f"cmpl-{base}-{number}", tenant) == (base, number)
    if other != tenant:
        assert owned_id(base, other) is None


@pytest.mark.parametrize("given_id", ["", "x", "a" * 40 + "-", "a" * 39, "chatcmpl-", "G" * 40])
def test_what_is_no_id(given_id: str) -> None:
    assert owned_id(given_id, "ann") is None
