"""A decoder's steps of single rows without what its modules cost in Python.

A step in which every sequence has one row is mostly Python where a model is small: of 0.7 ms a layer the kernels took a
tenth. For decoders of the usual build (norm, projections with or without norms of their heads, rotary positions, plain
causal attention, norm, MLP or experts, two residual additions) such steps run through the compiled products directly.
The MLP stays the family's own module, so routers, shared experts and the experts' hook are what they were.

A model is taken only if its steps come out equal to the bit, which is found out by trying.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.moe.kv_cache import SequenceKV
from greenroom.moe.native.rows import NativeRows
from greenroom.moe.products import is_plain_rms_norm

_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm"}


class _Norm(NamedTuple):
    weight: torch.Tensor
    epsilon: float


class _Layer(NamedTuple):
    """One decoder layer's parts. ``heads``, ``key_heads`` and ``dim`` of its attention."""

    module: nn.Module
    before_attention: _Norm
    before_mlp: _Norm
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    mlp: nn.Module
    dim: int
    scale: float


class LeanDecoder:
    """The same function as the model's own forward over single rows; see the module."""

    def __init__(self, model: Any, layers: list[_Layer], native: NativeRows) -> None:
        self._native = native
        self._layers = layers
        self._embedding: torch.Tensor = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        self._norm = _norm_of(model.model.norm, native)
        self._head: nn.Linear = model.lm_head

    def forward(self, tokens: torch.Tensor, kvs: list[SequenceKV]) -> torch.Tensor:
        """Logits ``[n, vocabulary]`` of one row ``tokens[n]`` of each sequence; writes its keys and values behind
        ``kv.length``, which stays.
        """
        native, rows = self._native, len(kvs)
        for kv in kvs:
            if kv.length >= kv.capacity:
                raise ValueError(f"{kv.length + 1} rows do not fit into a reservation of {kv.capacity}")
        hidden = nn.functional.embedding(tokens, self._embedding)
        positions = torch.tensor([[kv.length for kv in kvs]])
        cosines, sines = (part[0].contiguous() for part in self._rotary(hidden[None], positions))
        addresses = np.stack([kv.addresses for kv in kvs], axis=1)
        at = np.array([(n, 0, 0, kv.capacity, kv.length, 0) for n, kv in enumerate(kvs)], dtype=np.int64)
        for number, layer in enumerate(self._layers):
            for hook in layer.module._forward_pre_hooks.values():
                hook(layer.module, ())
            at[:, 1:3] = addresses[number]
            normed = native.rms_norm(hidden, *layer.before_attention)
            mixed = self._attention(layer, normed, cosines, sines, at)
            hidden = hidden + native.linear(mixed, layer.output.weight, layer.output.bias)
            normed = native.rms_norm(hidden, *layer.before_mlp)
            out = layer.mlp(normed[None])
            hidden = hidden + (out[0] if isinstance(out, tuple) else out).view(rows, -1)
        assert self._norm is not None
        return native.linear(native.rms_norm(hidden, *self._norm), self._head.weight, self._head.bias)

    def _attention(
        self, layer: _Layer, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, at: NDArray[np.int64]
    ) -> torch.Tensor:
        native = self._native
        count, dim = at.shape[0], layer.dim
        query, key, value = (native.linear(rows, part.weight, part.bias) for part in layer[3:6])
        query, key = _normed(native, query, layer.query_norm, dim), _normed(native, key, layer.key_norm, dim)
        native.rotate(query, cosines, sines)
        native.rotate(key, cosines, sines)
        out = torch.empty(1, count, query.shape[1], dim, dtype=rows.dtype)
        native.attention(
            query[None].transpose(1, 2),
            key[None].transpose(1, 2),
            value.view(1, count, -1, dim).transpose(1, 2),
            *(at, out, layer.scale),
        )
        return out.view(count, -1)


def _normed(native: NativeRows, rows: torch.Tensor, norm: _Norm | None, dim: int) -> torch.Tensor:
    """``[n, heads, dim]``, normalised by head or over all heads, as the norm's weight is long."""
    if norm is not None:
        rows = native.rms_norm(rows.view(-1, norm.weight.shape[0]), *norm).view(rows.shape)
    return rows.view(rows.shape[0], -1, dim)


def lean_decoder(model: Any, native: NativeRows) -> LeanDecoder | None:
    """For a model of the usual build; None: its steps go through its modules. Whether it computes the same is the
    caller's to try.
    """
    config: Any = model.config
    inner: Any = getattr(model, "model", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = {getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    if kinds != {"full_attention"} and (kinds or windows != {None}):
        return None  # what lies behind a window, no trial of a few tokens shows
    parts = (getattr(inner, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb"))
    if any(part is None for part in parts) or type(getattr(model, "lm_head", None)) is not nn.Linear:
        return None
    if type(inner.embed_tokens) is not nn.Embedding or not _bf16(model.lm_head) or _norm_of(inner.norm, native) is None:
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
    norms = [_norm_of(children[name], native) for name in ("input_layernorm", "post_attention_layernorm")]
    own = dict(attention.named_children())
    projections = [own.pop(name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    head_norms = [own.pop(name, None) for name in ("q_norm", "k_norm")]
    of_heads = [None if norm is None else _norm_of(norm, native) for norm in head_norms]
    dim = getattr(attention, "head_dim", None)
    if (
        own
        or dim is None
        or dim % native.attention_granularity
        or None in norms
        or any(type(part) is not nn.Linear or not _bf16(part) for part in projections)
        or any(norm is not None and found is None for norm, found in zip(head_norms, of_heads, strict=True))
    ):
        return None
    scale = getattr(attention, "scaling", None) or dim**-0.5
    return _Layer(module, *norms, *projections, *of_heads, children[rest.pop()], dim, scale)  # type: ignore[call-arg,arg-type]


def _norm_of(module: Any, native: NativeRows) -> _Norm | None:
    if not type(module).__name__.endswith("RMSNorm") or not is_plain_rms_norm(module, native):
        return None
    return _Norm(module.weight, module.variance_epsilon)


def _bf16(module: nn.Linear) -> bool:
    weight = module.weight
    return weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and module.in_features % 2 == 0
