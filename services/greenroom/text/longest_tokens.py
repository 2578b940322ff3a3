"""How much text a token can stand for, so that a text which is far too long is refused without being encoded."""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers.pre_tokenizers import ByteLevel

_WHITESPACE = string.whitespace.encode() + b"\x1c\x1d\x1e\x1f"
_SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
"""Of normalizers: by how much a text gets shorter at most, in bytes of UTF-8."""
_KEEPS = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_DROPS_SPACES = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})
_LONGEST_CHARACTER = 4


class _Part(msgspec.Struct):
    """What tokenizer.json says of how a text is taken apart."""

    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    model: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class TokenReach:
    """``most_bytes``: of a text in UTF-8 that one token stands for. ``spaces_vanish``: whitespace may leave no token
    behind, so it does not count."""

    most_bytes: int
    spaces_vanish: bool

    def fewest_tokens(self, text: str) -> int:
        """As many tokens as ``text`` has at least. It costs a pass or two over the bytes."""
        if self.spaces_vanish:  # of other scripts' characters it is not told which are spaces, so none counts
            counted = len(text.encode("ascii", "ignore").translate(None, _WHITESPACE))
        else:
            counted = len(text.encode("utf-8", "surrogatepass"))
        return -(-counted // self.most_bytes)


def token_reach(file: bytes, vocabulary: Mapping[str, int], added: Collection[Any]) -> TokenReach | None:
    """Of the tokenizer that tokenizer.json (``file``) describes; None where a token may stand for any length.

    ``vocabulary``: all tokens; ``added``: those beside the model's own, as the library has them. Only what is known
    to keep every character is trusted; a tokenizer of unknown parts has no bound.
    """
    part = msgspec.json.decode(file, type=_Part)
    shrinks = 1
    for step in _flat(part.normalizer, "normalizers"):
        by = _shrinks(step)
        if by is None:
            return None
        shrinks *= by
    spaces_vanish = any(token.lstrip or token.rstrip for token in added)
    splitting = list(_flat(part.pre_tokenizer, "pretokenizers"))
    for step in splitting:
        kind = step.get("type")
        if kind in _DROPS_SPACES:
            spaces_vanish = True
        elif kind not in _KEEPS and (kind not in ("Split", "Punctuation") or step.get("behavior") == "Removed"):
            return None
    by_bytes = any(step.get("type") == "ByteLevel" for step in [*splitting, *_flat(part.normalizer, "normalizers")])
    if not _keeps_unknown(part.model, vocabulary, by_bytes=by_bytes):
        return None
    whole = {token.content for token in added}
    # A byte-level vocabulary writes each byte as one character.
    lengths = (len(token) if by_bytes and token not in whole else len(token.encode()) for token in vocabulary)
    return TokenReach(max(_LONGEST_CHARACTER, *lengths) * shrinks, spaces_vanish)


def _flat(step: Mapping[str, Any] | None, several: str) -> Iterable[Mapping[str, Any]]:
    if step is None:
        return
    if step.get("type") == "Sequence":
        for inner in step.get(several) or ():
            yield from _flat(inner, several)
    else:
        yield step


def _shrinks(step: Mapping[str, Any]) -> int | None:
    if step.get("type") != "Replace":
        return _SHRINKS.get(str(step.get("type")))
    pattern, content = step.get("pattern"), str(step.get("content") or "")
    if not isinstance(pattern, dict) or not isinstance(pattern.get("String"), str) or not content:
        return None
    return max(1, -(-len(pattern["String"].encode()) // len(content.encode())))


def _keeps_unknown(model: Mapping[str, Any], vocabulary: Mapping[str, int], *, by_bytes: bool) -> bool:
    """Whether each character leaves a token of its own behind where the vocabulary lacks it: not where it is dropped,
    or joined with its neighbours to one unknown token."""
    if model.get("type") not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    if model.get("type") != "BPE":
        return False
    if by_bytes:
        return all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    return model.get("unk_token") is not None and not model.get("fuse_unk")
