"""Text token by token equals the decoding of the whole, for any tokens of any kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from greenroom.core.errors import UnsupportedModel
from greenroom.text import Tokenizer
from tests import small_tokenizers
from tests.examples import examples
from tests.unit.text.loaded import load


@pytest.fixture(params=sorted(small_tokenizers.ALL), scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param)


def pushed(tokenizer: Tokenizer, ids: list[int], *, behind_text: bool = False) -> list[str]:
    stream = tokenizer.detokenizer(behind_text=behind_text)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_any_tokens_behind_a_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    before = tokenizer.encode("hello the a", add_special_tokens=False)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    whole = tokenizer.decode(before + ids)
    assert tokenizer.decode(before) + "".join(pushed(tokenizer, ids, behind_text=True)) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=examples(300), deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_whole_and_without_half_characters(kind: str, text: str) -> None:
    tokenizer = load(kind)
    assume("\ufffd" not in text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pushed(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(parts)


def bytes_as_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """The tokens of single bytes, for byte fallback."""
    found = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in raw]
    assert None not in found
    return [token_id for token_id in found if token_id is not None]


@settings(max_examples=examples(500), deadline=None)
@given(raw=st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=3).map(str.encode)), max_size=6))
def test_any_runs_of_byte_tokens(raw: list[bytes]) -> None:
    tokenizer = load("byte_fallback")
    word = tokenizer.token_id("▁h")
    assert word is not None
    ids = [token_id for part in raw for token_id in [*bytes_as_ids(tokenizer, part), word]][:-1]
    assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=examples(500), deadline=None)
@given(raw=st.binary(max_size=12))
def test_any_bytes_of_a_byte_level_vocabulary(raw: bytes) -> None:
    tokenizer = load("byte_level")
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    ids = [by_bytes[bytes([byte])] for byte in raw]
    parts = pushed(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == raw.decode("utf-8", "replace")


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = load("byte_level")
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    parts = pushed(tokenizer, [by_bytes[bytes([byte])] for byte in "é😀".encode()])
    assert parts == ["", "é", "", "", "", "😀", ""]


def test_the_prefix_space_is_dropped_at_the_beginning_only() -> None:
    tokenizer = load("byte_fallback")
    word = tokenizer.token_id("▁h")
    assert word is not None
    assert pushed(tokenizer, [word, word]) == ["h", " h", ""]
    assert pushed(tokenizer, [word, word], behind_text=True) == [" h", " h", ""]


def test_tokens_that_show_nothing_yet_are_remembered() -> None:
    tokenizer = load("strips_two")
    space, word = tokenizer.token_id("▁"), tokenizer.token_id("▁h")
    assert space is not None
    assert word is not None
    assert pushed(tokenizer, [space, word, word]) == ["", "h", " h", ""]


def test_pending_is_what_flush_would_give_and_changes_nothing() -> None:
    tokenizer = load("byte_fallback")
    stream = tokenizer.detokenizer()
    first, second, third = bytes_as_ids(tokenizer, "中".encode())
    assert [stream.push(first), stream.pending] == ["", ""]
    assert [stream.push(second), stream.pending] == ["", ""]
    assert [stream.push(third), stream.pending] == ["", "中"]
    assert [stream.push(first), stream.pending] == ["", ""]
    assert stream.flush() == "\ufffd" * 4


def test_special_tokens_are_left_out_and_do_not_end_a_run_of_bytes() -> None:
    tokenizer = load("byte_fallback")
    first, *rest = bytes_as_ids(tokenizer, "é".encode())
    special = tokenizer.token_id("<|im_end|>")
    assert special is not None
    assert "".join(pushed(tokenizer, [special, first, special, *rest, special])) == "é"


def test_bytes_of_tokens() -> None:
    level, fallback = load("byte_level"), load("byte_fallback")
    special = level.token_id("<|im_end|>")
    assert special is not None
    assert level.token_bytes(special) == b"<|im_end|>"
    assert level.token_bytes(10**6) == b""
    assert [fallback.token_bytes(token_id) for token_id in bytes_as_ids(fallback, b"\xe4")] == [b"\xe4"]
    word = fallback.token_id("▁h")
    assert word is not None
    assert fallback.token_bytes(word) == b" h"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Strip(" ", 0, 1),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
    ],
)
def test_decoders_that_look_ahead_are_refused_by_name(tmp_path: Path, decoder: decoders.Decoder) -> None:
    tokenizer = small_tokenizers.byte_fallback()
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedModel, match=r"decoder (CTC|BPEDecoder|Strip|Replace) .* known: ByteLevel"):
        Tokenizer.from_folder(small_tokenizers.write(tmp_path, tokenizer))
