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
    def of(cls, words: str | None, ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
        """``words``: the prompt as it was sent; None: it came in tokens, whose text is told."""
        detokenizer = tokenizer.detokenizer()
        parts: list[str] = []
        offsets = []
        length = 0
        for token_id in ids:
            offsets.append(length)
            parts.append(detokenizer.push(token_id))
            length += len(parts[-1])
            if words is not None and tokenizer.visible_token(token_id) is None:
                name = tokenizer.token_string(token_id)  # a special token, which has no text unless it was written out
                length += len(name) if words.startswith(name, length) else 0
        text = "".join(parts) + detokenizer.flush() if words is None else words
        # Some tokenizers change a text before they cut it. Their tokens' text may be longer than what was sent.
        return cls(text, tuple(ids), tuple(min(offset, len(text)) for offset in offsets))

    def records(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenRecord]:
        """``logprobs``: of all tokens but the first. Raises ValueError if there are more or less."""
        pairs = zip(self.ids, self.offsets, (None, *logprobs), strict=True)
        return [TokenRecord(token_id, offset, own) for token_id, offset, own in pairs]
