"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import GIB, MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("2GiB", 2 * GIB),
        ("2 g", 2 * GIB),
        ("1.5MiB", 3 * MIB // 2),
        ("1500MB", 1_500_000_000),
        ("0", 0),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text, field="x") == count


def test_a_share_needs_a_whole() -> None:
    assert parse_bytes("25%", field="x", whole=1000) == 250
    with pytest.raises(InvalidConfig, match=r"x: '25%' is not allowed; write a size such as 2GiB"):
        parse_bytes("25%", field="x")


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 GiB 2", "101%", "1 parsec", "٣"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig):
        parse_bytes(text, field="x", whole=10)


@given(st.integers(0, 10**15))
def test_what_is_printed_reads_back_about_the_same(count: int) -> None:
    assert parse_bytes(format_bytes(count), field="x") == pytest.approx(count, rel=0.01, abs=1)
