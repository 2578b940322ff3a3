"""A model of recorded routing on simulated links: what the batch loop runs its steps on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.moe.attention.kv_layout import KVLayout, LayerKV
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.policies.base.events import Phase
from greenroom.replay.simulation.timed_replay import TimedEngine
from greenroom.replay.traces.steps import TraceStep

LAYOUT: Final = KVLayout((LayerKV(8, 64, 8, 64),) * 24, torch.bfloat16, torch.device("cpu"))
"""Keys and values of gpt-oss-20b. They are reserved, never written."""


class SimulatedModel:
    """Stands for a RaggedModel in a BatchEngine: a forward takes the virtual time that its rows' experts take.

    ``routes``: by sequence the picks ``[rows, layers, k]`` of its prompt and its answer. The token of a forward is
    always 0, so answers end by their length.
    """

    layout = LAYOUT
    vocab_size = 2
    max_positions = 1 << 20

    def __init__(self, engine: TimedEngine, routes: Mapping[int, NDArray[np.integer[Any]]]) -> None:
        self._engine = engine
        self._routes = routes

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits ``[wanted, vocab_size]``."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        parts = [
            self._routes[chunk.sequence][chunk.kv.length : chunk.kv.length + length]
            for chunk, length in zip(chunks, lengths, strict=True)
        ]
        phases = [Phase.PREFILL if chunk.prefill else Phase.DECODE for chunk in chunks]
        self._engine.step(
            TraceStep(
                np.repeat([chunk.sequence for chunk in chunks], lengths),
                np.concatenate(parts),
                np.repeat(phases, lengths).astype(np.uint8),
            )
        )
        logits = torch.zeros(sum(chunk.wants_logits for chunk in chunks), self.vocab_size)
        logits[:, 0] = 1.0
        return logits
