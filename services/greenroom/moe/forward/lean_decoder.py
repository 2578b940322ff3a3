"""A decoder's steps without the Python overhead of its modules.

With a small model a step of few rows is mostly Python: the kernels took a tenth of 0.7 ms a layer. For decoders of the
usual build, steps call the compiled products directly. The usual build is: norm, projections with or without norms of
their heads, rotary positions, plain causal attention, norm, MLP or experts, and two residual additions. Attention is
the batch loop's, as under the modules. The MLP stays the family's own module, with its router, shared experts and
hooks.

A model is accepted only if a trial shows that its steps are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from greenroom.moe.attention.ragged_attention import Chunk, RaggedMask, RaggedStep
from greenroom.moe.kernels.expert_products import is_plain_rms_norm
from greenroom.moe.kernels.lean_block import LeanBlock, lean_block
from greenroom.moe.kernels.stored_linear import StoredLinear
from greenroom.moe.native.rows import AttentionWeights, LinearWeights, NativeRows

_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm"}


class _Norm(NamedTuple):
    weight: torch.Tensor
    epsilon: float


class _Layer(NamedTuple):
    """One decoder layer. ``weights``: of everything around its attention; ``scale``: of its heads."""

    module: nn.Module
    attention: Any
    weights: AttentionWeights
    mlp: nn.Module
    block: LeanBlock | None  # instead of ``mlp``
    scale: float


class LeanDecoder:
    """Computes the model's own forward over ragged rows; see the module."""

    def __init__(self, model: Any, layers: list[_Layer], native: NativeRows) -> None:
        self._native = native
        self._layers = layers
        self._embedding: torch.Tensor = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        self._norm = _norm_of(model.model.norm, native)
        head = _weights_of(model.lm_head, native)
        assert head is not None, "``lean_decoder`` asks for it"
        self._head = head

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether it computes a step of these chunks. Else the modules do."""
        rows = sum(len(chunk.tokens) for chunk in chunks)
        limits = self._native.limits
        return rows <= (limits.decode if rows == len(chunks) else limits.prompt)

    def forward(
        self, step: RaggedStep, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Logits ``[n, vocabulary]`` of the rows ``wanted[n]``, for ``tokens[T]`` at ``positions[T]``.

        Keys and values are written as by ``RaggedStep``.
        """
        with self._native.alone():
            return self._forward(step, tokens, positions, wanted)

    def _forward(
        self, step: RaggedStep, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        native = self._native
        hidden = nn.functional.embedding(tokens, self._embedding)
        cosines, sines = (part[0].contiguous() for part in self._rotary(hidden[None], positions[None]))
        mask = step.causal_mask()
        for layer in self._layers:
            for hook in layer.module._forward_pre_hooks.values():
                hook(layer.module, ())
            normed = self.attention(layer, step, mask, hidden, cosines, sines)
            if layer.block is not None:
                layer.block.add(normed, hidden)
            else:
                out = layer.mlp(normed[None])
                hidden += (out[0] if isinstance(out, tuple) else out).view(hidden.shape)
        assert self._norm is not None
        if wanted.shape[0] < hidden.shape[0]:
            hidden = hidden[wanted]
        return native.linear_layer(native.rms_norm(hidden, *self._norm), self._head)

    def attention(
        self,
        layer: _Layer,
        step: RaggedStep,
        mask: RaggedMask,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> torch.Tensor:
        """Adds one layer's attention to the residual stream ``hidden[T, H]``. Returns the input of its MLP."""
        query, key, value = self._native.before_attention(layer.weights, hidden, cosines, sines)
        mixed = step.attend_causally(layer.attention, query, key, value, mask, layer.scale)
        return self._native.after_attention(layer.weights, mixed, hidden)


def lean_decoder(model: Any, native: NativeRows) -> LeanDecoder | None:
    """For a model of the usual build. None: it has another build. The caller tries whether both compute the same."""
    config: Any = model.config
    inner: Any = getattr(model, "model", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = {getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    if kinds != {"full_attention"} and (kinds or windows != {None}):
        return None  # a trial of a few tokens does not reach beyond a window
    parts = (getattr(inner, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb"))
    if any(part is None for part in parts) or _weights_of(getattr(model, "lm_head", None), native) is None:
        return None
    if type(inner.embed_tokens) is not nn.Embedding or _norm_of(inner.norm, native) is None:
        return None
    layers = [_layer_of(module, native) for module in inner.layers]
    if not layers or any(layer is None for layer in layers):
        return None
    return LeanDecoder(model, [layer for layer in layers if layer is not None], native)


def _layer_of(module: nn.Module, native: NativeRows) -> _Layer | None:
    children = dict(module.named_children())
    rest = children.keys() - _LAYER_PARTS
    if not children.keys() >= _LAYER_PARTS or len(rest) != 1:
        return None
    attention: Any = children["self_attn"]
    before, after = (_norm_of(children[name], native) for name in ("input_layernorm", "post_attention_layernorm"))
    own = dict(attention.named_children())
    projections = [_weights_of(own.pop(name, None), native) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    head_norms = [own.pop(name, None) for name in ("q_norm", "k_norm")]
    of_heads = [None if norm is None else _norm_of(norm, native) for norm in head_norms]
    dim = getattr(attention, "head_dim", None)
    if (
        own
        or dim is None
        or dim % native.attention_granularity
        or before is None
        or after is None
        or any(part is None for part in projections)
        or any(norm is not None and found is None for norm, found in zip(head_norms, of_heads, strict=True))
    ):
        return None
    weights = AttentionWeights(dim=dim, hidden=len(before.weight))
    for name, norm in (("before", before), ("after", after), *zip(("query_norm", "key_norm"), of_heads, strict=True)):
        if norm is not None:
            setattr(weights, name, norm.weight.data_ptr())
            setattr(weights, name.replace("_norm", "") + "_epsilon", norm.epsilon)
    weights.query_norm_width, weights.key_norm_width = (0 if norm is None else len(norm.weight) for norm in of_heads)
    for name, part in zip(("query", "key", "value", "output"), projections, strict=True):
        setattr(weights, name, part)
    scale = getattr(attention, "scaling", None) or dim**-0.5
    mlp = children[rest.pop()]
    return _Layer(module, attention, weights, mlp, lean_block(mlp, native), scale)


def _norm_of(module: Any, native: NativeRows) -> _Norm | None:
    if not type(module).__name__.endswith("RMSNorm") or not is_plain_rms_norm(module, native):
        return None
    return _Norm(module.weight, module.variance_epsilon)


def _weights_of(module: Any, native: NativeRows) -> LinearWeights | None:
    """None: it is no linear layer that the compiled products compute."""
    if type(module) is StoredLinear:
        return module.weights
    if type(module) is not nn.Linear:
        return None
    weight = module.weight
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or module.in_features % 2:
        return None
    return native.linear_weights(weight, module.bias)
