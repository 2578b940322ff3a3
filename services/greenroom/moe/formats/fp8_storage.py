"""Matrices in FP8 as checkpoints have them: a weight in E4M3, and beside it the scales by which it is multiplied.

DeepSeek-V3 and Qwen3-FP8 (``quant_method`` fp8) name these ``weight_scale_inv``, compressed-tensors and AutoFP8
``weight_scale``. They are numbers, or powers of two in 8 bits (E8M0; ``scale_fmt`` ue8m0). Scales of activations are
not needed: activations are not quantised here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.core.errors import CorruptCheckpoint
from greenroom.moe.formats.expert_format import BadCodes
from greenroom.moe.formats.fp8 import BLOCK, FP8_BLOCKS, FP8_ROWS
from greenroom.moe.formats.settings import names
from greenroom.moe.formats.stored_matrix import NotServed, Shipped

CODES: Final = "F8_E4M3"
_POWERS: Final = "F8_E8M0"
_SCALES: Final = ("F32", "BF16", "F16", _POWERS)
_E4M3: Final = ("e4m3", "e4m3fn", "float8_e4m3fn")
"""What settings call these codes: DeepSeek-V3 by the first name, MiniMax-M2 by torch's."""
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
        most = _numbers_of(scales).double().abs().max()
        if not bool(most.isfinite()):
            raise BadCodes(1, f"has a scale that is no number ({most.item()})")
        if most * _LARGEST > torch.finfo(dtype).max:
            raise BadCodes(1, f"has a scale of {most.item():.4g}, whose weights {dtype} lacks")

    def codes(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        codes, scales = parts
        return [codes, self._of_rows(_numbers_of(scales), len(codes)).contiguous()]

    def numbers(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = parts
        by_row = self._of_rows(_numbers_of(scales), len(codes))
        if self.blocks:
            by_row = by_row.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
        return (codes.view(torch.float8_e4m3fn).float() * by_row).to(dtype)

    def _of_rows(self, scales: torch.Tensor, outputs: int) -> torch.Tensor:
        """Those of each output: ``[outputs, groups]``."""
        if self.blocks:
            return scales.repeat_interleave(BLOCK, dim=0)[:outputs]
        return scales.reshape(-1, 1).expand(outputs, 1)

    def shipped(self, leaves_out: Callable[[str], bool]) -> Shipped:
        """Of a checkpoint that stores matrices so. Where some experts are numbers, all become numbers."""
        kept = FP8_BLOCKS if self.blocks else FP8_ROWS
        found = Shipped(kept, self, leaves_out, dense_format_of=lambda _: kept)

        def of(tensors: Mapping[str, StoredTensor]) -> Shipped:
            for name, one in tensors.items():
                if ".experts." in name and name.endswith(".weight") and one.is_float:
                    return found.only_expanded(f"{name} is stored as numbers, and others are not")
            return found

        return replace(found, of_tensors=of)


def _numbers_of(scales: torch.Tensor) -> torch.Tensor:
    """In float32."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales).float()


def fine_grained_fp8(settings: Mapping[str, Any]) -> Shipped:
    """What transformers' ``FineGrainedFP8Config`` says, and AutoFP8, which says nothing of blocks and has a scale a
    matrix. Raises NotServed for other blocks and other codes."""
    if settings.get("expert_dtype", "fp8") != "fp8":
        raise NotServed(f"its experts are {settings['expert_dtype']}")
    if (settings.get("fmt") or _E4M3[0]) not in _E4M3:
        raise NotServed(f"its codes are {settings['fmt']}, and e4m3 is served")
    left_out = [*names(settings.get("modules_to_not_convert")), *names(settings.get("ignored_layers"))]

    def leaves_out(module: str) -> bool:
        return any(name in module for name in left_out)

    block = settings.get("weight_block_size", [BLOCK, BLOCK])
    if block is None:
        return Fp8Storage("weight_scale_inv", blocks=False).shipped(leaves_out)
    if list(block) != [BLOCK, BLOCK]:
        raise NotServed(f"its scales are of blocks of {block}, and [{BLOCK}, {BLOCK}] are served")
    blocks = Fp8Storage("weight_scale_inv", blocks=True).shipped(leaves_out)
    if "weight_block_size" in settings:
        return blocks

    def of(tensors: Mapping[str, StoredTensor]) -> Shipped:
        parts = {name.rpartition(".")[2] for name in tensors}
        by_matrix = "weight_scale" in parts and "weight_scale_inv" not in parts
        found = Fp8Storage("weight_scale", blocks=False).shipped(leaves_out) if by_matrix else blocks
        return found if found.of_tensors is None else found.of_tensors(tensors)

    return replace(blocks, of_tensors=of)
