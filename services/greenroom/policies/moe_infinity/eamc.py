"""The expert activation matrix collection, and the search for its nearest member (MoE-Infinity, §4.2, Eq. 1)."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.activation_matrix import TINY, Matrix, Rows, Tokens
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue

EAMC: Final = "eamc"
"""The kind of artifact that holds a collection; its array is ``MATRICES``."""
MATRICES: Final = "matrices"


class Eamc:
    """Prior EAMs. Immutable.

    ``ratios[P, N]``: every layer's tokens of each member, as shares. ``directions[l][experts of l, P]``: the same as
    vectors of length 1, which Eq. 1 compares. ``ranks[P, N]``: an expert's rank in its layer by share, from 0;
    ``NEVER`` where its share is 0. Ranks below n are the member's n likeliest experts.
    """

    def __init__(self, catalogue: Catalogue, matrices: NDArray[np.generic]) -> None:
        """``matrices[P, N]``: tokens by expert. Raises InvalidConfig for another shape, for no member, and for entries
        that are no counts."""
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
        """Raises InvalidConfig for an artifact of another kind or pool."""
        matrices = artifact.arrays.get(MATRICES)
        if artifact.kind != EAMC or matrices is None:
            raise InvalidConfig("kind", artifact.kind, f"{EAMC}, with the array {MATRICES}")
        return cls(catalogue, matrices)

    def __len__(self) -> int:
        return len(self.ratios)


NEVER: Final = np.iinfo(np.int16).max
"""The rank of an expert that is not predicted."""


def _ranks(shares: Matrix) -> NDArray[np.int16]:
    """``[P, experts]``: each entry's rank in its row, the largest first, of equals the first; ``NEVER`` for 0."""
    order = np.argsort(-shares, axis=1, kind="stable")
    found = np.empty(shares.shape, dtype=np.int16)
    np.put_along_axis(found, order, np.arange(shares.shape[1], dtype=np.int16)[None], axis=1)
    found[shares <= 0] = NEVER
    return found


def layer_shares(catalogue: Catalogue, matrices: Matrix) -> Matrix:
    """``[P, N]``: each layer's part of each row divided by its sum; a part without tokens stays 0."""
    sums = np.add.reduceat(matrices, catalogue.first[:-1], axis=1)
    shares = matrices / np.maximum(sums, TINY)[:, catalogue.layer_of]
    return shares.astype(np.float32, copy=False)


def unit_layers(catalogue: Catalogue, matrices: Matrix) -> Matrix:
    """``[P, N]``: each layer's part of each row divided by its length; a part without tokens stays 0.

    The squared distance of two such rows over all layers is 2 L times Eq. 1's.
    """
    shares = layer_shares(catalogue, matrices)  # lengths of counts could exceed what a float32 holds
    lengths = np.sqrt(np.add.reduceat(np.square(shares), catalogue.first[:-1], axis=1))
    unit = shares / np.maximum(lengths, TINY)[:, catalogue.layer_of]
    return unit.astype(np.float32, copy=False)


def distance(catalogue: Catalogue, one: NDArray[np.number], other: NDArray[np.number]) -> float:
    """Eq. 1: 1 less the mean over all layers of the cosine of the two matrices' rows. The cosine with a row without
    tokens is 0.
    """
    unit = unit_layers(catalogue, np.stack([one, other]).astype(np.float32))
    return 1 - float(np.dot(unit[0], unit[1])) / catalogue.layers


class NearestMembers:
    """The nearest member for each of several EAMs that grow layer by layer.

    For every layer of an EAM it keeps the products with the directions of all members, and the squared length. New
    tokens add the directions of their experts. So a look-up is a sum over those experts, not over the layer's width. It
    is no matrix product either, whose threads would wait for those that compute.
    """

    def __init__(self, eamc: Eamc, room: int) -> None:
        self.eamc = eamc
        self._products: NDArray[np.float64] = np.zeros((room, eamc.catalogue.layers, len(eamc)))
        self._squares: NDArray[np.float64] = np.zeros((room, eamc.catalogue.layers))
        self._sums: NDArray[np.float64] = np.zeros((room, len(eamc)))  # of the cosines of all layers
        self.nearest: Rows = np.zeros(room, dtype=np.intp)
        """By row; the first member where the row has no tokens yet."""

    def grow(self, room: int) -> None:
        """Make it at least ``room`` rows."""
        more = room - len(self.nearest)
        if more > 0:
            self._products = _longer(self._products, more)
            self._squares = _longer(self._squares, more)
            self._sums = _longer(self._sums, more)
            self.nearest = _longer(self.nearest, more)

    def update(self, layer: int, rows: Rows, counts: Matrix) -> None:
        """Set a layer of ``rows`` to ``counts[S, experts of the layer]``, whatever it was."""
        exact = counts.astype(np.float64)
        products = np.einsum("se,ep->sp", exact, self.eamc.directions[layer])
        self._become(layer, rows, products, np.einsum("se,se->s", exact, exact), self._products[rows, layer])

    def add(self, layer: int, rows: Rows, added: Tokens, counts: Matrix) -> None:
        """Add a layer's tokens of a step whose sequences have ``rows``. ``counts[m]``: the new count of each of
        ``added``."""
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
        """Add one token of one sequence. ``counts[k]``: the new counts of its k experts."""
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
        """Empty the row of an ended sequence."""
        for kept in (self._products, self._squares, self._sums, self.nearest):
            kept[row] = 0


_START: Final = np.zeros(1, dtype=np.intp)
_T = TypeVar("_T", bound=np.generic)


def _longer(kept: NDArray[_T], rows: int) -> NDArray[_T]:
    """The array with ``rows`` more rows of zeros."""
    return np.concatenate((kept, np.zeros((rows, *kept.shape[1:]), dtype=kept.dtype)))
