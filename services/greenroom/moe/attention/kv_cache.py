"""Keys and values of running sequences, under a byte budget that they can not outgrow.

A sequence reserves the rows of its whole life when it is admitted and gives all of them back when it leaves, so
none can run out on the way. What a reservation costs in real memory is what was written: on CPU each sequence's
block is an anonymous mapping of its own, whose pages exist from the first write on and vanish with it.
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

    Whatever the layer hands to its cache: with latent attention (MLA) one "head" of the compressed latent and one
    of the rotary part (DeepSeek-V2, §2.1.2), not the keys and values expanded from them.
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
        """Bytes that a reservation of ``rows`` tokens takes: whole pages."""
        page = mmap.PAGESIZE
        return -(-rows * self.bytes_per_token // page) * page

    def rows_within(self, nbytes: int) -> int:
        """The most tokens that one sequence can keep in ``nbytes``."""
        return nbytes // mmap.PAGESIZE * mmap.PAGESIZE // self.bytes_per_token


class SequenceKV:
    """One sequence's keys and values: room for ``capacity`` rows, of which the first ``length`` hold tokens.

    Rows at and behind ``length`` may have been written by a forward that failed; they count for nothing until
    ``commit``, and the next forward writes over them. That is the whole of a roll-back.
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
        """Put ``keys[1, heads, n, dim]`` and ``values`` behind the committed rows. Raises ValueError where the
        reservation or the shapes that were probed do not hold them.
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
        """The next ``rows`` rows hold tokens: the forward that wrote them is over."""
        if not 0 <= rows <= self.capacity - self.length:
            raise ValueError(f"{rows} more rows than {self.length} do not fit into {self.capacity}")
        self.length += rows

    def drop(self) -> None:
        """Give the memory up; the object is of no further use."""
        self._addresses = None
        self._keys.clear()
        self._values.clear()


class KVStore:
    """Hands out reservations so that together they never exceed ``budget_bytes``. Owned by one thread.

    The system may not have the memory that the budget allows: other programs hold it, or it is in pieces. Then the
    store is ``short`` until a reservation comes back, and has nothing free meanwhile. Nothing else of ours would help,
    and to ask a device for memory in every step is slow.

    Invariants, checked by ``audit``: reserved bytes are those of the reservations that are out; they and the peak
    are within the budget; every length is within its capacity; it is short only while some are out.
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
        """Room for ``rows`` tokens.

        Raises ValueError, changing nothing, where ``can_reserve`` says no. Raises KVMemoryError where the memory can
        not be had; then the store is short if any reservation is out.
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
        """Take a reservation back. Raises KeyError where it is not out."""
        self._out.remove(kv)
        self.reserved_bytes -= kv.nbytes
        self.short = False
        kv.drop()

    def audit(self) -> None:
        """Raises KVAuditError, saying which, where an invariant does not hold."""
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
    """A reservation within the budget for which the system has no memory now."""


class KVAuditError(GreenroomError):
    """The KV accounting contradicts itself: a defect of greenroom."""


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def mapped_bytes() -> int:
    """Bytes of KV memory, of all stores of this process, that are still mapped: what tests hold against leaks."""
    gc.collect()
    return sum(len(mapping) for mapping in _mappings)


def _lazy_memory(layout: KVLayout, nbytes: int) -> torch.Tensor:
    if layout.device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=layout.device).view(layout.dtype)
    # Not torch.empty: the C allocator keeps what it got back, and pages once touched would stay resident.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _mappings.add(mapping)
    return torch.frombuffer(mapping, dtype=layout.dtype)
