"""Which quantised checkpoints of MoE models are served, and how transformers finds gpt-oss's tensors.

Most methods store a matrix in tensors beside each other (``formats/stored_matrix.py``). gpt-oss has its experts in
MXFP4: blocks of 32 numbers of 4 bits, with a scale of 8 bits. transformers' own dequantiser makes numbers of them one
by one while they are packed, unless they are to stay as they are (``moe/formats``). Its dense weights are not
quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from greenroom.checkpoints.quantized import advice, quantization_method, settings_of
from greenroom.core.errors import UnsupportedModel
from greenroom.moe.formats.registry import shipped_of
from greenroom.moe.formats.stored_matrix import NotServed

_MXFP4 = "mxfp4"
_MXFP4_FAMILIES = ("gpt_oss",)


def refuse_quantized(config: Mapping[str, Any], model: str) -> None:
    """Raises UnsupportedModel, with advice, if the checkpoint is quantised in a way that is not served."""
    method = quantization_method(config)
    if method is None:
        return
    why = ""
    try:
        if shipped_of(config) is not None and (method != _MXFP4 or config.get("model_type") in _MXFP4_FAMILIES):
            return
    except NotServed as error:
        why = f", and {error}"
    raise UnsupportedModel(
        f"{model} is quantised ({method}){why}; greenroom serves checkpoints in float32, bfloat16 and float16, in FP8 "
        "with scales of 128 by 128 weights, of outputs or of matrices, in GPTQ's, AWQ's and compressed-tensors' codes "
        f"of 4 bits, and gpt-oss in MXFP4: {advice(method)}"
    )


class DequantizeMxfp4(ConversionOps):  # type: ignore[misc]
    """Blocks ``[experts, out, in/32, 16]`` and scales ``[experts, out, in/32]`` to ``[experts, in, out]``."""

    dim = 1  # it acts along dimensions from this one on, so experts stay independent

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        (blocks,), (scales,) = (input_dict[pattern] for pattern in source_patterns)
        if blocks.is_meta:
            experts, out, groups, packed = blocks.shape
            made = torch.empty((experts, groups * packed * 2, out), dtype=self._dtype, device="meta")
        else:
            made = convert_moe_packed_tensors(blocks, scales, dtype=self._dtype)
        return {target_patterns[0]: made}


def is_dequantizing(converter: WeightConverter) -> bool:
    """Whether it is one of ``dequantizing_converters``."""
    return isinstance(converter.operations[0], DequantizeMxfp4)


def dequantizing_converters(config: Any, dtype: torch.dtype) -> list[WeightConverter]:
    """The converters that transformers' mapping lacks for a checkpoint in MXFP4. None for any other."""
    if quantization_method(settings_of(config)) != _MXFP4:
        return []
    return [
        WeightConverter(
            source_patterns=[rf"\.experts\.{name}_blocks", rf"\.experts\.{name}_scales"],
            target_patterns=f".experts.{name}",
            operations=[DequantizeMxfp4(dtype)],
        )
        for name in ("gate_up_proj", "down_proj")
    ]
