"""A checkpoint's tokenizer, as its tokenizer.json describes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from greenroom.core.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from greenroom.text.detokenize import ByteDetokenizer, Detokenizer, PieceDetokenizer, byte_of, bytes_of_symbols
from greenroom.text.files import TOKENIZER_FILE, TextFiles
from greenroom.text.longest_tokens import token_reach
from greenroom.text.model_text import text_files_of

_PER_TOKEN_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"})
_ANCHOR = re.compile("[A-Za-z0-9]")


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that decides how tokens become text."""

    decoder: dict[str, Any] | None = None


class Tokenizer:
    """Encodes as transformers does with the same folder; decodes whole or, by ``detokenizer``, token by token.

    Safe to use from several threads. What does not hold: ``clean_up_tokenization_spaces`` is not applied, since text
    that was sent can not be taken back.
    """

    def __init__(self, files: TextFiles, *, name: str) -> None:
        """``name`` says in errors where the files come from. Raises CorruptCheckpoint, UnsupportedModel."""
        try:
            self._backend: Any = tokenizers.Tokenizer.from_buffer(files.tokenizer)
            decoder = msgspec.json.decode(files.tokenizer, type=_TokenizerFile).decoder
        except (Exception, RecursionError) as error:  # the library raises bare Exception
            raise CorruptCheckpoint(f"{TOKENIZER_FILE} of {name} can not be read: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._add_missing(files)
        added: Mapping[int, Any] = self._backend.get_added_tokens_decoder()
        self._reach = token_reach(
            files.tokenizer, self._backend.get_vocab(with_added_tokens=True), tuple(added.values())
        )
        self._special = {token.content for token in added.values() if token.special}
        self._named = dict(files.named)
        self._steps = _flatten(decoder)
        self._by_bytes = [step.get("type") for step in self._steps] == ["ByteLevel"]
        self._has_byte_tokens = any(step.get("type") == "ByteFallback" for step in self._steps)
        if not self._by_bytes:
            _refuse_unless_local(self._steps, name)
        self._visible: dict[int, str | None] = {}
        self._pieces: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None if self._by_bytes else self._find_anchor(name)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of the checkpoint in ``folder``, or of a GGUF file. Raises CorruptCheckpoint,
        UnsupportedModel."""
        return cls(text_files_of(Path(folder)), name=str(folder))

    def _add_missing(self, files: TextFiles) -> None:
        """Tokens that only tokenizer_config.json knows, and special ones that tokenizer.json does not mark so."""
        known = {token.content: token for token in self._backend.get_added_tokens_decoder().values()}
        for token in files.added:
            flags = known.get(token.content, token)
            named = token.content in files.named.values()
            if token.content in known and (flags.special or not named):
                continue  # tokenizer.json says whether it is special, but for bos_token and its like, which always are
            made = tokenizers.AddedToken(
                token.content,
                single_word=flags.single_word,
                lstrip=flags.lstrip,
                rstrip=flags.rstrip,
                normalized=flags.normalized,
                special=token.special,
            )
            if token.special:
                self._backend.add_special_tokens([made])
            else:
                self._backend.add_tokens([made])

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """``bos_token``, ``eos_token`` and their like, those that the checkpoint has."""
        return self._named

    @property
    def vocab_size(self) -> int:
        """Added tokens included; the model's own embedding may be larger or, for odd checkpoints, smaller."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; with ``add_special_tokens`` those that the tokenizer's post-processor puts around
        it (such as a leading BOS). Special tokens written in the text are taken as such, as by transformers.

        Other threads run meanwhile: by the library's ``encode`` they would not, for seconds at a large text. Raises
        InvalidRequest for text that is no valid Unicode.
        """
        try:
            [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded.ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text has half a surrogate pair in it, so it is not valid Unicode") from error

    def offsets(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Where each token of ``encode`` begins in ``text``, in characters; they ascend.

        What a token leaves out, such as the space before it, belongs to it. Tokens of parts of one character begin with
        it. A token that the post-processor adds begins where the one before it ends.
        """
        [encoded] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        found: list[int] = []
        end = 0
        for (start, stop), added in zip(encoded.offsets, encoded.special_tokens_mask, strict=True):
            found.append(end if added else max(min(start, end), found[-1] if found else 0))
            end = end if added else max(stop, end)
        return found

    def fewest_tokens(self, text: str) -> int:
        """As many tokens as ``text`` has at least, found in about a millisecond a megabyte. 0 where the tokenizer is of
        a kind in which a token may stand for any length."""
        return 0 if self._reach is None else self._reach.fewest_tokens(text)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ``ids`` as a whole. Special tokens are left out, or with ``special`` written by their names. Ids
        that no token has are left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=not special))

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary writes it, empty for an id that no token has."""
        return str(self._backend.id_to_token(token_id) or "")

    def token_id(self, token: str) -> int | None:
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def visible_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for a special token and for an id that no token has."""
        try:
            return self._visible[token_id]
        except KeyError:
            token = self._backend.id_to_token(token_id)
            if token is not None and token not in self._special:
                self._visible[token_id] = token
                return str(token)
            if token is not None:
                self._visible[token_id] = None
            return None

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds inside a text, in UTF-8: may be part of a character. A special token's is its name;
        an id that no token has gives none."""
        token = self.visible_token(token_id)
        if token is None:
            return str(self._backend.id_to_token(token_id) or "").encode()
        if self._by_bytes:
            return bytes_of_symbols(token)
        if self._has_byte_tokens and (byte := byte_of(token)) is not None:
            return bytes([byte])
        return self.piece(token_id).encode()

    def piece(self, token_id: int) -> str:
        """The text of one token that follows other text (so a word keeps the space before it)."""
        try:
            return self._pieces[token_id]
        except KeyError:
            text = self.decode_behind([token_id])
            self._pieces[token_id] = text
            return text

    def decode_behind(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` where other text stands before them."""
        if self._anchor is None:
            return self.decode(ids)
        anchor, text = self._anchor
        return self.decode([anchor, *ids])[len(text) :]

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte, to be joined with its neighbours into characters."""
        token = self.visible_token(token_id) if self._has_byte_tokens else None
        return token is not None and byte_of(token) is not None

    def detokenizer(self, *, behind_text: bool = False) -> Detokenizer:
        """Text token by token. ``behind_text``: it continues a text, so the first word keeps the space before it."""
        if self._by_bytes:
            return ByteDetokenizer(self)
        return PieceDetokenizer(self, behind_text=behind_text)

    def _find_anchor(self, name: str) -> tuple[int, str]:
        """A token of plain letters, so that what follows it decodes as inside a text."""
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=False)):
            token = self.visible_token(token_id)
            if token is None or not _ANCHOR.search(token) or byte_of(token) is not None:
                continue
            text = self.decode([token_id])
            if text and text.isascii() and self.decode([token_id, token_id]).startswith(text):
                return token_id, text
        raise UnsupportedModel(f"{TOKENIZER_FILE} of {name} has no token of plain letters")


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", ()) for step in _flatten(inner)]
    return [decoder]


def _refuse_unless_local(steps: Iterable[Mapping[str, Any]], name: str) -> None:
    """Text can be given out token by token only if what a token becomes depends on nothing that comes later."""
    fused = False
    for step in steps:
        kind = step.get("type")
        local = kind in _PER_TOKEN_DECODERS
        if kind == "Strip":
            local = step.get("stop") == 0
        elif fused:
            pattern = step.get("pattern")
            local = kind == "Fuse" or (
                kind == "Replace" and isinstance(pattern, dict) and len(pattern.get("String", "")) == 1
            )
        if not local:
            raise UnsupportedModel(
                f"{TOKENIZER_FILE} of {name}: its decoder {kind} can not be applied token by token; known: ByteLevel, "
                f"or a sequence of {', '.join(sorted(_PER_TOKEN_DECODERS))}"
            )
        fused = fused or kind == "Fuse"
