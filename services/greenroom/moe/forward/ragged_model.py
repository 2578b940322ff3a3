"""A model that runs ragged, once a probe has shown that it can, and the source of its experts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.experts.source import ExpertSource, HearsPlans
from greenroom.moe.attention.kv_layout import KVLayout
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_forward import RaggedForward
from greenroom.moe.forward.ragged_probe import position_limit, probe, proven_lean_decoder, refuse_unsupported
from greenroom.moe.native.rows import NativeRows


class RaggedModel(RaggedForward):
    """A causal language model of transformers whose attention is ragged from now on, until ``restore``.

    ``source`` hears of every forward (None: the model holds its own experts). ``attention`` and ``native``: see
    RaggedForward. If one sequence runs alone, first its whole prompt and then token by token, every product has the
    shapes that it has in transformers' ``generate``.

    Construction runs the model on a few tokens, with its experts bypassed. This shows what it keeps of a token, and
    whether ragged rows give the same as its own attention. Raises UnsupportedModel, with the reason, for
    encoder-decoders, for models whose layers keep a state other than keys and values, and where the results differ.
    Owned by one thread at a time.
    """

    def __init__(
        self,
        model: Any,
        source: ExpertSource | None = None,
        *,
        attention: str | None = None,
        native: NativeRows | None = None,
    ) -> None:
        refuse_unsupported(model)
        super().__init__(model, attention, native)
        self.max_positions = position_limit(model.config)
        self.source: ExpertSource | None = None  # none while the probes run
        self.layout: KVLayout = probe(self)
        if native is not None and self.attention == "sdpa":
            self.lean = proven_lean_decoder(self, self.layout, native)
        self.source = source

    def forward(self, chunks: Sequence[Chunk], paths: NDArray[np.float32] | None = None) -> torch.Tensor:
        """As RaggedForward; the source hears of it. ``paths[T, N]``: see ``policies.base.events.Step``."""
        with self._source_step(chunks, paths):
            return super().forward(chunks)

    def plan(self, chunks: Sequence[Chunk], paths: NDArray[np.float32] | None = None) -> None:
        """Tell the source of the forward after the next one. Arguments as of ``forward``."""
        if isinstance(self.source, HearsPlans):
            self.source.step_planned(*_rows_of(chunks), paths)

    def _source_step(self, chunks: Sequence[Chunk], paths: NDArray[np.float32] | None) -> AbstractContextManager[None]:
        if self.source is None:
            return contextlib.nullcontext()
        return self.source.step(*_rows_of(chunks), paths)


def _rows_of(chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """By row: its sequence, whether it is a prompt's, its token."""
    lengths = [len(chunk.tokens) for chunk in chunks]
    sequences = np.repeat(np.array([chunk.sequence for chunk in chunks], dtype=np.int64), lengths)
    prefill = np.repeat(np.array([chunk.prefill for chunk in chunks], dtype=np.bool_), lengths)
    tokens = np.array([token for chunk in chunks for token in chunk.tokens], dtype=np.int64)
    return sequences, prefill, tokens
