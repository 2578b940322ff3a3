"""Tokenizers out of GGUF files: the ids of the tokenizers that they were made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from greenroom.core.generation import SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.gguf.shards import read_gguf
from greenroom.text import TextProcessor, Tokenizer
from greenroom.text.digest import text_digest
from greenroom.text.gguf_tokenizer import end_token_ids
from greenroom.text.sampling_defaults import SamplingDefaults, read_sampling_defaults
from tests import small_tokenizers

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
checkpoints = pytest.importorskip("tests.gguf_checkpoints")

TEXTS = [
    "",
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, tabs\t\tand\n\n lines \n",
    "naïve café — 日本語 Привет 😀",
    "def f(x): return x**2 + 1234567890 # it's I'll we've",
    "<s> hello <|im_start|>user\nSTOP<|im_end|> <tool>日本 x</tool>",
    "e\u0301 is é in two",
]


def written(path: Path, keys: Mapping[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in keys.items():
        checkpoints.add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_folder(folder: Path, path: Path, pre: str, **more: Any) -> Path:
    keys = checkpoints.tokenizer_keys(folder, pre) | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    return written(path, {key: value for key, value in keys.items() if value is not None})


def split_like(folder: Path, kind: str) -> Path:
    """A byte-level tokenizer that splits as checkpoints of that kind say themselves."""
    made = json.loads(small_tokenizers.byte_level().to_str())
    numbers = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}[kind]
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    made["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    }
    if kind == "qwen2":
        made["normalizer"] = {"type": "NFC"}
    if kind == "llama-bpe":
        made["model"]["ignore_merges"] = True
    return small_tokenizers.write_chat(folder, tokenizers.Tokenizer.from_str(json.dumps(made)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """By how text is split: the tokenizer of a file, and that of the folder that it was made from."""
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {
        "smollm": bundled_model_path(),
        "gpt-2": small_tokenizers.write_chat(root / "gpt-2"),
        "qwen2": split_like(root / "qwen2", "qwen2"),
        "llama-bpe": split_like(root / "llama", "llama-bpe"),
    }
    return {
        pre: (
            Tokenizer.from_folder(of_folder(folder, root / f"{pre}.gguf", pre, add_bos_token=False)),
            Tokenizer.from_folder(folder),
        )
        for pre, folder in folders.items()
    }


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)), special=st.booleans())
def test_ids_are_those_of_the_tokenizer_that_it_was_made_from(
    pairs: dict[str, tuple[Tokenizer, Tokenizer]], text: str, special: bool
) -> None:
    for pre, (ours, original) in pairs.items():
        ids = original.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids, pre
        assert ours.decode(ids) == original.decode(ids), pre


def test_every_token_is_the_same(pairs: dict[str, tuple[Tokenizer, Tokenizer]]) -> None:
    for pre, (ours, original) in pairs.items():
        assert ours.vocab_size == original.vocab_size
        assert ours.named_tokens == original.named_tokens
        for token in range(original.vocab_size):
            assert ours.token_string(token) == original.token_string(token)
            assert ours.visible_token(token) == original.visible_token(token), pre
            assert ours.token_bytes(token) == original.token_bytes(token)
            assert ours.fewest_tokens("x" * 999) == original.fewest_tokens("x" * 999)


def sentence_pieces(**more: Any) -> tuple[dict[str, Any], tokenizers.Tokenizer]:
    """Keys of a vocabulary with scores, and the tokenizer that checkpoints of this kind ship."""
    original = small_tokenizers.byte_fallback()
    whole = json.loads(original.to_str())
    vocabulary = original.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    special = {one["content"] for one in whole["added_tokens"]}
    scores = [0.0 if token in special or token.startswith("<0x") else -float(n) for n, token in enumerate(tokens)]
    kinds = [
        gguf.TokenType.UNKNOWN if token == "<unk>"
        else gguf.TokenType.CONTROL if token in special
        else gguf.TokenType.BYTE if token.startswith("<0x")
        else gguf.TokenType.NORMAL
        for token in tokens
    ]  # fmt: skip
    keys = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": [int(kind) for kind in kinds],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **more,
    }  # fmt: skip
    from transformers.tokenization_utils_base import generate_merges

    by_score = dict(zip(tokens, scores, strict=True))
    whole["model"]["merges"] = generate_merges(vocabulary, by_score)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, tokenizers.Tokenizer.from_str(
        json.dumps(whole)
    )


def test_sentence_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    keys, original = sentence_pieces()
    ours = Tokenizer.from_folder(written(tmp_path / "a.gguf", keys))
    for text in TEXTS:
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == original.decode(ids)
    assert ours.encode("x", add_special_tokens=True)[0] == 1, "a text begins with <s> where the file does not say"
    keys, _ = sentence_pieces(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    bare = Tokenizer.from_folder(written(tmp_path / "b.gguf", keys))
    ids = bare.encode("fox", add_special_tokens=True)
    assert ids[0] != 1
    assert ids[-1] == 2
    assert bare.decode(bare.encode("the fox", add_special_tokens=False)) == "the fox"


def test_what_is_put_around_a_text(tmp_path: Path) -> None:
    folder = small_tokenizers.write_chat(tmp_path / "folder")
    llama = Tokenizer.from_folder(of_folder(folder, tmp_path / "a.gguf", "llama-bpe"))
    assert llama.token_string(llama.encode("x", add_special_tokens=True)[0]) == "<s>", "as llama.cpp does for it"
    both = Tokenizer.from_folder(
        of_folder(folder, tmp_path / "b.gguf", "gpt-2", add_bos_token=True, add_eos_token=True)
    )
    assert [both.token_string(one) for one in both.encode("x", add_special_tokens=True)] == ["<s>", "x", "<|im_end|>"]


def test_chat_templates_sampling_and_ends(tmp_path: Path) -> None:
    folder = small_tokenizers.write_chat(tmp_path / "folder")
    keys = checkpoints.tokenizer_keys(folder, "gpt-2") | {
        "tokenizer.chat_template.tool_use": "{{ 1 }}",
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.eom_token_id": 4,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": -1,
        "general.sampling.top_p": 0.95,
    }
    path = written(tmp_path / "a.gguf", keys)
    ours, original = TextProcessor.from_folder(path), TextProcessor.from_folder(folder)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.chat.render(messages) == original.chat.render(messages)
    assert ours.sampling_defaults() == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=0)
    SamplingParams(**ours.sampling_defaults().said())
    assert end_token_ids(read_gguf(path).metadata) == (4, 3)
    assert read_sampling_defaults(written(tmp_path / "none.gguf", {})) == SamplingDefaults()
    with pytest.raises(CorruptCheckpoint, match=r"temp.*--generation-config none"):
        read_sampling_defaults(written(tmp_path / "bad.gguf", {"general.sampling.temp": -3.0}))


def test_without_a_template_chat_says_what_to_do(tmp_path: Path) -> None:
    folder = small_tokenizers.write_chat(tmp_path / "folder")
    keys = checkpoints.tokenizer_keys(folder, "gpt-2")
    del keys["tokenizer.chat_template"]
    text = TextProcessor.from_folder(written(tmp_path / "a.gguf", keys))
    with pytest.raises(
        InvalidRequest, match=r"completions, or serve a GGUF file that has one, as tokenizer\.chat_temp"
    ):
        _ = text.chat


def test_control_tokens_that_end_an_answer_by_their_spelling(tmp_path: Path) -> None:
    """gpt-oss's file names the first of these; its folder says the first three."""
    tokens = ["a", "<|return|>", "<|call|>", "<|endoftext|>", "<|end|>", "<|im_end|>"]
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [normal, *[control] * 4, normal]}
    named = written(tmp_path / "a.gguf", keys | {"tokenizer.ggml.eos_token_id": 3})
    assert end_token_ids(read_gguf(named).metadata) == (3, 1, 2)
    assert end_token_ids(read_gguf(written(tmp_path / "b.gguf", keys)).metadata) == (1, 2, 3)
    assert end_token_ids(read_gguf(written(tmp_path / "c.gguf", {})).metadata) == ()


