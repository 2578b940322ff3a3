"""Matrices in FP8 as checkpoints have them: a weight in E4M3, and beside it the scales by which it is multiplied.

DeepSeek-V3 and Qwen3-FP8 (``quant_method`` fp8) name these ``weight_scale_inv``, compressed-tensors ``weight_scale``.
Scales of activations are not needed: activations are not quantised here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.core.errors import CorruptCheckpoint
from greenroom.moe.formats.expert_format import BadCodes
from greenroom.moe.formats.fp8 import BLOCK, FP8_BLOCKS, FP8_ROWS
from greenroom.moe.formats.stored_matrix import NotServed, Shipped

CODES: Final = "F8_E4M3"
_SCALES: Final = ("F32", "BF16", "F16")
_LARGEST: Final = 448.0
_NOT_A_NUMBER, _NEGATIVE_NOT_A_NUMBER = 0x7F, 0xFF


@dataclass(frozen=True)
class Fp8Storage:
    """``scale``: the name of the scales. ``blocks``: each is of 128 by 128 weights, else of an output or the matrix."""

    scale: str
    blocks: bool

    @property
    def parts(self) -> tuple[str, ...]:
        return "weight", self.scale

    def is_part(self, tensor: StoredTensor) -> bool:
        return tensor.dtype == CODES or tensor.name.endswith(f".{self.scale}")

    def check_headers(self, stored: Mapping[str, StoredTensor]) -> None:
        weight, scale = stored["weight"], stored[self.scale]
        if len(weight.shape) != 2 or weight.dtype != CODES:
            raise CorruptCheckpoint(
                f"{weight.name} in {weight.shard} has the shape {weight.shape} of {weight.dtype}, and {scale.name} "
                f"beside it is of a matrix of {CODES}"
            )
        allowed = self._scale_shapes(*weight.shape)
        if scale.dtype not in _SCALES or scale.shape not in allowed:
            raise CorruptCheckpoint(
                f"{scale.name} in {scale.shard} has the shape {scale.shape} of {scale.dtype}, and scales of a weight "
                f"of {weight.shape} have {' or '.join(map(str, allowed))} of {', '.join(_SCALES)}"
            )

    def _scale_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        if self.blocks:
            return ((-(-outputs // BLOCK), -(-inputs // BLOCK)),)
        return (), (1,), (1, 1), (outputs,), (outputs, 1)

    def check(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        codes, scales = parts
        # Both are the largest of all codes, with a sign and without.
        if int(codes.view(torch.int8).max()) == _NOT_A_NUMBER or int(codes.max()) == _NEGATIVE_NOT_A_NUMBER:
            raise BadCodes(0, "has a code that is no number")
        most = scales.double().abs().max()
        if not bool(most.isfinite()):
            raise BadCodes(1, f"has a scale that is no number ({most.item()})")
        if most * _LARGEST > torch.finfo(dtype).max:
            raise BadCodes(1, f"has a scale of {most.item():.4g}, whose weights {dtype} lacks")

    def codes(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        codes, scales = parts
        return [codes, self._of_rows(scales, len(codes)).float().contiguous()]

    def numbers(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = parts
        by_row = self._of_rows(scales, len(codes)).float()
        if self.blocks:
            by_row = by_row.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
        return (codes.view(torch.float8_e4m3fn).float() * by_row).to(dtype)

    def _of_rows(self, scales: torch.Tensor, outputs: int) -> torch.Tensor:
        """Those of each output: ``[outputs, groups]``."""
        if self.blocks:
            return scales.repeat_interleave(BLOCK, dim=0)[:outputs]
        return scales.reshape(-1, 1).expand(outputs, 1)


def fine_grained_fp8(settings: Mapping[str, Any]) -> Shipped:
    """What transformers' ``FineGrainedFP8Config`` says. Raises NotServed for other blocks and other codes."""
    block = settings.get("weight_block_size", [BLOCK, BLOCK])
    if settings.get("expert_dtype", "fp8") != "fp8":
        raise NotServed(f"its experts are {settings['expert_dtype']}")
    if settings.get("fmt", "e4m3") != "e4m3":
        raise NotServed(f"its codes are {settings['fmt']}, and e4m3 is served")
    if block is None:
        return Shipped(FP8_ROWS, Fp8Storage("weight_scale_inv", blocks=False))
    if list(block) != [BLOCK, BLOCK]:
        raise NotServed(f"its scales are of blocks of {block}, and [{BLOCK}, {BLOCK}] are served")
    return Shipped(FP8_BLOCKS, Fp8Storage("weight_scale_inv", blocks=True))
