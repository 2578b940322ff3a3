"""The expert activation matrix collection and how the nearest of its members is found (MoE-Infinity, §4.2, Eq. 1)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.activation_matrix import TINY, Matrix, Rows
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import Artifact

EAMC: Final = "eamc"
"""The kind of artifact that holds one; its array is ``MATRICES``."""
MATRICES: Final = "matrices"


class Eamc:
    """Prior EAMs. Immutable.

    ``ratios[P, N]``: of each member every layer's tokens as shares; ``used[P, N]``: those above 0.
    ``directions[l][experts of l, P]``: the same as vectors of length 1, which is what Eq. 1 compares.
    """

    def __init__(self, catalogue: Catalogue, matrices: NDArray[np.generic]) -> None:
        """``matrices[P, N]``: tokens by expert. Raises InvalidConfig where that is not their shape or there is none, or
        where they hold what is no count."""
        if matrices.ndim != 2 or matrices.shape[1] != catalogue.size or len(matrices) == 0:
            allowed = f"[members, {catalogue.size}]: {catalogue!r} has so many experts"
            raise InvalidConfig(MATRICES, tuple(matrices.shape), allowed)
        counts = matrices.astype(np.float32)
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise InvalidConfig(MATRICES, "negative numbers or none", "counts of tokens")
        self.catalogue = catalogue
        self.ratios = layer_shares(catalogue, counts)
        self.used: NDArray[np.bool_] = self.ratios > 0
        unit = unit_layers(catalogue, counts)
        self.directions: tuple[Matrix, ...] = tuple(
            np.ascontiguousarray(unit[:, span].T) for span in catalogue.spans
        )  # fmt: skip

    @classmethod
    def of_artifact(cls, catalogue: Catalogue, artifact: Artifact) -> Eamc:
        """Raises InvalidConfig where it is not one of this pool's."""
        matrices = artifact.arrays.get(MATRICES)
        if artifact.kind != EAMC or matrices is None:
            raise InvalidConfig("kind", artifact.kind, f"{EAMC}, with the array {MATRICES}")
        return cls(catalogue, matrices)

    def __len__(self) -> int:
        return len(self.ratios)


def layer_shares(catalogue: Catalogue, matrices: Matrix) -> Matrix:
    """``[P, N]``: each layer's part of each row divided by its sum; one of no tokens stays 0."""
    sums = np.add.reduceat(matrices, catalogue.first[:-1], axis=1)
    shares = matrices / np.maximum(sums, TINY)[:, catalogue.layer_of]
    return shares.astype(np.float32, copy=False)


def unit_layers(catalogue: Catalogue, matrices: Matrix) -> Matrix:
    """``[P, N]``: each layer's part of each row divided by its length; one of no tokens stays 0.

    The squared distance of two such rows over all layers is 2 L times Eq. 1's.
    """
    shares = layer_shares(catalogue, matrices)  # lengths of counts could exceed what a float32 holds
    lengths = np.sqrt(np.add.reduceat(np.square(shares), catalogue.first[:-1], axis=1))
    unit = shares / np.maximum(lengths, TINY)[:, catalogue.layer_of]
    return unit.astype(np.float32, copy=False)


def distance(catalogue: Catalogue, one: NDArray[np.number], other: NDArray[np.number]) -> float:
    """Eq. 1: 1 less the mean over all layers of the cosine of the two matrices' rows. A row of no tokens has the cosine
    0 to any other.
    """
    unit = unit_layers(catalogue, np.stack([one, other]).astype(np.float32))
    return 1 - float(np.dot(unit[0], unit[1])) / catalogue.layers


class NearestMembers:
    """The nearest member for each of several EAMs that grow layer by layer.

    What is kept of an EAM is its cosine to every member in every layer: a layer's tokens change that layer's only, and
    a look-up is one product of a layer's width by the number of members.
    """

    def __init__(self, eamc: Eamc, room: int) -> None:
        self.eamc = eamc
        layers, members = eamc.catalogue.layers, len(eamc)
        self._cosines: Matrix = np.zeros((room, layers, members), dtype=np.float32)
        self._sums: NDArray[np.float64] = np.zeros((room, members))
        self.nearest: Rows = np.zeros(room, dtype=np.intp)
        """By row; where nothing is known yet, the first member."""

    def grow(self, room: int) -> None:
        """Have rows for so many."""
        more = room - len(self.nearest)
        if more > 0:
            self._cosines = np.concatenate((self._cosines, np.zeros((more, *self._cosines.shape[1:]), np.float32)))
            self._sums = np.concatenate((self._sums, np.zeros((more, self._sums.shape[1]))))
            self.nearest = np.concatenate((self.nearest, np.zeros(more, dtype=np.intp)))

    def update(self, layer: int, rows: Rows, ratios: Matrix) -> None:
        """``ratios[S, experts of the layer]``: what the layers of ``rows`` have become, as shares of their tokens."""
        if len(rows) == 1:
            self._update_one(layer, int(rows[0]), ratios[0])
            return
        cosines = ratios @ self.eamc.directions[layer]
        cosines /= np.maximum(np.sqrt(np.einsum("se,se->s", ratios, ratios)), TINY)[:, None]
        sums = self._sums[rows] + (cosines - self._cosines[rows, layer])
        self._cosines[rows, layer] = cosines
        self._sums[rows] = sums
        self.nearest[rows] = sums.argmax(axis=1)

    def _update_one(self, layer: int, row: int, ratios: Matrix) -> None:
        cosines = ratios @ self.eamc.directions[layer]
        length = float(np.dot(ratios, ratios)) ** 0.5
        if length:
            cosines /= length
        before = self._cosines[row, layer]
        sums = self._sums[row]
        sums += cosines
        sums -= before
        before[:] = cosines
        self.nearest[row] = sums.argmax()

    def clear(self, row: int) -> None:
        """Its EAM has ended."""
        self._cosines[row] = 0
        self._sums[row] = 0
        self.nearest[row] = 0