def test_the_digest_follows_what_text_becomes(tmp_path: Path) -> None:
    folder = small_tokenizers.write_chat(tmp_path / "folder")
    one = text_digest(of_folder(folder, tmp_path / "a.gguf", "gpt-2"))
    assert one == text_digest(of_folder(folder, tmp_path / "b.gguf", "gpt-2", eot_token_id=3)), "not of the tokenizer"
    assert one != text_digest(of_folder(folder, tmp_path / "c.gguf", "smollm"))


def test_a_kind_that_is_not_known_is_refused_or_comes_from_beside_the_file(tmp_path: Path) -> None:
    folder = small_tokenizers.write_chat(tmp_path / "folder")
    unknown = of_folder(folder, tmp_path / "a.gguf", "teletype")
    with pytest.raises(UnsupportedModel, match=r"'teletype'; known: gpt-2.*put the tokenizer.json"):
        Tokenizer.from_folder(unknown)
    without = written(tmp_path / "b.gguf", {"tokenizer.ggml.model": "no_vocab"})
    with pytest.raises(UnsupportedModel, match=r"'no_vocab'; known: gpt2, llama; put the tokenizer.json"):
        Tokenizer.from_folder(without)
    beside = written(folder / "c.gguf", {"tokenizer.ggml.model": "no_vocab"})
    assert TextProcessor.from_folder(beside).has_chat
    assert Tokenizer.from_folder(beside).encode("fox", add_special_tokens=True) == Tokenizer.from_folder(folder).encode(
        "fox", add_special_tokens=True
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "has no tokenizer.ggml.tokens"),
    "fewer kinds than tokens": ({"token_type": [1, 1]}, "token_type"),
    "a kind that is none": ({"token_type": "all 9"}, "token_type"),
    "two tokens of one spelling": ({"tokens": "doubled"}, "same spelling"),
    "tokens that are numbers": ({"tokens": [1, 2, 3]}, "tokens .* list of texts"),
    "an end beyond the vocabulary": ({"eos_token_id": 10**6}, "eos_token_id"),
    "merges of what is no token": ({"merges": ["x y zz"]}, "makes no token"),
    "a merge of one": ({"merges": ["x"]}, "makes no token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_vocabulary_that_contradicts_itself_is_refused_by_key(tmp_path: Path, case: str) -> None:
    changes, match = WRONG[case]
    folder = small_tokenizers.write_chat(tmp_path / "folder")
    tokens = checkpoints.tokenizer_keys(folder, "gpt-2")["tokenizer.ggml.tokens"]
    changes = {
        key: [9] * len(tokens) if value == "all 9" else [*tokens[:-1], tokens[0]] if value == "doubled" else value
        for key, value in changes.items()
    }
    path = of_folder(folder, tmp_path / "bad.gguf", "gpt-2", **changes)
    with pytest.raises(CorruptCheckpoint, match=match) as raised:
        Tokenizer.from_folder(path)
    assert "bad.gguf" in str(raised.value)


def test_a_huge_token_is_not_taken_apart(tmp_path: Path) -> None:
    keys, _ = sentence_pieces()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"][:-1], "x" * 1_000_000]
    with pytest.raises(CorruptCheckpoint, match="1000000 characters"):
        Tokenizer.from_folder(written(tmp_path / "bad.gguf", keys))
