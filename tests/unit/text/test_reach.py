"""How many tokens a text has at least, told without encoding it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from greenroom.demo import bundled_model_path
from greenroom.text import Tokenizer
from tests import small_tokenizers
from tests.examples import examples

BOUNDED = ("byte_level", "byte_fallback", "strips_two")
TRICKY = st.text(
    alphabet=st.one_of(st.sampled_from(list(" \n\t\u3000aé日😀\u0301ᄀ\u1161KÅ<s>_")), st.characters(codec="utf-8"))
)


def _tokenizer(folder: Path, kind: str) -> Tokenizer:
    if kind == "bundled":
        return Tokenizer.from_folder(bundled_model_path())
    made = small_tokenizers.ALL[kind.split("+")[0]]()
    if "strips" in kind.split("+"):
        made.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True)])
    if "nfkc" in kind.split("+"):
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    if "words" in kind.split("+"):
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return Tokenizer.from_folder(small_tokenizers.write(folder / kind, made))


KINDS = (*BOUNDED, "bundled", "byte_level+strips", "byte_level+nfkc", "byte_level+words")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("reach")
    return {kind: _tokenizer(folder, kind) for kind in (*KINDS, *small_tokenizers.ALL)}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40), deadline=None)
@given(text=TRICKY)
def test_a_text_never_has_fewer_tokens_than_is_told(kind: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    for tried in (text, text * 20, "<|user|>" + text + " " * 50, " " * 40 + text):
        assert tokenizer.fewest_tokens(tried) <= len(tokenizer.encode(tried, add_special_tokens=False))


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_long_text_a_useful_number_is_told(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 1000
    found = tokenizers[kind].fewest_tokens(text)
    assert len(tokenizers[kind].encode(text, add_special_tokens=False)) / 100 < found


@pytest.mark.parametrize("kind", sorted(set(small_tokenizers.ALL) - set(BOUNDED)))
def test_where_a_token_may_stand_for_any_length_nothing_is_told(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers[kind].fewest_tokens("x" * 100_000) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x+"}, "content": "x"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "x"}, "content": ""}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": "x"},
                "behavior": "Removed",
                "invert": False,
            }
        },
    ],
)
def test_what_drops_characters_leaves_no_bound(change: dict[str, Any], tmp_path: Path) -> None:
    folder = small_tokenizers.write(tmp_path, small_tokenizers.byte_level())
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert Tokenizer.from_folder(folder).fewest_tokens("x" * 100_000) == 0
