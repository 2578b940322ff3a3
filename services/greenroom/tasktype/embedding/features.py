"""The sentence embedding of a prompt's first and last tokens, beside what the linear head weighs anyway."""

from __future__ import annotations

import math
from typing import Final

from greenroom.tasktype.embedding.minilm import MiniLM, installed_folder
from greenroom.tasktype.linear import InstructionFeatures
from greenroom.tasktype.words import bounded

_HEAD_CHARS: Final = 300
_TAIL_CHARS: Final = 200
_MOST_TOKENS: Final = 32
_SHARE: Final = 3.0
"""What the embedding counts, as the blocks of `InstructionFeatures` do."""


class EmbeddingFeatures:
    """Raises EmbeddingUnavailable where the package of the embedding is not installed."""

    name = "instruction-1, minilm-1"

    def __init__(self) -> None:
        self._embed = MiniLM(installed_folder())
        self._instruction = InstructionFeatures()

    def __call__(self, prompt: str) -> dict[str, float]:
        found = self._instruction(prompt)
        parts = [self._embed.tokens(part) for part in bounded(prompt.strip(), _HEAD_CHARS, _TAIL_CHARS)]
        tokens = parts[0] if len(parts) == 1 else parts[0] + parts[-1]
        if len(tokens) > _MOST_TOKENS:
            half = _MOST_TOKENS // 2
            tokens = tokens[:half] + tokens[-half:]
        if tokens:
            for number, value in enumerate(self._embed(tokens).tolist()):
                found[f"m {number}"] = value * math.sqrt(_SHARE)
        return found
