"""Prompts that were recorded as texts, in the numbers of a trace's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from greenroom.policies.base.array_types import Ids
from greenroom.replay.traces.meta_file import meta_beside, read_lines
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.token_numbers import texts_of
from greenroom.replay.traces.trace_file import TraceError

PROMPT: Final = "prompt"


class LongestMatch:
    """Splits texts into tokens, each the longest that the rest of the text begins with.

    What no token begins like is the unknown token, ``len(texts)``, a character at a time. That is not what the model's
    own tokenizer does, but all that texts of tokens tell.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._numbers = {text: number for number, text in enumerate(texts) if text}
        self._unknown = len(texts)
        lengths: dict[str, set[int]] = {}
        for text in self._numbers:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def split(self, text: str) -> Ids:
        return np.fromiter(self._tokens(text), dtype=np.int64)

    def _tokens(self, text: str) -> Iterator[int]:
        place = 0
        while place < len(text):
            for length in self._lengths.get(text[place], ()):
                number = self._numbers.get(text[place : place + length])
                if number is not None:
                    yield number
                    place += length
                    break
            else:
                yield self._unknown
                place += 1


def prompts_of(trace: RoutingTrace, learnt: int, prompts: Iterable[str]) -> list[Ids]:
    """The prompts in the numbers that the trace's tokens have. They are split by the texts of its first ``learnt``
    sequences, all that may be learnt from. Raises TraceError for a trace whose tokens are ids of the model."""
    texts = texts_of(trace, learnt)
    of_text = {text: number for number, text in enumerate(trace.token_texts or ())}
    numbers = np.array([*(of_text[text] for text in texts), len(of_text)], dtype=np.int64)
    match = LongestMatch(texts)
    return [numbers[match.split(prompt)] for prompt in prompts]


def prompts_beside(path: Path, sequences: int) -> list[str] | None:
    """Of the sequences of the trace at ``path``, out of the meta file beside it.

    None where there is no such file, or it tells no prompts. Raises TraceError, naming the line.
    """
    meta = meta_beside(path)
    if not meta.exists():
        return None
    found = [line.get(PROMPT) for line in read_lines(meta)]
    if all(one is None for one in found):
        return None
    if len(found) != sequences:
        raise TraceError(f"{meta} has {len(found)} lines and the trace {sequences} sequences")
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) < len(found):
        line = next(number for number, one in enumerate(found, start=1) if not isinstance(one, str))
        raise TraceError(f"{meta}: line {line}: {PROMPT} must be a text, as in the other lines")
    return texts
