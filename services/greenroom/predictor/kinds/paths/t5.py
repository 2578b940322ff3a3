"""The network of ExpertFlow's routing path predictor (section 3.1.1), as it is trained: transformers' T5."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import T5Config, T5Model

from greenroom.core.artifacts.paths_forms.t5 import FIRST_TOKEN, T5Shape
from greenroom.predictor.kinds.paths.t5_start import Start

NEVER = -1e9
"""What is added to the score of what must not be attended to."""


class T5PathNetwork(nn.Module):
    """Encoder and decoder from scratch. The heads of all layers are one matrix with a row an expert.

    The encoder reads the prompt, the decoder the tokens of the rows themselves: row i foretells the picks of token i.
    """

    def __init__(self, shape: T5Shape, tokens: int, experts: int, *, dropout: float) -> None:
        """``tokens``: how many are known; ``experts``: of all layers."""
        super().__init__()
        self.shape = shape
        self.backbone = T5Model(
            T5Config(
                vocab_size=tokens + FIRST_TOKEN, d_model=shape.width, d_kv=shape.key, d_ff=shape.inner,
                num_heads=shape.heads, num_layers=shape.encoder_layers, num_decoder_layers=shape.decoder_layers,
                relative_attention_num_buckets=shape.buckets, relative_attention_max_distance=shape.reach,
                dropout_rate=dropout, feed_forward_proj="relu", use_cache=False,
                pad_token_id=0, eos_token_id=None, decoder_start_token_id=0, attn_implementation="eager",
            )
        )  # fmt: skip
        self.head = nn.Linear(shape.width, experts)

    def begin_with(self, start: Start) -> None:
        """From now on it says what was counted; its decoder's layers begin with adding nothing to that."""
        with torch.no_grad():
            self.backbone.shared.weight.copy_(torch.from_numpy(start.embedding))
            self.head.weight.copy_(torch.from_numpy(start.head))
            self.head.bias.copy_(torch.from_numpy(start.bias))
            for name, one in self.backbone.decoder.named_parameters():
                if name.endswith((".o.weight", ".wo.weight")):
                    one.zero_()

    def forward(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, N]`` of ``tokens[B, T]`` after ``prompts[B, P]``, rows of the embedding; 0 fills up, behind.

        A prompt has at least one token.
        """
        found = self.backbone(
            input_ids=prompts,
            attention_mask=(prompts != 0).long(),
            decoder_input_ids=tokens,
            decoder_attention_mask=self._mask(tokens.shape[1]).expand(len(tokens), 1, -1, -1),
        )
        logits: Tensor = self.head(found.last_hidden_state)
        return logits

    def _mask(self, length: int) -> Tensor:
        """``[1, 1, T, T]``: a row sees itself and those before it in the window."""
        place = torch.arange(length)
        distance = place[:, None] - place[None, :]
        seen = (distance >= 0) & (distance < self.shape.window)
        return torch.where(seen, 0.0, NEVER)[None, None]

    def tensors(self) -> dict[str, NDArray[np.float16]]:
        """By the names of the artifact's form."""
        named: dict[str, Any] = {"head.weight": self.head.weight, "head.bias": self.head.bias}
        for name, one in self.backbone.state_dict().items():
            if not name.endswith("embed_tokens.weight"):  # both stacks share the embedding
                named[name] = one
        return {name: one.detach().numpy().astype(np.float16) for name, one in named.items()}
