"""What becomes of a trace that can not be read: never are its tokens kept."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.messages import Trace, Undecodable, decode, encode
from greenroom.fabric.log import Record
from greenroom.predictor.traces.counts import BadTrace
from greenroom.predictor.traces.dead_letters import dead_letter_of
from greenroom.predictor.traces.reading import trace_of
from tests.unit.predictor.worlds import trace

SECRET = b"\xde\xad\xbe\x0e"
TOLD = trace(np.zeros((3, 1, 1), int), 4, tokens=2 * SECRET)


def record_of(value: bytes | None) -> Record:
    return Record("traces", 0, 5, 0, b"k", value)


def test_a_trace_that_contradicts_itself_is_kept_without_its_tokens() -> None:
    letter = dead_letter_of(record_of(encode(TOLD)), BadTrace("8 bytes of tokens"))
    assert letter.reason == "8 bytes of tokens (its tokens are left out)"
    assert letter.payload is not None
    kept: Trace = decode(letter.payload, Trace)
    assert kept.tokens == b""
    assert (kept.rows, kept.experts, letter.offset, letter.key) == (3, TOLD.experts, 5, b"k")


@pytest.mark.parametrize("value", [None, b"\xc1", encode(trace(np.zeros((3, 1, 1), int), 4)), b"no tokens"[:4]])
def test_what_has_no_tokens_is_kept_as_it_came(value: bytes | None) -> None:
    letter = dead_letter_of(record_of(value), Undecodable("noise"))
    assert (letter.payload, letter.reason) == (value, "noise")


@pytest.mark.parametrize("value", [encode(TOLD)[:-1], b"\xff" + encode(TOLD), msgspec.msgpack.encode([TOLD])])
def test_what_can_not_be_taken_apart_and_may_have_tokens_is_left_out(value: bytes) -> None:
    letter = dead_letter_of(record_of(value), Undecodable("noise"))
    assert letter.payload is None
    assert letter.reason == f"noise (its {len(value)} bytes are left out, as some may be tokens)"


@pytest.mark.parametrize(
    "value",
    [
        b"\x81\xc4\x06tokens\xc4\x04" + SECRET,
        b"\x81\xa1x\x81\xa6tokens\xc4\x04" + SECRET,
        b"\x82\xa6tokens\xc4\x00\xc4\x06tokens\xc4\x04" + SECRET,
        b"\x82\x91\x81\xa1a\x01\x01\xa6tokens\xc4\x04" + SECRET,
    ],
    ids=["bytes as the name", "a map in the map", "both kinds of name", "a list as a name"],
)
def test_tokens_at_another_place_are_left_out_with_all_the_rest(value: bytes) -> None:
    letter = dead_letter_of(record_of(value), Undecodable("noise"))
    assert letter.payload is None
    assert letter.reason.endswith("bytes are left out, as some may be tokens)")


def test_a_field_that_comes_twice_is_left_out_twice() -> None:
    told = b"\xa6tokens\xc4\x04" + SECRET
    for value in (b"\x83" + told + b"\xa6tokens\xc4\x00\xa1x\x01", b"\x82\xa1x\x81" + told + b"\xa1x\x01"):
        letter = dead_letter_of(record_of(value), Undecodable("noise"))
        assert (letter.payload, letter.reason) == (b"\x81\xa1x\x01", "noise (its tokens are left out)")


@given(st.integers(0, len(encode(TOLD))), st.binary(max_size=4), st.integers(0, 4))
def test_wherever_a_trace_is_damaged_behind_the_word_its_tokens_are_not_kept(at: int, put: bytes, gone: int) -> None:
    whole = encode(TOLD)
    at = max(at, whole.index(b"tokens") + len(b"tokens"))
    value = whole[:at] + put + whole[at + gone :]
    letter = dead_letter_of(record_of(value), Undecodable("noise"))
    assert letter.payload is None or SECRET not in letter.payload


def test_a_wrong_type_of_tokens_is_no_trace_and_is_not_told() -> None:
    fields = msgspec.msgpack.decode(encode(TOLD)) | {"tokens": [4711, 4712]}
    with pytest.raises(Undecodable, match="tokens") as caught:
        trace_of(record_of(msgspec.msgpack.encode(fields)))
    letter = dead_letter_of(record_of(msgspec.msgpack.encode(fields)), caught.value)
    assert "4711" not in letter.reason
    assert letter.payload is not None
    assert "tokens" not in msgspec.msgpack.decode(letter.payload)
