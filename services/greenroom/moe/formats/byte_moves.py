"""Bytes and bits of codes change places: compiled, since torch moves them one by one or in passes over memory."""

from __future__ import annotations

import torch

from greenroom.checkpoints import gguf_blocks
from greenroom.moe.native.rows import native_rows_or_none


def transposed(matrices: torch.Tensor) -> torch.Tensor:
    """Of ``uint8[n, rows, columns]`` ``[n, columns, rows]``. Torch takes ten times as long as what is compiled."""
    native = native_rows_or_none()
    if native is None:
        return matrices.transpose(1, 2).contiguous()
    count, rows, columns = matrices.shape
    into = torch.empty(count, columns, rows, dtype=torch.uint8)
    native.transpose_bytes(matrices.contiguous(), into)
    return into


def fields(data: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """As ``gguf_blocks.fields``. ``bits``: 4 or 2."""
    native = native_rows_or_none()
    if native is None:
        return gguf_blocks.fields(data, width, bits)
    rows, nbytes = data.shape
    into = torch.empty(rows, nbytes // width, 8 // bits, width, dtype=torch.uint8)
    native.spread_codes(data if data.stride(1) == 1 else data.contiguous(), width, bits, into)
    return into
