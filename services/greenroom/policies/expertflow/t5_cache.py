"""What the decoder of ``T5Paths`` keeps of running sequences: keys and values, within a bound of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_forms.t5 import T5Shape
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import format_bytes

Array = NDArray[np.float32]
Slots = NDArray[np.intp]

_NEVER: Final = -(2**40)
"""The position of a place that holds none: out of every window."""
MOST_SEQUENCES: Final = 4096
"""More do not run at once."""


class T5Cache:
    """A slot a sequence, as many as ``max_bytes`` holds. The one longest unused goes where none is free.

    A slot has ``ring`` places for the tokens, and one for each token of the prompt. Token p lies at place p modulo
    ``ring``, see ``T5Shape``.
    """

    def __init__(self, shape: T5Shape, max_bytes: int) -> None:
        """Raises InvalidConfig where there is no room for a sequence."""
        inside, layers = shape.inside, shape.decoder_layers
        self.ring = shape.ring
        a_slot = shape.sequence_bytes
        if max_bytes < a_slot:
            raise InvalidConfig("cache_bytes", format_bytes(max_bytes), f"at least {format_bytes(a_slot)}, a sequence")
        self.slots = min(MOST_SEQUENCES, max_bytes // a_slot)
        self.nbytes = self.slots * a_slot
        """Memory is taken as slots are used."""
        self.keys = np.zeros((layers, self.slots, self.ring, inside), dtype=np.float32)
        self.values = np.zeros_like(self.keys)
        self.prompt_keys = np.zeros((layers, self.slots, shape.prompt, inside), dtype=np.float32)
        self.prompt_values = np.zeros_like(self.prompt_keys)
        self.prompt_lengths = np.zeros(self.slots, dtype=np.int64)
        self.positions = np.full((self.slots, self.ring), _NEVER, dtype=np.int64)
        """Of the token at each place."""
        self.lost = 0
        """Sequences that had to leave while they ran."""
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # the one longest unused first
        self._free = list(range(self.slots))[::-1]

    def find(self, sequence: int) -> int | None:
        """Its slot, and it counts as used; None where it has none."""
        slot = self._slot_of.get(sequence)
        if slot is not None:
            self._slot_of.move_to_end(sequence)
        return slot

    def take(self, sequence: int, prompt: list[tuple[Array, Array]]) -> int:
        """A slot for a sequence that has none, with each layer's keys and values of its prompt."""
        if not self._free:
            _, left = self._slot_of.popitem(last=False)
            self._free.append(left)
            self.lost += 1
        slot = self._free.pop()
        self._slot_of[sequence] = slot
        self.positions[slot] = _NEVER
        self.prompt_lengths[slot] = len(prompt[0][0])
        for layer, (keys, values) in enumerate(prompt):
            self.prompt_keys[layer, slot, : len(keys)] = keys
            self.prompt_values[layer, slot, : len(values)] = values
        return slot

    def leave(self, sequence: int) -> None:
        slot = self._slot_of.pop(sequence, None)
        if slot is not None:
            self._free.append(slot)

    def __len__(self) -> int:
        """Sequences that have a slot."""
        return len(self._slot_of)

    def place(self, slots: Slots, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where tokens at ``positions[B, T]``, one after the other, are to lie. What was at or behind them is
        forgotten: a sequence whose forward failed is asked for again from there."""
        behind = self.positions[slots] >= positions[:, :1]
        if behind.any():
            self.positions[slots] = np.where(behind, _NEVER, self.positions[slots])
        places: NDArray[np.int64] = positions % self.ring
        self.positions[slots[:, None], places] = positions
        return places

    def used(self, positions: NDArray[np.int64]) -> int:
        """So many places from the first on hold all that these tokens may attend to."""
        return min(self.ring, int(positions.max()) + 1)
