"""Attention of a step's rows by one compiled call a layer, whichever sequences and chunks they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.moe.attention.kv_cache import SequenceKV
from greenroom.moe.native.rows import NativeRows


class NewRows(Protocol):
    """Rows of a sequence behind those that its KV holds."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def kv(self) -> SequenceKV: ...


class CompiledAttention:
    """The attention of the ``chunks`` of a step.

    A row's result does not depend on other rows, so it is the same in any step and in any chunk. ``sinks``: it is taken
    for families alone that hand sinks to their attention function, as gpt-oss does, also in layers that have none.
    """

    def __init__(self, chunks: Sequence[NewRows], native: NativeRows, *, sinks: bool = False) -> None:
        self._native = native
        self._sinks = sinks
        counts = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)
        places = np.array([(chunk.kv.length, chunk.kv.capacity, chunk.kv.stride) for chunk in chunks], dtype=np.int64)
        over = places[:, 0] + counts > places[:, 1]
        if over.any():
            number = int(over.argmax())
            rows = places[number, 0] + counts[number]
            raise ValueError(f"{rows} rows do not fit into a reservation of {places[number, 1]}")
        self._owners = np.arange(len(chunks)).repeat(counts)
        rows = np.arange(len(self._owners))
        self._table = np.zeros((len(rows), 6), dtype=np.int64)  # see NativeRows.attention
        self._table[:, 0] = rows
        self._table[:, 3] = places[self._owners, 2]
        self._table[:, 4] = rows + (places[:, 0] - counts.cumsum() + counts)[self._owners]
        self._addresses = np.stack([chunk.kv.addresses for chunk in chunks], axis=1)  # [layers, chunks, 2]

    def supports(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: Mapping[str, Any]
    ) -> bool:
        """Whether it computes attention with such heads ``[1, heads, T, dim]`` and ``options``."""
        wide = self._native.attention_granularity
        return (
            query.dtype is torch.bfloat16
            and query.device.type == "cpu"
            and keys.shape[3] % wide == 0
            and values.shape[3] % wide == 0
            and options.get("softcap") is None
            and (_SINKS in options or not self._sinks)
            and _are_bf16(options.get(_SINKS))
            and not any(isinstance(value, torch.Tensor) and name not in _TENSORS for name, value in options.items())
        )

    def attend(
        self,
        layer: int,
        firsts: NDArray[np.int64],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """``[T, heads, value_dim]`` from ``[T, heads, dim]`` each. The new keys and values are written first.

        ``firsts[T]``: the first key that each row sees, of all up to its own; below 0: the row is left out.
        """
        table = self._table
        table[:, 1:3] = self._addresses[layer][self._owners]
        table[:, 5] = firsts
        if firsts.min() < 0:
            table = table[firsts >= 0]
        return self._run(table, query, keys, values, options, write=True)

    def attend_to(
        self,
        firsts: NDArray[np.int64],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """As ``attend``, of the last rows of one sequence whose ``keys[K, key heads, dim]`` are these.

        ``firsts[T]``: indices into them.
        """
        keys, values = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (keys, values))
        table = np.empty((len(firsts), 6), dtype=np.int64)
        table[:, 0] = np.arange(len(firsts))
        table[:, 1:4] = keys.data_ptr(), values.data_ptr(), len(keys)
        table[:, 4] = table[:, 0] + (len(keys) - len(firsts))
        table[:, 5] = firsts
        return self._run(table, query, keys, values, options, write=False)

    def _run(
        self,
        table: NDArray[np.int64],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: Mapping[str, Any],
        *,
        write: bool,
    ) -> torch.Tensor:
        if any(part.stride(2) != 1 for part in (query, keys, values)):
            query, keys, values = (part.contiguous() for part in (query, keys, values))
        output = torch.empty(*query.shape[:2], values.shape[2], dtype=query.dtype)
        scale, sinks = options.get("scaling"), options.get(_SINKS)
        if scale is None:
            scale = query.shape[2] ** -0.5
        self._native.attention(query, keys, values, table, output, scale, sinks=sinks, write=write)
        return output


def _are_bf16(sinks: torch.Tensor | None) -> bool:
    """Some families keep them in fp32, which the kernel does not read."""
    return sinks is None or sinks.dtype is torch.bfloat16


_SINKS = "s_aux"
_TENSORS = {"position_ids", _SINKS}
"""Options of attention functions that may be tensors: one that changes nothing here, and gpt-oss's sinks."""

SCORES_TOGETHER = 1 << 18
"""Scores that a thread holds, or those of one row and one key head if they are more: ``rows.cpp``."""
