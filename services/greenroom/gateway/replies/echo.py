"""The prompt, told before the answer (``echo``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from greenroom.core.generation import TokenLogprobs
from greenroom.gateway.replies.token_records import TokenRecord
from greenroom.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as text and tokens. ``offsets``: where each token's text begins in it, in characters."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of_text(cls, text: str, ids: Sequence[int], tokenizer: Tokenizer, *, add_special_tokens: bool) -> Echo:
        """Of a prompt that came as text. ``ids``: what ``Tokenizer.encode`` makes of it."""
        return cls(text, tuple(ids), tuple(tokenizer.offsets(text, add_special_tokens=add_special_tokens)))

    @classmethod
    def of_tokens(cls, ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
        """Of a prompt that came in tokens: their text is told. Special tokens have none."""
        detokenizer = tokenizer.detokenizer()
        parts: list[str] = []
        offsets = []
        length = 0
        for token_id in ids:
            offsets.append(length)
            parts.append(detokenizer.push(token_id))
            length += len(parts[-1])
        return cls("".join(parts) + detokenizer.flush(), tuple(ids), tuple(offsets))

    def records(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenRecord]:
        """``logprobs``: of all tokens but the first. Raises ValueError if there are more or less."""
        pairs = zip(self.ids, self.offsets, (None, *logprobs), strict=True)
        return [TokenRecord(token_id, offset, own) for token_id, offset, own in pairs]
