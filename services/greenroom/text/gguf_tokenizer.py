"""The tokenizer and the chat templates of a GGUF file, as ``tokenizer.json`` would describe them.

A file has a vocabulary, the kind of each token, and merges or scores; the rest is by its *model* and the name that it
has for how text is split (``tokenizer.ggml.pre``), as llama.cpp knows them:

- ``gpt2``: byte-level BPE, split by a regular expression (``_SPLITS``), with the merges of the file.
- ``llama``: SentencePiece's BPE, a space in the place of each blank and single bytes for what the vocabulary lacks. The
  merges are those that make a token of the vocabulary of two others, by score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.gguf.metadata import Metadata
from greenroom.gguf.shards import read_gguf
from greenroom.text.files import TOKENIZER_FILE, AddedToken, TextFiles, read_text_files

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KINDS: Final = range(_NORMAL, _BYTE + 1)
_NAMED: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # sic
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_ENDS: Final = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>")
)
"""Control tokens that end an answer whether the file names them or not, as they do in llama.cpp. A file has room for
three of them, and gpt-oss's names one: by `<|call|>` it ends where it calls a tool."""
_MOST_MERGED: Final = 512
"""Characters of a token whose merges are sought; those of real vocabularies are far shorter."""

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTES, "use_regex": False}]}


_QWEN: Final = {"pre_tokenizer": _split_by(_WORDS % ""), "normalizer": {"type": "NFC"}}
_LLAMA_3: Final = {"pre_tokenizer": _split_by(_WORDS % "{1,3}"), "ignore_merges": True, "add_bos": True}
_GPT_2: Final[dict[str, Any]] = {"pre_tokenizer": _BYTES}
_OLMO: Final = {**_GPT_2, "normalizer": {"type": "NFC"}}
_GPT_4O: Final = {"pre_tokenizer": _split_by(_CASED)}
_SINGLE_DIGITS: Final = {
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]}
}
# llama.cpp does not normalise; where the checkpoints of a kind do, so is it done here.
_SPLITS: Final[dict[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT_2),
    "olmo": _OLMO,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA_3),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
}


