"""Keys and values of running sequences, within a byte budget.

A sequence reserves all rows that it may ever need when it is admitted, and gives them back when it leaves. So no
sequence can run out of rows. A reservation only takes the memory of the rows that were written: on the CPU each
sequence's block is an anonymous mapping, whose pages exist from the first write until the sequence leaves.
"""

from __future__ import annotations

import gc
import mmap
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError
from greenroom.core.units import format_bytes
from greenroom.experts.copying.device_errors import is_out_of_memory


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
    """What a model keeps of one token, layer by layer."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.elements for layer in self.layers) * self.dtype.itemsize

    def nbytes(self, rows: int) -> int:
        """Bytes that a reservation of ``rows`` tokens takes, in whole pages."""
        page = mmap.PAGESIZE
        return -(-rows * self.bytes_per_token // page) * page

    def rows_within(self, nbytes: int) -> int:
        """The most tokens that one sequence can keep in ``nbytes``."""
        return nbytes // mmap.PAGESIZE * mmap.PAGESIZE // self.bytes_per_token


class SequenceKV:
    """One sequence's keys and values: ``capacity`` rows, of which the first ``length`` hold tokens.

    A forward writes behind ``length``, and its rows count only after ``commit``. After a failed forward the next one
    overwrites them, so nothing needs to be rolled back.
    """

    __slots__ = ("_addresses", "_keys", "_values", "capacity", "length", "nbytes")

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.nbytes = layout.nbytes(capacity)
        numbers = _lazy_memory(layout, self.nbytes)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        offset = 0
        for layer in layout.layers:
            for heads, dim, views in (
                (layer.key_heads, layer.key_dim, self._keys),
                (layer.value_heads, layer.value_dim, self._values),
            ):
                views.append(numbers[offset : offset + heads * capacity * dim].view(1, heads, capacity, dim))
                offset += heads * capacity * dim
        self._addresses: NDArray[np.int64] | None = None

    @property
    def addresses(self) -> NDArray[np.int64]:
        """``[layers, 2]``: where each layer's keys and values begin, ``[heads, capacity, dim]`` each."""
        if self._addresses is None:
            pairs = zip(self._keys, self._values, strict=True)
            self._addresses = np.array([(keys.data_ptr(), values.data_ptr()) for keys, values in pairs])
        return self._addresses

    @property
    def layers(self) -> int:
        return len(self._keys)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``keys[1, heads, n, dim]`` and ``values`` behind the committed rows. Raises ValueError if they exceed
        the reservation or do not have the probed shapes.
        """
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise ValueError(f"{stop} rows do not fit into a reservation of {self.capacity}")
        own_keys, own_values = self._keys[layer], self._values[layer]
        if keys.shape[1::2] != own_keys.shape[1::2] or values.shape[1::2] != own_values.shape[1::2]:
            raise ValueError(f"layer {layer} keeps {tuple(own_keys.shape)}, not {tuple(keys.shape)}")
        own_keys[:, :, self.length : stop] = keys
        own_values[:, :, self.length : stop] = values

    def read(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the rows ``[first, stop)``: ``[1, heads, stop - first, dim]`` each."""
        return self._keys[layer][:, :, first:stop], self._values[layer][:, :, first:stop]

    def commit(self, rows: int) -> None:
        """Count the next ``rows`` rows as tokens, because the forward that wrote them has succeeded."""
        if not 0 <= rows <= self.capacity - self.length:
            raise ValueError(f"{rows} more rows than {self.length} do not fit into {self.capacity}")
        self.length += rows

    def drop(self) -> None:
        """Free the memory. The object must not be used afterwards."""
        self._addresses = None
        self._keys.clear()
        self._values.clear()


class KVStore:
    """Gives out reservations that together never exceed ``budget_bytes``. Owned by one thread.

    The system may lack memory that the budget allows, because other programs hold it or it is fragmented. Then the
    store is ``short`` until a reservation comes back, and says that nothing is free. Asking again earlier would not
    help, and asking a device for memory in every step is slow.

    Invariants, checked by ``audit``: the reserved bytes are those of all reservations given out. They and the peak are
    within the budget. Every length is within its capacity. The store is short only while reservations are out.
    """

    def __init__(self, layout: KVLayout, budget_bytes: int) -> None:
        self.layout = layout
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self.short = False
        self._out: set[SequenceKV] = set()

    @property
    def free_bytes(self) -> int:
        return 0 if self.short else self.budget_bytes - self.reserved_bytes

    @property
    def max_rows(self) -> int:
        """The most rows that one sequence can ever reserve."""
        return self.layout.rows_within(self.budget_bytes)

    def __len__(self) -> int:
        return len(self._out)

    def can_reserve(self, rows: int) -> bool:
        return self.layout.nbytes(rows) <= self.free_bytes

    def reserve(self, rows: int) -> SequenceKV:
        """Reserve ``rows`` tokens.

        Raises ValueError if ``can_reserve`` says no, and changes nothing. Raises KVMemoryError if the system lacks the
        memory; the store is then short if any reservation is out.
        """
        if rows < 1:
            raise ValueError(f"a reservation of {rows} rows")
        if not self.can_reserve(rows):
            raise ValueError(f"{self.layout.nbytes(rows)} bytes asked for, {self.free_bytes} free")
        try:
            kv = SequenceKV(self.layout, rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.short = bool(self._out)
            raise KVMemoryError(
                f"no memory could be had for the keys and values of {rows} tokens"
                f" ({format_bytes(self.layout.nbytes(rows))}), though the KV budget has room for them"
            ) from error
        self._out.add(kv)
        self.reserved_bytes += kv.nbytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return kv

    def release(self, kv: SequenceKV) -> None:
        """Take a reservation back. Raises KeyError if it is not given out."""
        self._out.remove(kv)
        self.reserved_bytes -= kv.nbytes
        self.short = False
        kv.drop()

    def audit(self) -> None:
        """Raises KVAuditError, which names the invariant that does not hold."""
        out = sum(kv.nbytes for kv in self._out)
        if out != self.reserved_bytes:
            raise KVAuditError(f"{self.reserved_bytes} KV bytes are accounted for and {out} are out")
        if not self.reserved_bytes <= self.peak_bytes <= self.budget_bytes:
            raise KVAuditError(f"{self.reserved_bytes} KV bytes, at most {self.peak_bytes}, of {self.budget_bytes}")
        if self.short and not self._out:
            raise KVAuditError("KV memory is short, and no reservation is out that could end it")
        for kv in self._out:
            if not 0 <= kv.length <= kv.capacity:
                raise KVAuditError(f"{kv.length} KV rows in a reservation of {kv.capacity}")


class KVMemoryError(GreenroomError):
    """The system has no memory now for a reservation within the budget."""


class KVAuditError(GreenroomError):
    """The accounting of keys and values contradicts itself: a defect of greenroom."""


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def mapped_bytes() -> int:
    """Bytes of KV memory of all stores of this process that are still mapped. Tests check it for leaks."""
    gc.collect()
    return sum(len(mapping) for mapping in _mappings)


def _lazy_memory(layout: KVLayout, nbytes: int) -> torch.Tensor:
    if layout.device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=layout.device).view(layout.dtype)
    # Not torch.empty: the C allocator keeps freed memory, and pages that were touched would stay resident.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _mappings.add(mapping)
    return torch.frombuffer(mapping, dtype=layout.dtype)
