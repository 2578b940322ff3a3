"""The layout that compressed-tensors calls pack-quantized, as llm-compressor writes it.

A word of 32 bits in ``weight_packed`` ``[outputs, inputs / 8]`` has eight neighbouring inputs, one in
``weight_zero_point`` ``[outputs / 8, groups]`` the zero points of eight neighbouring outputs, the first one in the
lowest bits; older ones have zero points of 8 bits. Codes and zero points are stored plus 8. ``weight_scale`` is
``[outputs, groups]``, ``weight_shape`` has outputs and inputs. Symmetric matrices have no zero points. ``weight_g_idx``
``[inputs]`` has the group of each input: with ``actorder: group`` inputs were quantised in the order of their
activations, and so grouped. Where it is -1 throughout it says nothing. ``actorder: weight`` changes which codes there
are and not what they mean.

Its numbers are those of compressed-tensors' ``dequantize`` to the bit if they are made in the scales' dtype, in which
that multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.moe.formats.expert_format import BadCodes
from greenroom.moe.formats.int4.matrix import (
    CODES_A_WORD,
    LARGEST,
    MIDDLE,
    SCALES,
    Int4Matrix,
    check_groups,
    check_header,
    check_scales,
    groups_in,
    in_order,
    unpacked,
)
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.formats.int4.storage import Int4Storage
from greenroom.moe.formats.settings import group_size
from greenroom.moe.formats.stored_matrix import NotServed, Shipped

_ORDERED: Final = {"group": True, "dynamic": True, "weight": False, "static": False}
"""By ``actorder``, of which each meaning has two names, whether groups are of inputs from everywhere."""


@dataclass(frozen=True)
class PackQuantizedStorage(Int4Storage):
    """``group_size``: -1 is all inputs (the strategy "channel"). ``symmetric``: there are no zero points. ``ordered``:
    by ``actorder``, groups are of inputs from everywhere."""

    group_size: int
    symmetric: bool
    ordered: bool

    @property
    def parts(self) -> tuple[str, ...]:
        zeros = () if self.symmetric else ("weight_zero_point",)
        order = ("weight_g_idx",) if self.ordered else ()
        return "weight_packed", "weight_scale", "weight_shape", *zeros, *order

    def check_headers(self, stored: Mapping[str, StoredTensor]) -> None:
        packed = stored["weight_packed"]
        check_header(packed, ("I32",))
        outputs, words = packed.shape
        groups = groups_in(packed, words * CODES_A_WORD, self.group_size)
        check_header(stored["weight_scale"], tuple(SCALES), (outputs, groups))
        check_header(stored["weight_shape"], ("I64", "I32"), (2,))
        if not self.symmetric:
            zeros = stored["weight_zero_point"]
            rows = outputs if zeros.dtype == "I8" else -(-outputs // CODES_A_WORD)
            check_header(zeros, ("I32", "I8"), (rows, groups))
        if self.ordered:
            check_header(stored["weight_g_idx"], ("I32", "I64"), (words * CODES_A_WORD,))

    def check(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        packed, scales, said = parts[:3]
        shape = len(packed), packed.shape[1] * CODES_A_WORD
        if tuple(said.tolist()) != shape:
            raise BadCodes(2, f"is {tuple(said.tolist())}, and the codes beside it are {shape}")
        zeros, groups = self._zeros(parts), self._groups(parts)
        if zeros is not None and zeros.dtype is torch.int8:
            outside = zeros[(zeros < -MIDDLE) | (zeros > LARGEST - MIDDLE)]
            if len(outside):
                raise BadCodes(3, f"has a zero point of {int(outside[0])}, and codes are -8 to 7")
        if groups is not None:
            check_groups(groups, scales.shape[1], len(parts) - 1)
        check_scales(scales, dtype, 1, lambda: self.numbers(parts, dtype))

    def matrix(self, parts: Sequence[torch.Tensor]) -> Int4Matrix:
        packed, scales = parts[:2]
        zeros, groups = self._zeros(parts), self._groups(parts)
        if zeros is not None and zeros.dtype is torch.int8:
            zeros = (zeros + MIDDLE).to(torch.uint8)
        elif zeros is not None:
            zeros = unpacked(zeros.t()).t()[: len(scales)].contiguous()
        trivial = groups is None or in_order(groups, scales.shape[1])
        return Int4Matrix(unpacked(packed), scales, zeros, None if trivial or groups is None else groups.long())

    def _zeros(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return None if self.symmetric else parts[3]

    def _groups(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return parts[-1] if self.ordered and not bool((parts[-1] == -1).all()) else None


def pack_quantized(
    settings: Mapping[str, Any], scheme: Mapping[str, Any], leaves_out: Callable[[str], bool]
) -> Shipped:
    """``scheme``: the one that compressed-tensors' ``settings`` have for all weights. Raises NotServed for any but
    codes of 4 bits with scales of groups or of outputs, and where more than the weights is quantised."""
    groups = settings["config_groups"].values()
    formats = sorted({str(group.get("format") or settings.get("format")) for group in groups})
    if formats != ["pack-quantized"]:
        raise NotServed(f"its format is {', '.join(formats)}: what is served in 4 bits is pack-quantized")
    if any(group.get(name) for group in groups for name in ("input_activations", "output_activations")):
        raise NotServed("its activations are quantised: what is served are quantised weights alone")
    if settings.get("kv_cache_scheme"):
        raise NotServed(
            "its keys and values are quantised (kv_cache_scheme): what is served are quantised weights alone"
        )
    strategy = scheme.get("strategy") or ("group" if scheme.get("group_size") else None)
    if strategy not in ("group", "channel"):
        raise NotServed(f"its scales are by {strategy}: what is served in 4 bits is one for each group or channel")
    storage = PackQuantizedStorage(
        -1 if strategy == "channel" else group_size(scheme),
        symmetric=bool(scheme.get("symmetric", True)),
        ordered=_is_ordered(scheme.get("actorder")),
    )
    kept = Int4(storage.group_size, zeros=not storage.symmetric, ordered=storage.ordered)
    return kept.shipped(storage, "weight_scale", leaves_out)


def _is_ordered(said: object) -> bool:
    if said is None or isinstance(said, bool):
        return bool(said)
    if (name := str(said).lower()) not in _ORDERED:
        raise NotServed(f"its actorder is {said!r}: what is served is {', '.join(_ORDERED)} or none")
    return _ORDERED[name]
