"""Keys and values of running sequences, within a byte budget.

A sequence reserves the rows of its prompt when it is admitted, grows as it generates, and gives everything back when it
leaves. Its rows lie at contiguous addresses all the time (``kv_memory``), so attention reads them as they are.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError
from greenroom.core.units import format_bytes
from greenroom.experts.copying.device_errors import is_out_of_memory
from greenroom.moe.attention.kv_layout import STEP_ROWS, KVLayout
from greenroom.moe.attention.kv_memory import KVMemory


class SequenceKV:
    """One sequence's keys and values: ``capacity`` rows, of which the first ``length`` hold tokens.

    It may grow to ``most`` rows. ``stride``: from one head's first row to the next one's, in rows. A forward writes
    behind ``length``, and its rows count only after ``commit``. After a failed forward the next one overwrites them, so
    nothing needs to be rolled back.
    """

    __slots__ = (
        "_addresses",
        "_keys",
        "_layout",
        "_values",
        "capacity",
        "length",
        "memory",
        "most",
        "nbytes",
        "stride",
    )

    def __init__(
        self, layout: KVLayout, capacity: int, memory: KVMemory | None = None, most: int | None = None
    ) -> None:
        self._layout = layout
        self.memory = KVMemory(layout, capacity) if memory is None else memory
        self.most = capacity if most is None else most
        self.length = 0
        self._addresses: NDArray[np.int64] | None = None
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.stride = 0
        self._take(capacity)

    @property
    def addresses(self) -> NDArray[np.int64]:
        """``[layers, 2]``: where each layer's keys and values begin, ``[heads, stride, dim]`` each."""
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

    def grow(self) -> None:
        """Have room for more rows. Views that were read before are of the old place. For the store that it is of."""
        self._take(self._layout.grown(self.capacity, self.most))

    def _take(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = self._layout.nbytes(capacity)
        stride = capacity if capacity <= self._layout.dense_rows else self.memory.rows
        if stride != self.stride:
            self._move(stride)
        self.memory.hold(capacity)

    def _move(self, stride: int) -> None:
        """Have the heads' rows ``stride`` apart: those that hold tokens move, the last head's first."""
        if self.length:
            at = self.memory.numbers.data_ptr()
            starts = np.concatenate(([0], np.cumsum(self._layout.row_bytes[:-1]))).tolist()
            for start, row in zip(reversed(starts), reversed(self._layout.row_bytes), strict=True):
                ctypes.memmove(at + start * stride, at + start * self.stride, self.length * row)
        self.stride = stride
        self._addresses = None
        self._keys.clear()
        self._values.clear()
        offset = 0
        for layer in self._layout.layers:
            for heads, dim, views in (
                (layer.key_heads, layer.key_dim, self._keys),
                (layer.value_heads, layer.value_dim, self._values),
            ):
                numbers = self.memory.numbers[offset : offset + heads * stride * dim]
                views.append(numbers.view(1, heads, stride, dim))
                offset += heads * stride * dim

    def drop(self) -> None:
        """Let go of the memory. The object must not be used afterwards."""
        self._addresses = None
        self._keys.clear()
        self._values.clear()
        del self.memory


class KVStore:
    """Gives out reservations that together never exceed ``budget_bytes``. Owned by one thread.

    On the CPU a reservation may grow, and memory that was touched is kept for the next sequence while others run:
    touching a fresh page costs several times as much as writing to it. What is kept is part of the budget, and makes
    way for reservations. On a device a reservation has its ``most`` rows at once.

    The system may lack memory that the budget allows, because other programs hold it or it is fragmented. Then the
    store is ``short`` until a reservation comes back, and says that nothing is free. Asking again earlier would not
    help, and asking a device for memory in every step is slow.

    Invariants, checked by ``audit``: the reserved bytes are those of all reservations given out. They, the peak, and
    all memory that may have been touched are within the budget. Every length is within its capacity. The store is short
    only while reservations are out.
    """

    def __init__(self, layout: KVLayout, budget_bytes: int) -> None:
        self.layout = layout
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self.short = False
        self._out: set[SequenceKV] = set()
        self._kept: list[KVMemory] = []

    @property
    def grows(self) -> bool:
        """Whether a reservation may have fewer rows at first than at its end."""
        return self.layout.device.type == "cpu"

    @property
    def free_bytes(self) -> int:
        """What a new reservation may take."""
        return 0 if self.short else self.unreserved_bytes

    @property
    def unreserved_bytes(self) -> int:
        """What reservations may grow by, also while memory for another one can not be had."""
        return self.budget_bytes - self.reserved_bytes

    @property
    def touched_bytes(self) -> int:
        """Memory that may have been touched and is not given back to the system."""
        return sum(kv.memory.touched_bytes for kv in self._out) + sum(one.touched_bytes for one in self._kept)

    @property
    def max_rows(self) -> int:
        """The most rows that one sequence can ever reserve."""
        return self.layout.rows_within(self.budget_bytes)

    def __len__(self) -> int:
        return len(self._out)

    def first_rows(self, rows: int, most: int) -> int:
        """How many rows a sequence reserves that has ``rows`` tokens at its start and may have ``most`` at its end."""
        if not self.grows:
            return most
        return min(most, self.layout.rows_within(self.layout.nbytes(rows + STEP_ROWS)))

    def can_reserve(self, rows: int) -> bool:
        return self.layout.nbytes(rows) <= self.free_bytes

    def reserve(self, rows: int, most: int | None = None) -> SequenceKV:
        """Reserve ``rows`` tokens, which may grow to ``most`` (None: they do not grow).

        Raises ValueError if ``can_reserve`` says no, and changes nothing. Raises KVMemoryError if the system lacks the
        memory; the store is then short if any reservation is out.
        """
        if rows < 1 or (most is not None and most < rows):
            raise ValueError(f"a reservation of {rows} rows, at most {most}")
        if not self.can_reserve(rows):
            raise ValueError(f"{self.layout.nbytes(rows)} bytes asked for, {self.free_bytes} free")
        try:
            memory = self._memory(rows, most)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.short = bool(self._out)
            raise KVMemoryError(
                f"no memory could be had for the keys and values of {most or rows} tokens"
                f" ({format_bytes(self.layout.nbytes(most or rows))}), though the KV budget has room for them"
            ) from error
        kv = SequenceKV(self.layout, rows, memory, most)
        self._out.add(kv)
        self._count(kv.nbytes)
        return kv

    def growth_bytes(self, kv: SequenceKV) -> int:
        """What the next row of it takes beyond its reservation; 0 where it has room."""
        if kv.length < kv.capacity:
            return 0
        return self.layout.nbytes(self.layout.grown(kv.capacity, kv.most)) - kv.nbytes

    def grow(self, kv: SequenceKV) -> None:
        """Give it room for its next row. Raises ValueError where so much is not free, or it has its most rows; then
        nothing has changed.
        """
        wanted = self.growth_bytes(kv)
        free = self.unreserved_bytes
        if wanted > free or kv.capacity >= kv.most:
            raise ValueError(f"{wanted} more bytes asked for by one of {kv.most} rows at most, {free} free")
        kv.grow()
        self._count(wanted)

    def release(self, kv: SequenceKV) -> None:
        """Take a reservation back. Raises KeyError if it is not given out."""
        self._out.remove(kv)
        self.reserved_bytes -= kv.nbytes
        self.short = False
        if kv.memory.shared:
            self._kept.append(kv.memory)
        kv.drop()

    def give_back(self) -> None:
        """Give to the system what is kept for sequences to come."""
        self._kept.clear()

    def _memory(self, rows: int, most: int | None) -> KVMemory:
        """For a sequence of so many rows: the last that was given back and is large enough, else a new one."""
        if most is None or not self.grows:
            return KVMemory(self.layout, most or rows)
        for place in range(len(self._kept) - 1, -1, -1):
            if self._kept[place].rows >= most:
                return self._kept.pop(place)
        # In powers of two, so that it serves many of those to come.
        return KVMemory(self.layout, 1 << (most - 1).bit_length(), shared=True)

    def _count(self, nbytes: int) -> None:
        """So much more is reserved. What was touched and is not reserved makes way for it."""
        self.reserved_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        if not self.grows:
            return
        over = self.touched_bytes - self.budget_bytes
        while over > 0 and self._kept:
            over -= self._kept.pop(0).touched_bytes
        for kv in self._out:
            if over <= 0:
                break
            if kv.memory.touched_bytes > kv.nbytes:
                over -= kv.memory.touched_bytes - kv.nbytes
                kv.memory.trim(kv.capacity)

    def audit(self) -> None:
        """Raises KVAuditError, which names the invariant that does not hold."""
        out = sum(kv.nbytes for kv in self._out)
        if out != self.reserved_bytes:
            raise KVAuditError(f"{self.reserved_bytes} KV bytes are accounted for and {out} are out")
        if not self.reserved_bytes <= self.peak_bytes <= self.budget_bytes:
            raise KVAuditError(f"{self.reserved_bytes} KV bytes, at most {self.peak_bytes}, of {self.budget_bytes}")
        if self.touched_bytes > self.budget_bytes:
            raise KVAuditError(f"{self.touched_bytes} KV bytes may be touched, of {self.budget_bytes}")
        if self.short and not self._out:
            raise KVAuditError("KV memory is short, and no reservation is out that could end it")
        for kv in self._out:
            if not 0 <= kv.length <= kv.capacity:
                raise KVAuditError(f"{kv.length} KV rows in a reservation of {kv.capacity}")
            if not kv.capacity <= kv.most <= kv.memory.rows or kv.memory.touched_bytes < kv.nbytes:
                raise KVAuditError(f"a reservation of {kv.capacity} KV rows, at most {kv.most}, has other memory")


class KVMemoryError(GreenroomError):
    """The system has no memory now for a reservation within the budget."""


class KVAuditError(GreenroomError):
    """The accounting of keys and values contradicts itself: a defect of greenroom."""
