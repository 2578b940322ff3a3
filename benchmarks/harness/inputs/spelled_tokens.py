"""Token ids as text and back, for programs that take text only.

Token 17 is spelled ``<17>``. A GGUF file with this vocabulary has each spelling as one token, so a text becomes exactly
the ids that it names. Standard library only: every arm's environment has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_SPELLING = re.compile(r"<(\d+)>")
_USER_DEFINED = 4
"""The kind of a token that is matched as a whole."""


def spelled(tokens: Iterable[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def tokens_of(text: str) -> tuple[int, ...]:
    """Raises ValueError where the text is anything but spelled tokens."""
    if _SPELLING.sub("", text):
        raise ValueError(f"not spelled tokens: {_SPELLING.sub('', text)!r:.80}")
    return tuple(int(number) for number in _SPELLING.findall(text))


def vocabulary_keys(tokens: int, *, end: int) -> dict[str, Any]:
    """What a GGUF file says of a vocabulary of so many spelled tokens. ``end``: the token that ends a text.

    ``pre`` names a way to split text that llama.cpp knows and greenroom does not. So greenroom takes the tokenizer
    beside the file.
    """
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [spelled([token]) for token in range(tokens)],
        "tokenizer.ggml.token_type": [_USER_DEFINED] * tokens,
        "tokenizer.ggml.merges": ["< 1"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": end,
    }
