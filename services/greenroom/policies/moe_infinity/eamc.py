"""The expert activation matrix collection and how the nearest of its members is found (MoE-Infinity, §4.2, Eq. 1)."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.activation_matrix import TINY, Matrix, Rows, Tokens
from greenroom.policies.base.catalogue import Catalogue
from greenroom.policies.base.events import Artifact

EAMC: Final = "eamc"
"""The kind of artifact that holds one; its array is ``MATRICES``."""
MATRICES: Final = "matrices"


class Eamc:
    """Prior EAMs. Immutable.

    ``ratios[P, N]``: of each member every layer's tokens as shares.
    ``directions[l][experts of l, P]``: the same as vectors of length 1, which is what Eq. 1 compares.
    ``ranks[P, N]``: an expert's place among those of its layer by its share, from 0, ``NEVER`` where it has none: those
    below n are the member's n likeliest.
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
        self.ranks: NDArray[np.int16] = np.concatenate(
            [_ranks(self.ratios[:, span]) for span in catalogue.spans], axis=1
        )
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


NEVER: Final = np.iinfo(np.int16).max
"""The rank of who is not foreseen."""


def _ranks(shares: Matrix) -> NDArray[np.int16]:
    """``[P, experts]``: each one's place in its row, the largest first, of equal ones the first; ``NEVER`` for 0."""
    order = np.argsort(-shares, axis=1, kind="stable")
    found = np.empty(shares.shape, dtype=np.int16)
    np.put_along_axis(found, order, np.arange(shares.shape[1], dtype=np.int16)[None], axis=1)
    found[shares <= 0] = NEVER
    return found


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

    What is kept of an EAM are, of every layer, its products with the directions of all members, and its squared length:
    tokens that come add the directions of the experts that they went to. So a look-up is a sum over those experts, not
    a product of the layer's width, and no matrix product, whose threads would wait for those that compute.
    """

    def __init__(self, eamc: Eamc, room: int) -> None:
        self.eamc = eamc
        self._products: NDArray[np.float64] = np.zeros((room, eamc.catalogue.layers, len(eamc)))
        self._squares: NDArray[np.float64] = np.zeros((room, eamc.catalogue.layers))
        self._sums: NDArray[np.float64] = np.zeros((room, len(eamc)))  # of the cosines of all layers
        self.nearest: Rows = np.zeros(room, dtype=np.intp)
        """By row; where nothing is known yet, the first member."""

    def grow(self, room: int) -> None:
        """Have rows for so many."""
        more = room - len(self.nearest)
        if more > 0:
            self._products = _longer(self._products, more)
            self._squares = _longer(self._squares, more)
            self._sums = _longer(self._sums, more)
            self.nearest = _longer(self.nearest, more)

    def update(self, layer: int, rows: Rows, counts: Matrix) -> None:
        """``counts[S, experts of the layer]``: what the layers of ``rows`` have become, whatever they were."""
        exact = counts.astype(np.float64)
        products = np.einsum("se,ep->sp", exact, self.eamc.directions[layer])
        self._become(layer, rows, products, np.einsum("se,se->s", exact, exact), self._products[rows, layer])

    def add(self, layer: int, rows: Rows, added: Tokens, counts: Matrix) -> None:
        """The layer's tokens of a step whose sequences have ``rows``; ``counts[m]``: what each of ``added`` has come
        to."""
        owners, experts, tokens = added
        if not len(tokens):
            return
        gained = self.eamc.directions[layer][experts] * tokens[:, None]
        squares = tokens * (2.0 * counts - tokens)
        if len(rows) == 1:
            self._add_one(layer, int(rows[0]), gained.sum(axis=0), float(squares.sum()))
            return
        starts = np.concatenate((_START, np.flatnonzero(owners[1:] != owners[:-1]) + 1))
        if len(starts) < len(tokens):
            gained, squares = np.add.reduceat(gained, starts), np.add.reduceat(squares, starts)
        rows = rows[owners[starts]]
        before = self._products[rows, layer]
        self._become(layer, rows, before + gained, self._squares[rows, layer] + squares, before)

    def add_token(self, layer: int, row: int, experts: Rows, counts: Matrix) -> None:
        """One token of one sequence, by a top-k router: ``counts[k]``, of those that it went to, with it."""
        gained = self.eamc.directions[layer].take(experts, axis=0)
        if len(experts) == 1:
            self._add_one(layer, row, gained[0], 2 * counts.item() - 1)
        else:
            self._add_one(layer, row, np.add.reduce(gained), 2 * float(np.add.reduce(counts)) - len(experts))

    def _become(
        self,
        layer: int,
        rows: Rows,
        products: NDArray[np.float64],
        squares: NDArray[np.float64],
        before: NDArray[np.float64],
    ) -> None:
        shorter = np.maximum(self._squares[rows, layer], TINY) ** -0.5
        longer = np.maximum(squares, TINY) ** -0.5
        sums = self._sums[rows] + (products * longer[:, None] - before * shorter[:, None])
        self._products[rows, layer] = products
        self._squares[rows, layer] = squares
        self._sums[rows] = sums
        self.nearest[rows] = sums.argmax(axis=1)

    def _add_one(self, layer: int, row: int, gained: Matrix, squares: float) -> None:
        products, sums = self._products[row, layer], self._sums[row]
        before = float(self._squares[row, layer])
        after = self._squares[row, layer] = before + squares
        if before:
            sums -= products * before**-0.5
        products += gained
        sums += products * after**-0.5
        self.nearest[row] = sums.argmax()

    def clear(self, row: int) -> None:
        """Its EAM has ended."""
        for kept in (self._products, self._squares, self._sums, self.nearest):
            kept[row] = 0


_START: Final = np.zeros(1, dtype=np.intp)
_T = TypeVar("_T", bound=np.generic)


def _longer(kept: NDArray[_T], rows: int) -> NDArray[_T]:
    """With so many more, of zeros."""
    return np.concatenate((kept, np.zeros((rows, *kept.shape[1:]), dtype=kept.dtype)))
