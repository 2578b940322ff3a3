"""Sequences that an arm decodes at once, and how that went. Standard library only: llama.cpp's environment has no more.

Every prompt comes with the tokens that follow it, whatever the model would pick. So all arms compute the same and route
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Batch:
    """Prompts as token ids, and for each the tokens that are forced on the model after it."""

    prompts: tuple[tuple[int, ...], ...]
    forced: tuple[tuple[int, ...], ...]

    @property
    def sequences(self) -> int:
        return len(self.prompts)

    def first(self, sequences: int, tokens: int) -> Batch:
        """Only so many sequences, and so many forced tokens of each."""
        return Batch(self.prompts[:sequences], tuple(forced[:tokens] for forced in self.forced[:sequences]))


@dataclass(frozen=True)
class Decoded:
    """How a batch went. ``arrivals``: for each sequence the seconds from the batch's begin to each picked token.

    ``greedy``: what the model would have picked. ``read_bytes``: read from disk after the prompts.
    """

    arrivals: tuple[tuple[float, ...], ...]
    greedy: tuple[tuple[int, ...], ...]
    read_bytes: int

    @property
    def prompt_s(self) -> float:
        """Until every sequence had its first token."""
        return max(times[0] for times in self.arrivals)

    def rate(self, skip: int) -> float:
        """Tokens/s while all sequences decode, from the ``skip``-th token behind the first on."""
        return decode_rate(self.arrivals, skip)


def decode_rate(arrivals: Sequence[Sequence[float]], skip: int) -> float:
    """Tokens a second while every sequence has more than ``skip`` tokens and none has its last.

    Sequences may begin in different steps. Raises ValueError if there is no such time.
    """
    begin = max(times[skip] for times in arrivals)
    end = min(times[-1] for times in arrivals)
    tokens = sum(begin < at <= end for times in arrivals for at in times)
    if tokens == 0:
        raise ValueError(f"no token lies in the time in which all {len(arrivals)} sequences decode")
    return tokens / (end - begin)


def batch_of(told: dict[str, Any]) -> Batch:
    return Batch(tuple(map(tuple, told["prompts"])), tuple(map(tuple, told["forced"])))
