"""A transformers model that runs forwards over rows of many sequences at once."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from greenroom.core.errors import InvalidConfig
from greenroom.experts.source import ExpertSource
from greenroom.moe.attention.kv_cache import KVLayout
from greenroom.moe.attention.ragged_attention import RAGGED, Chunk, RaggedStep, running
from greenroom.moe.forward.lean_decoder import LeanDecoder
from greenroom.moe.forward.ragged_probe import position_limit, probe, proven_lean_decoder, refuse_unsupported
from greenroom.moe.products.device_copies import to_device
from greenroom.moe.products.native.rows import NativeRows

ATTENTIONS = ("sdpa", "eager")


class RaggedModel:
    """A causal language model of transformers whose attention is ragged from now on, until ``restore``.

    ``source`` is told of every forward (None: the model holds its own experts). ``attention`` is the function
    that each sequence's attention is computed by: "sdpa", or "eager" for the family's own; None: as the model is
    configured. Of one sequence alone, whole prompt and then token by token, every product has the shapes that it
    has in transformers' ``generate``. ``native``: the compiled products, for the attention of single rows under sdpa.

    Construction runs the model on a handful of tokens, its experts bypassed, to learn what it keeps of a token and
    to compare ragged rows with its own attention. Raises UnsupportedModel, saying why, for encoder-decoders, for
    models whose layers keep a state that is not keys and values, and for whatever fails that comparison.
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
        configured = model.config._attn_implementation
        attention = attention or configured
        if attention not in ATTENTIONS:
            raise InvalidConfig("attention", attention, f"allowed: {', '.join(ATTENTIONS)}")
        if attention == "sdpa" and not model._supports_sdpa:
            raise InvalidConfig("attention", attention, f"{model.config.model_type} has an attention of its own: eager")
        self.model = model.eval()
        self.attention = attention
        self.native = native
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.max_positions = position_limit(model.config)
        self._configured = configured
        # What some checkpoints ask for in their configuration is for training and costs a pass over all picks.
        silent = "output_router_logits" in inspect.signature(model.forward).parameters
        self._extra = {"output_router_logits": False} if silent else {}
        self.source: ExpertSource | None = None
        self.lean: LeanDecoder | None = None
        self.layout: KVLayout = probe(self)
        self.lean = None if native is None or attention != "sdpa" else proven_lean_decoder(self, native)
        self.source = source

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """One forward over ``chunks``, in this order. Returns the logits ``[n, vocabulary]`` of the last rows of those
        chunks that want logits, after all post-processing of the family's own.

        Writes keys and values behind each ``kv.length`` and leaves the length: the caller commits. Whatever a layer
        or the source raises comes through, and then nothing has changed.
        """
        lengths = [len(chunk.tokens) for chunk in chunks]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [chunk.kv.length + i for chunk in chunks for i in range(len(chunk.tokens))]
        ends = zip(itertools.accumulate(lengths), chunks, strict=True)
        lasts = [row for end, chunk in ends if chunk.wants_logits for row in range(end - chunk.logit_rows, end)]
        numbers = to_device(torch.tensor([*tokens, *positions, *lasts], dtype=torch.int64), self.device)
        ids, places, wanted = torch.split(numbers, [len(tokens), len(tokens), len(lasts)])
        step = RaggedStep(chunks, self.device, self.attention, self.native)
        with torch.inference_mode(), running(step), self._told(chunks, lengths):
            if self.lean is not None and self.lean.takes(chunks):
                return self.lean.forward(step, ids, places, wanted)
            logits: torch.Tensor = self.model(
                input_ids=ids[None],
                position_ids=places[None],
                past_key_values=step,
                use_cache=True,
                logits_to_keep=wanted,
                **self._extra,
            ).logits
        return logits[0]

    def _told(self, chunks: Sequence[Chunk], lengths: Sequence[int]) -> AbstractContextManager[None]:
        if self.source is None:
            return contextlib.nullcontext()
        sequences = np.repeat(np.array([chunk.sequence for chunk in chunks], dtype=np.int64), lengths)
        prefill = np.repeat(np.array([chunk.prefill for chunk in chunks], dtype=np.bool_), lengths)
        return self.source.step(sequences, prefill)

    def engage(self) -> None:
        """Switch the model's attention to ragged."""
        self.model.set_attn_implementation(RAGGED)

    def restore(self) -> None:
        """Give the model the attention back that it was configured with."""
        self.model.set_attn_implementation(self._configured)
