"""What a model keeps of a token, and how many bytes a sequence's tokens take."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from typing import Any

import torch

DENSE_PAGES = 4
"""Pages of rows up to which the rows of all heads lie side by side. They then take what they have, to one page of the
system. Beyond it each head takes whole pages of its own: at most a quarter more, and never moved again.
"""

STEP_ROWS = 16
"""A sequence grows by so many rows at least, and by an eighth: what is moved then is eight times what was written."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer keeps of one token: ``[key_heads, key_dim]`` and ``[value_heads, value_dim]``.

    With latent attention (MLA) a layer caches one "head" of the compressed latent and one of the rotary part
    (DeepSeek-V2, §2.1.2), not the keys and values expanded from them.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Numbers kept of one token."""
        return self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a model keeps of one token, layer by layer.

    ``page_rows``: the fewest rows of which each head's keys and values fill whole pages of the system. ``row_bytes``:
    of each head's keys in a layer, then of each head's values, layer by layer.
    """

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    device: torch.device
    bytes_per_token: int = field(init=False, compare=False)
    page_rows: int = field(init=False, compare=False)
    row_bytes: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        row_bytes: list[int] = []
        for layer in self.layers:
            for heads, dim in ((layer.key_heads, layer.key_dim), (layer.value_heads, layer.value_dim)):
                row_bytes += [dim * self.dtype.itemsize] * heads
        object.__setattr__(self, "row_bytes", tuple(row_bytes))
        object.__setattr__(self, "bytes_per_token", sum(row_bytes))
        pages = [mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row) for row in row_bytes if row]
        object.__setattr__(self, "page_rows", max(pages, default=1))

    @property
    def dense_rows(self) -> int:
        """Up to how many rows the rows of all heads lie side by side."""
        return DENSE_PAGES * self.page_rows

    def nbytes(self, rows: int) -> int:
        """Bytes that a reservation of ``rows`` tokens takes, in whole pages."""
        if rows <= self.dense_rows:
            return -(-rows * self.bytes_per_token // mmap.PAGESIZE) * mmap.PAGESIZE
        return -(-rows // self.page_rows) * self.page_rows * self.bytes_per_token

    def rows_within(self, nbytes: int) -> int:
        """The most tokens that one sequence can keep in ``nbytes``."""
        rows = nbytes // mmap.PAGESIZE * mmap.PAGESIZE // self.bytes_per_token
        if rows <= self.dense_rows:
            return rows
        return max(self.dense_rows, nbytes // (self.page_rows * self.bytes_per_token) * self.page_rows)

    def grown(self, capacity: int, most: int) -> int:
        """The rows that a reservation of ``capacity`` has once it has grown, of ``most`` that it may have."""
        rows = capacity + 1 if capacity >= self.dense_rows else capacity + max(STEP_ROWS, capacity // 8)
        return min(most, self.rows_within(self.nbytes(rows)))


def head_widths(text: Any, layout: KVLayout) -> set[tuple[int, int]]:
    """The widths of a head's keys and values, as layers attend to them, of a model with this text configuration.

    Latent attention expands what it keeps.
    """
    if getattr(text, "kv_lora_rank", None) is not None and hasattr(text, "v_head_dim"):
        return {(text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim)}
    return {(layer.key_dim, layer.value_dim) for layer in layout.layers}
