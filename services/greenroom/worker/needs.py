"""How much memory a model needs besides its experts' slots, from what it is."""

from __future__ import annotations

from typing import Any

from greenroom.experts.layout import PackManifest
from greenroom.moe.ragged import RaggedModel
from greenroom.worker.config import WorkerConfig
from greenroom.worker.memory_plan import ALLOCATOR_SLACK, Needs

_FLOAT32 = 4


def dense_bytes(model: Any) -> int:
    """Bytes of all weights and buffers that the model holds itself; shared ones once."""
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


def needs_of(
    model: Any, manifest: PackManifest, ragged: RaggedModel, config: WorkerConfig, max_model_len: int
) -> Needs:
    """``max_model_len``: tokens that one request may have."""
    slot_bytes = max(layer.layout.nbytes for layer in manifest.layers)
    kv_for_one = ragged.layout.nbytes(max_model_len)
    return Needs(
        dense=dense_bytes(model),
        workspace=workspace_bytes(model.config.get_text_config(), manifest, ragged, config, max_model_len),
        experts=manifest.experts,
        slot_bytes=slot_bytes,
        least_slots=max(layer.top_k for layer in manifest.layers),
        kv_for_one=kv_for_one,
        kv_for_all=kv_for_one * config.max_running,
    )


def workspace_bytes(
    text: Any, manifest: PackManifest, ragged: RaggedModel, config: WorkerConfig, max_model_len: int
) -> int:
    """An upper bound on what the largest step holds beside weights and KV, everything counted as float32.

    Some tensors of every row's width at once (residual, norms, queries, keys, values), a contribution of each of a
    row's experts, the widest hidden layer, the logits (also as float64 while sampling), the attention of one chunk.
    """
    rows = config.tokens_per_step
    top_k = max(layer.top_k for layer in manifest.layers)
    widest = max(max(spec.shape) for layer in manifest.layers for spec in layer.layout.tensors)
    widest = max(widest, getattr(text, "intermediate_size", 0) or 0)
    chunk = min(rows, config.prefill_chunk or rows)
    heads = text.num_attention_heads if ragged.attention == "eager" else 1
    numbers = (
        rows * text.hidden_size * (12 + 3 * top_k)
        + rows * widest * 3
        + min(rows, config.max_running) * ragged.vocab_size * 6
        + chunk * max_model_len * heads * 3
    )
    return int(numbers) * _FLOAT32 + ALLOCATOR_SLACK
