"""A GGUF file as a checkpoint: its configuration, and its tensors under transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import WeightConverter

from greenroom.checkpoints.gguf_blocks import SERVED
from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.gguf.header import GgufTensor
from greenroom.gguf.shards import GgufModel, read_gguf
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.gguf_storage import gguf_format
from greenroom.moe.formats.mxfp4 import BLOCK as MXFP4_BLOCK
from greenroom.moe.loading.gguf_families import (
    GgufFamily,
    configuration,
    family_named,
    halves_paired,
    places,
    shape_of,
)
from greenroom.text.gguf_tokenizer import end_token_ids

_PLAIN: Final = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """What a file has otherwise than transformers. ``format``: of records in which its experts stay as they are.
    ``heads``: of dense tensors, by transformers' name, whose rows are pairs side by side."""

    family: GgufFamily
    format: ExpertFormat
    heads: Mapping[str, int] = field(repr=False)

    def converters(self) -> list[WeightConverter]:
        """New ones: they keep a state."""
        return self.family.converters()

    def restored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A dense tensor as transformers has it."""
        return halves_paired(tensor, self.heads[name]) if name in self.heads else tensor


@dataclass(frozen=True, slots=True)
class GgufParts:
    """``config``: transformers' own. ``tensors``: by transformers' names; their own ones are the file's."""

    config: Any
    tensors: Mapping[str, StoredTensor]
    layout: GgufLayout


def read_gguf_checkpoint(path: Path) -> GgufParts:
    """Reads no weights. Raises CorruptCheckpoint for a file that is broken or contradicts itself, UnsupportedModel for
    what is not served, by key or tensor."""
    model = read_gguf(path)
    family = family_named(model.metadata.text("general.architecture"), model.metadata)
    placed = places(family, model.metadata, model.tensors)
    values = configuration(family, model.metadata, model.tensors)
    stored = {}
    for name, (own, dimensions) in placed.items():
        tensor = model.tensors[name]
        shape = shape_of(dimensions, values)
        if tuple(size for size in tensor.shape if size > 1) != tuple(size for size in shape if size > 1):
            raise CorruptCheckpoint(
                f"{name} in {tensor.shard} has the shape {tensor.shape}, and by the metadata {shape}"
            )
        stored[own] = _stored(tensor, shape)
    heads, rows = values["num_attention_heads"], values["head_dim"]
    if family.pairs_neighbours and rows % 2:
        raise CorruptCheckpoint(f"a head in {path} has {rows} numbers, which can not be paired")
    paired = {}
    if family.pairs_neighbours:
        by_part = {"q_proj": heads, "k_proj": values["num_key_value_heads"]}
        paired = {own: by_part[part] for own in stored for part in by_part if f".{part}." in own}
    return GgufParts(_config(model, family, values), stored, GgufLayout(family, _format(stored), paired))


def _format(stored: Mapping[str, StoredTensor]) -> ExpertFormat:
    types = {}
    clamped = whole = False
    for name, tensor in stored.items():
        if name.endswith(".gate_exps"):
            layer = name.removesuffix(".gate_exps")
            down = stored.get(f"{layer}.down_exps") or stored[f"{layer}.down_proj"]
            clamped = f"{layer}.down_exps" in stored
            whole = not any(width % MXFP4_BLOCK for width in tensor.shape[1:])
            types[layer] = tensor.dtype, stored[f"{layer}.up_exps"].dtype, down.dtype
    # MXFP4's records are whole panels of outputs too.
    return PLAIN_FORMAT if clamped and not whole else gguf_format(types, clamped=clamped)


def _stored(tensor: GgufTensor, shape: tuple[int, ...]) -> StoredTensor:
    kind = tensor.type
    if kind.name not in (*SERVED, *_PLAIN):
        raise UnsupportedModel(
            f"{tensor.name} in {tensor.shard} is stored as {kind.name}; served: {', '.join((*_PLAIN, *SERVED))}: "
            "make a file of one of these (llama.cpp's llama-quantize makes Q4_K_M), or use the checkpoint that it was "
            "made from"
        )
    return StoredTensor(
        *(tensor.name, tensor.shard, kind.name, shape, tensor.offset, tensor.nbytes),
        block=None if kind.is_plain else kind,
        state=tensor.state,
    )


def _config(model: GgufModel, family: GgufFamily, values: Mapping[str, Any]) -> Any:
    metadata = model.metadata
    ids = {
        name: metadata.count(f"tokenizer.ggml.{key}", None, least=0)
        for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id"))
    }
    try:
        return CONFIG_MAPPING[family.model_type](
            **values, **ids, eos_token_id=list(end_token_ids(metadata)) or None, dtype=_dtype(model)
        )
    except Exception as error:  # the metadata is untrusted, so transformers may raise anything
        raise CorruptCheckpoint(f"the metadata of {model.path} are not valid: {error}") from error


def _dtype(model: GgufModel) -> str:
    """What to compute in: the type of the matrices, or bfloat16 where they are codes."""
    kinds = {tensor.type.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    if not kinds <= {*_PLAIN} or "BF16" in kinds:
        return "bfloat16"
    return "float16" if "F16" in kinds else "float32"
