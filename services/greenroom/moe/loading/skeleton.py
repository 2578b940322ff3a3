"""A model without its experts: all dense weights in memory, loaded by transformers itself.

A temporary subclass of the model's class drops the experts' parameters right after construction, while they are on the
meta device. It is loaded with the dense tensors alone. Nothing of transformers is patched. The tensors are read, not
mapped: a mapped checkpoint would take memory that no budget counts, and its file could not be changed while the model
serves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.checkpoints.shard_reader import ShardReader, typed
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.moe.architecture.moe_layers import CONSTRUCTING, MoeLayer, Outlined, model_class
from greenroom.moe.kernels.experts_forward import IMPLEMENTATION
from greenroom.moe.kernels.stored_linear import StoredLinear
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.dense_matrices import read_parts
from greenroom.moe.native.rows import native_rows


def load_skeleton(plan: ExpertPlan, attn_implementation: str | None = None) -> Any:
    """The model of ``plan``'s checkpoint in its dtype, without its experts' weights. Linear layers that stay as they
    are stored are ``StoredLinear``.

    ``attn_implementation``: None is transformers' own choice. Raises CorruptCheckpoint if dense weights are missing or
    have another shape.
    """
    checkpoint = plan.checkpoint
    base = model_class(checkpoint.config)

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        with Outlined():
            base.__init__(self, config, *args, **kwargs)
        for layer in plan.layers:
            _strip(self, layer)
        for path in plan.dense_stored:
            self.set_submodule(path, StoredLinear(self.get_submodule(path)))

    # transformers identifies a class by its name and module, so these stay those of the base class
    own = {"__init__": init, "__module__": base.__module__, "__qualname__": base.__qualname__}
    skeleton: Any = type(base.__name__, (base,), own)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    dense = _dense_weights(plan)
    with CONSTRUCTING:
        model, report = skeleton.from_pretrained(
            None,
            config=_unquantized(checkpoint.config),
            state_dict=dense,
            dtype=plan.dtype,
            experts_implementation=IMPLEMENTATION,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **options,
        )
    model.__class__ = base
    _store(model, plan)
    if wrong := [*sorted(report["missing_keys"]), *sorted(key for key, *_ in report["mismatched_keys"])]:
        raise CorruptCheckpoint(
            f"{checkpoint.name} lacks {len(wrong)} dense tensors, or has them in another shape: {', '.join(wrong[:5])}"
        )
    if checkpoint.gguf is None and (checkpoint.folder / "generation_config.json").exists():
        try:
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        except Exception as error:  # the JSON is untrusted, so transformers may raise anything
            raise CorruptCheckpoint(f"generation_config.json of {checkpoint.name} is not valid: {error}") from error
    return model


def _unquantized(config: Any) -> Any:
    """Nothing dense is quantised any more. The entry would make transformers load its quantiser."""
    if getattr(config, "quantization_config", None) is None:
        return config
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


def _store(model: Any, plan: ExpertPlan) -> None:
    """Matrices that stay codes. What reading one takes comes and goes: all memory that stays is taken before, lest it
    lies between, and the largest is read first, while there is least beside it. One that can not stay becomes numbers
    here, unless it is required to stay: only its weights tell.
    """
    if not plan.dense_stored:
        return
    native = native_rows()
    ordered = sorted(plan.dense_stored.values(), key=lambda one: -one.nbytes)
    rooms = [one.room() for one in ordered]
    with ShardReader() as reader:
        for one, room in zip(ordered, rooms, strict=True):
            module: Any = model.get_submodule(one.module)
            try:
                one.read(reader, plan.dtype, plan.checkpoint.gguf, room)
            except UnsupportedModel:
                if plan.dense_required:
                    raise
                model.set_submodule(one.module, _linear(_numbers(reader, plan, one.stored), module.bias))
                plan.expand_dense(one.module)
            else:
                module.store(native, room)


def _linear(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Linear:
    outputs, inputs = weight.shape
    with torch.device("meta"):
        linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight = nn.Parameter(weight)
    linear.register_parameter("bias", bias)
    return linear.eval()


def _dense_weights(plan: ExpertPlan) -> dict[str, torch.Tensor]:
    """Matrices that are stored in parts become numbers of the model's dtype."""
    with ShardReader() as reader:
        for one in plan.unused:
            if bool(typed(reader.read(one), one, codes=True).any()):
                is_bias = one.name.endswith(".bias")
                why = "the model has no such bias" if is_bias else "by quantization_config codes are symmetric"
                raise CorruptCheckpoint(f"{one.name} in {one.shard} is not zero, and {why}")
        dense = {name: _dense(reader, plan, name, stored) for name, stored in plan.dense.items()}
        for name, parts in plan.dense_in_parts.items():
            assert plan.storage is not None
            dense[name] = _numbers(reader, plan, [parts[part] for part in plan.storage.parts])
    return dense


def _dense(reader: ShardReader, plan: ExpertPlan, name: str, stored: StoredTensor) -> torch.Tensor:
    gguf = plan.checkpoint.gguf
    if gguf is None:
        return typed(reader.read(stored), stored)
    # Rounded piece by piece: as float32, codes of four bits would take eight times as much meanwhile.
    return gguf.restored(name, typed(reader.read(stored), stored, dtype=plan.dtype))


def _numbers(reader: ShardReader, plan: ExpertPlan, stored: Sequence[StoredTensor]) -> torch.Tensor:
    """Of a matrix in parts."""
    assert plan.storage is not None
    weights = read_parts(reader, plan.storage, stored, plan.dtype)
    return plan.storage.numbers(weights, plan.dtype)


def _strip(model: Any, layer: MoeLayer) -> None:
    """Drop the experts, and keep transformers from initialising them."""
    module = model.get_submodule(layer.name)
    if layer.stacked:
        for tensor in layer.tensors:
            del module._parameters[tensor.name]
    else:
        module._modules.clear()
        model.get_submodule(layer.name.rpartition(".")[0])._is_hf_initialized = True
    module._is_hf_initialized = True
