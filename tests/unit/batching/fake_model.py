"""A language model of a few lines that lives on its keys and values alone, as a real one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

import torch

from greenroom.moe.attention.kv_layout import KVLayout, LayerKV
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_model import RaggedModel

VOCABULARY = 64
LAYOUT = KVLayout((LayerKV(1, 1, 1, 1), LayerKV(1, 1, 1, 1)), torch.float32, torch.device("cpu"))


def next_logits(tokens: Sequence[int]) -> torch.Tensor:
    """What follows ``tokens``: pseudo-random logits that depend on each of them and its place."""
    state = 1
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
    return torch.tensor([((state + 1) * (i + 3) * 7919) % 1009 / 100 for i in range(VOCABULARY)])


def continuation(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The greedy tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens).argmax()))
    return tuple(tokens[len(prompt) :])


class FakeModel:
    """Stands in for a RaggedModel. ``before(chunks)`` runs with every forward, when half of it is written.

    ``gate`` stops every forward while it is cleared; ``entered`` is set once one waits there or runs.
    """

    layout = LAYOUT
    vocab_size = VOCABULARY
    max_positions = 1000

    def __init__(self, before: Callable[[Sequence[Chunk]], None] | None = None) -> None:
        self.before = before
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.forwards: list[list[tuple[int, int]]] = []
        """Of every forward its (sequence, rows), failed ones too."""
        self.paths: list[object] = []
        """Of every forward the paths of its rows."""
        self.plans: list[tuple[int, list[tuple[int, list[int]]]]] = []
        """Of every forward told ahead: how many had run by then, and its (sequence, tokens)."""

    def as_ragged(self) -> RaggedModel:
        return cast(RaggedModel, self)

    def forward(self, chunks: Sequence[Chunk], paths: object = None) -> torch.Tensor:
        self.entered.set()
        assert self.gate.wait(30), "the test never opened the gate"
        self.paths.append(paths)
        self.forwards.append([(chunk.sequence, len(chunk.tokens)) for chunk in chunks])
        for chunk in chunks:
            self._write(0, chunk)
        if self.before is not None:
            self.before(chunks)
        logits = []
        for chunk in chunks:
            self._write(1, chunk)
            if chunk.wants_logits:
                stop = chunk.kv.length + len(chunk.tokens)
                seen = [chunk.kv.read(layer, 0, stop)[0].flatten().int().tolist() for layer in (0, 1)]
                assert seen[0] == seen[1], "layers disagree about what was said"
                logits += [next_logits(seen[0][:end]) for end in range(stop - chunk.logit_rows + 1, stop + 1)]
        return torch.stack(logits) if logits else torch.empty(0, VOCABULARY)

    def plan(self, chunks: Sequence[Chunk], paths: object = None) -> None:
        self.plans.append((len(self.forwards), [(chunk.sequence, list(chunk.tokens)) for chunk in chunks]))

    def _write(self, layer: int, chunk: Chunk) -> None:
        rows = torch.tensor(list(chunk.tokens), dtype=torch.float32).view(1, 1, -1, 1)
        chunk.kv.write(layer, rows, rows)


def poisoned(token: int, error: Exception) -> Callable[[Sequence[Chunk]], None]:
    """Fails every forward that has the token among the rows of a prompt."""

    def before(chunks: Sequence[Chunk]) -> None:
        if any(chunk.prefill and token in chunk.tokens for chunk in chunks):
            raise error

    return before
