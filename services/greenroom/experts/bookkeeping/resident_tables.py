"""Who of a layer is on the device, and in RAM that computes where, as arrays for compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.catalogue import Catalogue


class Table:
    """One layer. ``here[1, E]``: whether an expert is on the device; ``addresses[E, n]``: of its n tensors, 0 where it
    is not, or not in RAM. Both are written anew in place.

    ``arrived``: indices of those that have come since the table was last taken, for whoever books them.
    """

    __slots__ = ("addresses", "arrived", "here")

    def __init__(self, experts: int, tensors: int) -> None:
        self.addresses: NDArray[np.int64] = np.zeros((experts, tensors), dtype=np.int64)
        self.here: Mask = np.zeros((1, experts), dtype=np.bool_)
        self.arrived: set[int] = set()


class Tables:
    """All layers' tables of a device tier. Only who came or went is written anew."""

    def __init__(self, catalogue: Catalogue, tiers: Tiers) -> None:
        self._catalogue = catalogue
        self._tiers = tiers
        self._tables: list[Table] = []

    def of(self, layer: int) -> Table:
        """As things are; valid until the owner of the engine books what lands, or evicts."""
        changed = self._tiers.device.changed
        if changed or not self._tables:
            self._follow(changed)
        return self._tables[layer]

    def _follow(self, changed: set[int]) -> None:
        catalogue, tiers = self._catalogue, self._tiers
        if not self._tables:
            counts = zip(catalogue.experts_per_layer.tolist(), tiers.tensors_by_layer, strict=True)
            self._tables = [Table(experts, tensors) for experts, tensors in counts]
        layers, indices = catalogue.layer_of, catalogue.index_of
        for key in changed:
            layer, index = int(layers[key]), int(indices[key])
            table = self._tables[layer]
            here = bool(tiers.device.resident[key])
            table.here[0, index] = here
            table.addresses[index] = 0
            if not here:
                table.arrived.discard(index)
                continue
            table.arrived.add(index)
            if tiers.in_ram:
                (weights,) = tiers.weights([key], layer)
                table.addresses[index] = [tensor.data_ptr() for tensor in weights]
        changed.clear()
