"""From tokens to text as they come, never half a character.

Whatever the tokens, the parts joined are what the tokenizer's decoder makes of all of them at once. Two kinds of
decoder need two ways: a byte-level one concatenates bytes, the others map each token by itself, except that the first
may lose its leading space and that a run of byte tokens is valid or invalid as a whole.
"""

from __future__ import annotations

import codecs
import re
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


def _byte_symbols() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a visible character: printable Latin-1 as itself, the rest from
    U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return symbols | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_SYMBOLS = _byte_symbols()


def bytes_of_symbols(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for; a token that is not all written so is itself."""
    try:
        return bytes(_SYMBOLS[symbol] for symbol in token)
    except KeyError:
        return token.encode()


def byte_of(token: str) -> int | None:
    """The byte that ``<0x0A>`` and its like stand for, None for other tokens."""
    match = _BYTE_TOKEN.fullmatch(token)
    return None if match is None else int(match[1], 16)


class _Vocabulary(Protocol):
    def visible_token(self, token_id: int) -> str | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_byte(self, token_id: int) -> bool: ...
    def piece(self, token_id: int) -> str: ...
    def decode(self, ids: list[int]) -> str: ...
    def decode_behind(self, ids: list[int]) -> str: ...


class Detokenizer(Protocol):
    """Text of one sequence of tokens. All parts joined, ``flush`` included, equal the decoding of the whole."""

    @property
    def pending(self) -> str:
        """What ``flush`` would give now, as far as it is whole characters; a later token may still change it."""
        ...

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often empty, never half a character."""
        ...

    def flush(self) -> str:
        """The rest, once no token follows: a half character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: the text is the tokens' bytes, decoded with replacement of what is invalid."""

    pending = ""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._vocabulary.visible_token(token_id) is None:
            return ""
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """For the others. Held back: tokens until the first that shows (only there a leading space is dropped), and a
    run of byte tokens until it ends, since one invalid byte turns all of the run into U+FFFD."""

    def __init__(self, vocabulary: _Vocabulary, *, behind_text: bool) -> None:
        self._vocabulary = vocabulary
        self._begun = behind_text
        self._held: list[int] = []

    @property
    def pending(self) -> str:
        run = b"".join(self._vocabulary.token_bytes(held) for held in self._held if self._vocabulary.is_byte(held))
        try:
            run.decode()
        except UnicodeDecodeError:
            return ""
        return self._decode_held() if run else ""

    def push(self, token_id: int) -> str:
        if self._vocabulary.visible_token(token_id) is None:
            return ""
        if self._vocabulary.is_byte(token_id):
            self._held.append(token_id)
            return ""
        if self._begun and not self._held:
            return self._vocabulary.piece(token_id)
        self._held.append(token_id)
        text = self._decode_held()
        if text:
            self._begun = True
        if self._begun:
            self._held.clear()
        return text

    def flush(self) -> str:
        text = self._decode_held() if self._held else ""
        self._held.clear()
        self._begun = self._begun or bool(text)
        return text

    def _decode_held(self) -> str:
        decode = self._vocabulary.decode_behind if self._begun else self._vocabulary.decode
        return decode(self._held)
