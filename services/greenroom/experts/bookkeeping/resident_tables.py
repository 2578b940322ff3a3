"""Which experts of a layer are resident, and where in RAM, as arrays for compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.expert_keys import Catalogue


class ResidentTable:
    """One layer with E experts of n tensors. Both arrays are updated in place.

    ``resident[1, E]``: whether the device holds the expert. ``addresses[E, n]``: of its tensors; 0 where the expert is
    not resident, or the device is not RAM. ``weights``: of all E, while all are resident and after they were asked for.
    ``arrived``: indices of the experts that have come since the engine last looked.
    """

    __slots__ = ("addresses", "arrived", "resident", "weights")

    def __init__(self, experts: int, tensors: int) -> None:
        self.addresses: NDArray[np.int64] = np.zeros((experts, tensors), dtype=np.int64)
        self.resident: Mask = np.zeros((1, experts), dtype=np.bool_)
        self.weights: list[ExpertWeights] | None = None
        self.arrived: set[int] = set()


class ResidentTables:
    """The tables of all layers of a device tier. Only entries of experts that came or went are updated."""

    def __init__(self, catalogue: Catalogue, tiers: Tiers) -> None:
        self._catalogue = catalogue
        self._tiers = tiers
        counts = zip(catalogue.experts_per_layer.tolist(), tiers.tensors_by_layer, strict=True)
        self._tables = [ResidentTable(experts, tensors) for experts, tensors in counts]

    def of(self, layer: int) -> ResidentTable:
        """Valid until the engine books what lands, or evicts."""
        changed = self._tiers.device.changed
        if changed:
            self._update(changed)
        return self._tables[layer]

    def weights(self, layer: int) -> list[ExpertWeights]:
        """The tensors of all experts of a layer, in order. All must be resident."""
        table = self.of(layer)
        if table.weights is None:
            span = self._catalogue.spans[layer]
            table.weights = list(self._tiers.weights(range(span.start, span.stop), layer))
        return table.weights

    def _update(self, changed: set[int]) -> None:
        catalogue, tiers = self._catalogue, self._tiers
        layers, indices = catalogue.layer_of, catalogue.index_of
        for key in changed:
            layer, index = int(layers[key]), int(indices[key])
            table = self._tables[layer]
            resident = bool(tiers.device.resident[key])
            table.resident[0, index] = resident
            table.addresses[index] = 0
            table.weights = None
            if not resident:
                table.arrived.discard(index)
                continue
            table.arrived.add(index)
            if tiers.in_ram:
                (weights,) = tiers.weights([key], layer)
                table.addresses[index] = [tensor.data_ptr() for tensor in weights]
        changed.clear()