def gguf_text_files(path: Path) -> TextFiles:
    """Of the file ``path``, or what lies beside it as a ``tokenizer.json`` where it has no tokenizer, or one of a kind
    that is not known. Raises UnsupportedModel and CorruptCheckpoint, naming the key."""
    metadata = read_gguf(path).metadata
    templates = _templates(metadata)
    try:
        return _text_files(metadata, templates)
    except UnsupportedModel as error:
        if not (path.parent / TOKENIZER_FILE).exists():
            raise UnsupportedModel(
                f"{error}; put the {TOKENIZER_FILE} of the model that it was made from beside the file"
            ) from error
    beside = read_text_files(path.parent)
    return replace(beside, templates=templates or beside.templates)


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """The tokens that end an answer: of the text, of a turn and of a message, those that the file names first. May be
    empty."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [metadata.count(f"tokenizer.ggml.{key}", None, least=0) for key in keys]
    kinds = metadata.numbers("tokenizer.ggml.token_type", [])
    spelled = [
        number
        for number, (token, kind) in enumerate(zip(metadata.texts("tokenizer.ggml.tokens", []), kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    ]
    return tuple(dict.fromkeys(one for one in (*named, *spelled) if one is not None))


def _text_files(metadata: Metadata, templates: Mapping[str, str]) -> TextFiles:
    model = metadata.text("tokenizer.ggml.model", "none")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(f"the tokenizer of {metadata.path} is {model!r}; known: gpt2, llama")
    vocabulary = _Vocabulary(metadata)
    named = {name: token for name in _NAMED if (token := vocabulary.named(metadata, name)) is not None}
    for token in named.values():  # whatever their kind
        vocabulary.added.setdefault(vocabulary.ids[token], AddedToken(token))
    parts, add_bos = _byte_level(metadata, vocabulary) if model == "gpt2" else _sentence_pieces(metadata, vocabulary)
    around = [
        metadata.flag("tokenizer.ggml.add_bos_token", add_bos),
        metadata.flag("tokenizer.ggml.add_eos_token", False),
    ]
    first, last = (
        named.get(name) if wanted else None for wanted, name in zip(around, ("bos_token", "eos_token"), strict=True)
    )
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, **asdict(token)} for number, token in sorted(vocabulary.added.items())],
        "post_processor": _around(first, last, vocabulary.ids),
        **parts,
    }
    return TextFiles(msgspec.json.encode(whole), named, tuple(vocabulary.added.values()), templates)


class _Vocabulary:
    """``ids``: of the tokens that text can become, by their spelling. ``added``: those that are matched as a whole."""

    def __init__(self, metadata: Metadata) -> None:
        key = "tokenizer.ggml.tokens"
        self.tokens: Sequence[str] = metadata.texts(key)
        kinds = metadata.numbers("tokenizer.ggml.token_type", [_NORMAL] * len(self.tokens))
        if len(kinds) != len(self.tokens) or not all(kind in _KINDS for kind in kinds):
            raise metadata.wrong("tokenizer.ggml.token_type", f"one of {_NORMAL} to {_BYTE} for each of {key}")
        self.ids = {token: number for number, token in enumerate(self.tokens) if kinds[number] != _UNUSED}
        if len(self.ids) != sum(kind != _UNUSED for kind in kinds):
            raise CorruptCheckpoint(f"{key} in {metadata.path} has tokens of the same spelling")
        self.added = {
            number: AddedToken(token, special=kinds[number] != _USER_DEFINED)
            for number, token in enumerate(self.tokens)
            if kinds[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        }

    def named(self, metadata: Metadata, name: str) -> str | None:
        """The token that the file says is ``bos_token`` or its like. None for one that is only there to fill up, too.
        Raises CorruptCheckpoint."""
        key = f"tokenizer.ggml.{_NAMED[name]}"
        number = metadata.count(key, None, least=0)
        if number is None:
            return None
        if number >= len(self.tokens):
            raise metadata.wrong(key, f"one of the {len(self.tokens)} tokens")
        return self.tokens[number] if self.tokens[number] in self.ids else None


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    split = metadata.text("tokenizer.ggml.pre", None)
    if split not in _SPLITS:
        said = "does not say how it splits text (tokenizer.ggml.pre)" if split is None else f"splits text by {split!r}"
        raise UnsupportedModel(f"the tokenizer of {metadata.path} {said}; known: {', '.join(_SPLITS)}")
    by = _SPLITS[split]
    merges = []
    for merge in metadata.texts("tokenizer.ggml.merges", []):
        blank = merge.find(" ", 1)  # a token may begin with one
        left, right = merge[:blank], merge[blank + 1 :]
        if blank < 0 or not {left, right, left + right} <= vocabulary.ids.keys():
            raise CorruptCheckpoint(f"tokenizer.ggml.merges in {metadata.path} has {merge!r:.80}: it makes no token")
        merges.append((left, right))
    parts = {
        "normalizer": by.get("normalizer"),
        "pre_tokenizer": by["pre_tokenizer"],
        "decoder": {**_BYTES, "add_prefix_space": True},
        "model": _bpe(vocabulary, merges, ignore_merges=by.get("ignore_merges", False)),
    }
    return parts, by.get("add_bos", False)


def _sentence_pieces(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise metadata.wrong("tokenizer.ggml.scores", "one for each of tokenizer.ggml.tokens")
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.named(metadata, "unk_token")
    merges = list(_merges_by_score(vocabulary.ids, scores, metadata))
    parts = {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), blanks],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**_bpe(vocabulary, merges), "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }
    return parts, True


def _merges_by_score(ids: Mapping[str, int], scores: Sequence[float], metadata: Metadata) -> Iterator[tuple[str, str]]:
    """Each way in which a token is made of two others, best first: as transformers makes merges of SentencePiece's
    scores."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, number in ids.items():
        if len(token) > _MOST_MERGED:
            raise CorruptCheckpoint(f"tokenizer.ggml.tokens in {metadata.path} has one of {len(token)} characters")
        ways = [(token[:at], token[at:]) for at in range(1, len(token))]
        ways = sorted(
            (pair for pair in ways if pair[0] in ids and pair[1] in ids), key=lambda pair: (ids[pair[0]], ids[pair[1]])
        )
        found += [(scores[number], len(left), len(right), left, right) for left, right in ways]
    found.sort(key=lambda one: one[:3], reverse=True)
    for *_, left, right in found:
        yield left, right


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], *, ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _around(first: str | None, last: str | None, ids: Mapping[str, int]) -> dict[str, Any] | None:
    """What puts tokens before and behind a text."""
    if first is None and last is None:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts = [{"SpecialToken": {"id": token, "type_id": type_id}} if token else None for token in (first, last)]
        return [part for part in (parts[0], {"Sequence": {"id": sequence, "type_id": type_id}}, parts[1]) if part]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (first, last) if token is not None
        },
    }


def _templates(metadata: Metadata) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {} if key not in metadata else {"default": metadata.text(key)}
    return found | {
        name.removeprefix(f"{key}."): metadata.text(name) for name in metadata if name.startswith(f"{key}.")
    }
