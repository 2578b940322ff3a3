"""A model without its experts: all dense weights in memory, loaded by transformers itself.

The load goes through a throwaway subclass of the model's class, which drops the experts' parameters right after
construction, when they are still on the meta device. To transformers the checkpoint's expert tensors are then merely
unexpected and never read. Nothing of transformers is patched, so other threads may load other models meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from greenroom.core.errors import CorruptCheckpoint
from greenroom.moe.checkpoint import Checkpoint
from greenroom.moe.experts_forward import IMPLEMENTATION
from greenroom.moe.layers import MoeLayer, describe_layers, model_class


def load_skeleton(
    checkpoint: Checkpoint, dtype: torch.dtype, attn_implementation: str | None = None
) -> tuple[Any, tuple[MoeLayer, ...]]:
    """The model without its experts' weights, and its MoE layers.

    ``attn_implementation`` None is transformers' own choice. Raises UnsupportedModel as ``describe_layers`` does,
    CorruptCheckpoint if dense weights are missing or of another shape.
    """
    base = model_class(checkpoint.config)
    layers: list[MoeLayer] = []

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        layers.extend(describe_layers(self, config, dtype))
        expected = _expert_keys(layers, self.base_model_prefix)
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *expected}
        for layer in layers:
            _strip(self, layer)

    # transformers looks at a class's name and module to know what it is, so these stay those of the base
    own = {"__init__": init, "__module__": base.__module__, "__qualname__": base.__qualname__}
    skeleton: Any = type(base.__name__, (base,), own)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model, report = skeleton.from_pretrained(
        checkpoint.folder,
        config=checkpoint.config,
        dtype=dtype,
        experts_implementation=IMPLEMENTATION,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        **options,
    )
    model.__class__ = base
    if wrong := [*sorted(report["missing_keys"]), *sorted(key for key, *_ in report["mismatched_keys"])]:
        raise CorruptCheckpoint(
            f"{checkpoint.name} lacks {len(wrong)} dense tensors, or has them in another shape: {', '.join(wrong[:5])}"
        )
    return model, tuple(layers)


def _expert_keys(layers: Sequence[MoeLayer], prefix: str) -> list[str]:
    """Patterns for the names, with or without the base model's prefix, under which experts are unexpected."""
    return [rf"^({prefix}\.)?{re.escape(layer.name.removeprefix(f'{prefix}.'))}\." for layer in layers]


def _strip(model: Any, layer: MoeLayer) -> None:
    """Drop the experts, and keep transformers from initialising what is not there."""
    module = model.get_submodule(layer.name)
    if layer.stacked:
        for tensor in layer.tensors:
            del module._parameters[tensor.name]
    else:
        module._modules.clear()
        model.get_submodule(layer.name.rpartition(".")[0])._is_hf_initialized = True
    module._is_hf_initialized = True
