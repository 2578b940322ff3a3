"""Forwards of a transformers model over rows of many sequences at once."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from greenroom.core.errors import InvalidConfig
from greenroom.moe.attention.ragged_attention import RAGGED, Chunk, RaggedStep, cache_argument, running
from greenroom.moe.forward.lean_decoder import LeanDecoder
from greenroom.moe.kernels.device_copies import to_device
from greenroom.moe.native.rows import NativeRows

ATTENTIONS = ("sdpa", "eager")


class RaggedForward:
    """A causal language model whose attention is ragged between ``engage`` and ``restore``.

    ``attention``: by which function each sequence's attention is computed, "sdpa", or "eager" for the family's own;
    None: as the model is configured. ``native``: the compiled products. They compute attention too, unless "eager" was
    asked for. ``lean``: computes the steps that it takes in place of the model's modules. Raises InvalidConfig for an
    attention that the model does not have.
    """

    def __init__(self, model: Any, attention: str | None, native: NativeRows | None) -> None:
        configured = model.config._attn_implementation
        asked, attention = attention, attention or configured
        if attention not in ATTENTIONS:
            raise InvalidConfig("attention", attention, f"allowed: {', '.join(ATTENTIONS)}")
        if attention == "sdpa" and not model._supports_sdpa:
            raise InvalidConfig("attention", attention, f"{model.config.model_type} has an attention of its own: eager")
        self.model = model.eval()
        self.attention = attention
        self.native = native
        by_choice = attention != "eager" or (asked is None and not model._supports_sdpa)
        self._attends_by = native if by_choice else None
        self.attention_compiled = True
        """Whether the compiled attention has computed all chunks of all layers so far."""
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.lean: LeanDecoder | None = None
        self._configured = configured
        self._cache = cache_argument(model)
        # Some checkpoints ask for them in their configuration. They are for training, and cost a pass over all picks.
        has_option = "output_router_logits" in inspect.signature(model.forward).parameters
        self._options = {"output_router_logits": False} if has_option else {}

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """One forward over ``chunks``, in this order.

        Returns logits ``[n, vocabulary]`` of the last rows of those chunks that want logits, after all of the family's
        own post-processing. Writes keys and values behind each ``kv.length`` and leaves the length: the caller commits.
        An error of a layer or of the source of experts is passed on, and then nothing has changed.
        """
        lengths = [len(chunk.tokens) for chunk in chunks]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [chunk.kv.length + i for chunk in chunks for i in range(len(chunk.tokens))]
        ends = zip(itertools.accumulate(lengths), chunks, strict=True)
        lasts = [row for end, chunk in ends if chunk.wants_logits for row in range(end - chunk.logit_rows, end)]
        numbers = to_device(torch.tensor([*tokens, *positions, *lasts], dtype=torch.int64), self.device)
        ids, places, wanted = torch.split(numbers, [len(tokens), len(tokens), len(lasts)])
        step = RaggedStep(chunks, self.device, self.attention, self._attends_by)
        with torch.inference_mode(), running(step):
            if self.lean is not None and self.lean.takes(chunks):
                return self.lean.forward(step, ids, places, wanted)
            logits: torch.Tensor = self.model(
                input_ids=ids[None],
                position_ids=places[None],
                use_cache=True,
                logits_to_keep=wanted,
                **{self._cache: step},
                **self._options,
            ).logits
        self.attention_compiled &= not step.torch_attended
        return logits[0]

    def engage(self) -> None:
        """Switch the model's attention to ragged."""
        self.model.set_attn_implementation(RAGGED)

    def restore(self) -> None:
        """Switch the model's attention back to what it was configured with."""
        self.model.set_attn_implementation(self._configured)
