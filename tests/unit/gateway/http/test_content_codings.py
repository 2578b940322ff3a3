"""Decompression by slices, however the bytes come."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.units import MIB
from greenroom.gateway.errors import ApiError
from greenroom.gateway.http.content_codings import SLICE, Inflater, inflater_of


def inflated(coding: str, parts: Sequence[bytes]) -> bytes:
    inflater = Inflater(coding)
    found = b"".join(one for part in parts for one in inflater.slices(part))
    inflater.check_ended()
    return found


def cut(raw: bytes, places: Sequence[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[begin:end] for begin, end in itertools.pairwise(ends)]


def packed(coding: str, bodies: Sequence[bytes]) -> bytes:
    if coding == "gzip":
        return b"".join(map(gzip.compress, bodies))
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS if coding == "deflate" else -zlib.MAX_WBITS)
    return packer.compress(b"".join(bodies)) + packer.flush()


bodies = st.lists(st.binary(max_size=300) | st.integers(0, 2 * SLICE).map(bytes), min_size=1, max_size=4)
places = st.lists(st.integers(0, 10_000), max_size=5)


@given(st.sampled_from(["gzip", "deflate", "raw deflate"]), bodies, places)
def test_it_is_the_body_however_it_was_cut(coding: str, bodies: list[bytes], places: list[int]) -> None:
    parts = cut(packed(coding, bodies), places)
    assert inflated(coding.split()[-1], parts) == b"".join(bodies)


@given(st.sampled_from(["gzip", "deflate", "raw deflate"]), bodies, places, st.integers(1, 10_000))
def test_what_was_cut_off_is_never_taken_for_all(
    coding: str, bodies: list[bytes], places: list[int], short: int
) -> None:
    raw = packed(coding, bodies[:1])
    raw = raw[: len(raw) - 1 - short % len(raw)]
    with pytest.raises(ApiError, match="was cut off") as caught:
        inflated(coding.split()[-1], cut(raw, places))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_body", "content-encoding")


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=500), places)
def test_any_bytes_are_a_body_or_a_400(coding: str, raw: bytes, places: list[int]) -> None:
    """Anything else that it raises fails the test."""
    with contextlib.suppress(ApiError):
        inflated(coding, cut(raw, places))


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_no_slice_is_larger_and_none_is_made_that_nobody_takes(coding: str) -> None:
    packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    bomb = packer.compress(bytes(64 * MIB)) + packer.flush()
    inflater = Inflater(coding)
    sizes = [len(one) for one in inflater.slices(bomb)]
    inflater.check_ended()
    assert (max(sizes), sum(sizes)) == (SLICE, 64 * MIB)
    slices = Inflater(coding).slices(bomb)
    assert len(next(slices)) == SLICE, "the first comes without the others"


@pytest.mark.parametrize(
    ("headers", "taken"),
    [([], False), ([""], False), (["identity"], False), ([" , identity,"], False), (["gzip"], True),
     (["X-GZIP "], True), (["deflate"], True), (["identity", "deflate"], True)],
)  # fmt: skip
def test_codings_that_are_taken(headers: list[str], taken: bool) -> None:
    assert (inflater_of(headers) is not None) is taken


@pytest.mark.parametrize("headers", [["br"], ["gzip", "gzip"], ["gzip, deflate"], ["gzip;q=1"], ["*"]])
def test_others_are_refused(headers: list[str]) -> None:
    with pytest.raises(ApiError, match="takes gzip or deflate, once, or is left out; not ") as caught:
        inflater_of(headers)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_content_encoding")
    assert caught.value.headers == {"Accept-Encoding": "gzip, deflate"}


def test_a_coding_that_is_no_text_is_named_so_that_it_can_be_told() -> None:
    """As a header comes whose bytes are no UTF-8."""
    with pytest.raises(ApiError, match="takes gzip or deflate") as refused:
        inflater_of([b"gz\xefip".decode(errors="surrogateescape")])
    assert str(refused.value).encode()
