"""What a token's picks in earlier layers say of its picks in later ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.path_file import LAYERS_AHEAD, targets_of, weights_of
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue

Array = NDArray[np.float32]
Sums = NDArray[np.int16]
Weights = NDArray[np.int8]

PATH: Final = "path"
"""The kind of artifact that holds the weights, and the kind of prediction that they give."""

_MOST: Final = 127
_MOST_SUM: Final = 32_000
"""Below 2¹⁵ by what the rounding of a thousand weights adds up to."""
_ROWS_AT_ONCE: Final = 16
"""Their weights stay in a core's cache until they are added up."""


class PathWeights:
    """The weights as bytes, whole numbers of a common ``unit``: what a layer costs is the memory that is read.

    What is asked at one layer lies side by side: of each layer l a block with a column for every expert of l + 1,
    foreseen one layer ahead, and then for every expert of l + 2, two ahead. ``into[s] [E_s + 1, M_s]``: what a pick of
    each expert of layer s adds to the columns ``reach[s]``; the last row, of no pick, is 0. ``bias[C]``: of all
    columns. ``sequence[C]``: what the logit of the row's sequence counts there.
    """

    def __init__(self, catalogue: Catalogue, window: int, flat: NDArray[Any], bias: Array, sequence: Array) -> None:
        """``flat``: as in ``PathFile``."""
        self.catalogue = catalogue
        self.window = window
        widths: list[int] = catalogue.experts_per_layer.tolist()
        self._block = np.cumsum(
            [0, *(sum(widths[layer + 1 : layer + 1 + LAYERS_AHEAD]) for layer in range(len(widths)))]
        )
        self.columns = int(self._block[-1])
        self.reach = [
            slice(int(self._block[layer]), int(self._block[min(layer + window, catalogue.layers)]))
            for layer in range(catalogue.layers)
        ]
        in_columns = np.zeros(self.columns, dtype=np.float32)
        self.sequence: Array = np.zeros(self.columns, dtype=np.float32)
        for layer in range(catalogue.layers):
            for ahead in range(1, min(LAYERS_AHEAD, catalogue.layers - 1 - layer) + 1):
                own = self.columns_of(layer, layer + ahead, layer + ahead + 1)
                in_columns[own] = bias[ahead - 1, catalogue.spans[layer + ahead]]
                self.sequence[own] = sequence[ahead - 1, layer + ahead]
        # Layer by layer, twice, since all of them as floats would take four times what is kept.
        self.unit = _unit(self._in_columns(flat), self.reach, in_columns, catalogue.top_k.tolist())
        # One array, so that it gets large pages: rows are read here and there.
        shapes = [(width + 1, reach.stop - reach.start) for width, reach in zip(widths, self.reach, strict=True)]
        ends = np.cumsum([0, *(rows * columns for rows, columns in shapes)]).tolist()
        together = np.empty(ends[-1], dtype=np.int8)
        self.into: list[Weights] = [
            together[begin:end].reshape(shape) for (begin, end), shape in zip(pairwise(ends), shapes, strict=True)
        ]
        for into, part in zip(self.into, self._in_columns(flat), strict=True):
            part /= self.unit
            np.rint(part, out=into, casting="unsafe")
        self.bias: Sums = np.rint(in_columns / self.unit).astype(np.int16)

    @classmethod
    def of_artifact(cls, catalogue: Catalogue, artifact: Artifact) -> PathWeights:
        """Raises InvalidConfig for an artifact of another kind or pool."""
        if artifact.kind != PATH:
            raise InvalidConfig("kind", artifact.kind, PATH)
        try:
            window, flat, bias, sequence = (
                np.asarray(artifact.arrays[name]) for name in ("window", "weights", "bias", "sequence")
            )
        except KeyError as error:
            raise InvalidConfig("arrays", sorted(artifact.arrays), f"with {error}") from None
        reach = int(window[0]) if window.shape == (1,) else 0
        expected = (LAYERS_AHEAD, catalogue.size), (LAYERS_AHEAD, catalogue.layers)
        if not 1 <= reach <= catalogue.layers or (bias.shape, sequence.shape) != expected:
            raise InvalidConfig("bias", bias.shape, f"that of {catalogue!r}")
        if flat.shape != (count := weights_of(catalogue.experts_per_layer.tolist(), reach),):
            raise InvalidConfig("weights", flat.shape, f"{count} for {catalogue!r}")
        return cls(catalogue, reach, flat, bias.astype(np.float32), sequence.astype(np.float32))

    @property
    def nbytes(self) -> int:
        """What they take in memory."""
        return sum(one.nbytes for one in self.into) + self.bias.nbytes + self.sequence.nbytes

    def columns_of(self, asked_at: int, start: int, stop: int) -> slice:
        """Those of the experts of layers ``[start, stop)``, foreseen at layer ``asked_at``, in key order."""
        first = self.catalogue.first
        begin = int(self._block[asked_at] - first[asked_at + 1])
        return slice(begin + int(first[start]), begin + int(first[stop]))

    def _in_columns(self, flat: NDArray[Any]) -> Iterator[Array]:
        """By source layer ``[E_s + 1, M_s]``, its taker's own."""
        catalogue, place = self.catalogue, 0
        for layer, width in enumerate(catalogue.experts_per_layer.tolist()):
            reach = self.reach[layer]
            part = np.zeros((width + 1, reach.stop - reach.start), dtype=np.float32)
            targets = [
                (target - ahead, target)
                for ahead in range(1, LAYERS_AHEAD + 1)
                for target in targets_of(layer, ahead, self.window, catalogue.layers)
            ]
            size = sum(int(catalogue.experts_per_layer[target]) for _, target in targets)
            given, column = flat[place : place + width * size].reshape(width, size), 0
            for asked_at, target in targets:
                own = self.columns_of(asked_at, target, target + 1)
                count = own.stop - own.start
                part[:width, own.start - reach.start : own.stop - reach.start] = given[:, column : column + count]
                column += count
            place += width * size
            yield part


def _unit(parts: Iterable[Array], reach: list[slice], bias: Array, top_k: list[int]) -> float:
    """The smallest number of which no weight is more than ``_MOST``, and no bias with the ``top_k`` largest weights of
    each layer more than ``_MOST_SUM``.
    """
    most, least = np.maximum(bias, 0).astype(np.float64), np.minimum(bias, 0).astype(np.float64)
    largest = 0.0
    for part, columns, picks in zip(parts, reach, top_k, strict=True):
        if picks and part.size:
            ordered = np.partition(part, (picks - 1, len(part) - picks), axis=0)
            most[columns] += np.maximum(ordered[len(part) - picks :], 0).sum(axis=0)
            least[columns] += np.minimum(ordered[:picks], 0).sum(axis=0)
            largest = max(largest, float(np.abs(part).max()))
    largest_sum = max(most.max(initial=0), -least.min(initial=0))
    return max(largest / _MOST, float(largest_sum / _MOST_SUM)) or 1.0


class PathLogits:
    """Logits of what each row of a step will pick, from what the same row has picked so far. One step at a time."""

    def __init__(self, weights: PathWeights) -> None:
        self._weights = weights
        self._sums: Sums = np.empty((0, weights.columns), dtype=np.int16)  # [T, C]
        self._layer = -1
        # Kept, since so much fresh memory at every layer would cost more than what is done with it.
        self._picked: Weights = np.empty(0, dtype=np.int8)

    def begin(self, rows: int) -> None:
        """A step of so many rows, none of which has picked anything."""
        if len(self._sums) != rows:
            self._sums = np.empty((rows, self._weights.columns), dtype=np.int16)
        self._sums[:] = self._weights.bias
        self._layer = -1

    def add(self, layer: int, picks: NDArray[np.integer]) -> None:
        """Count ``picks[T, k]``: of each row at most top-k, an expert at or above the layer's number being none."""
        self._layer = layer
        into, columns = self._weights.into[layer], self._weights.reach[layer]
        width = columns.stop - columns.start
        if not width:
            return
        for start in range(0, len(picks), _ROWS_AT_ONCE):
            own = picks[start : start + _ROWS_AT_ONCE]
            size = own.size * width
            if len(self._picked) < size:
                self._picked = np.empty(size, dtype=np.int8)
            picked = self._picked[:size].reshape(*own.shape, width)
            into.take(own, axis=0, out=picked, mode="clip")  # all that is no pick: the last row
            sums = self._sums[start : start + _ROWS_AT_ONCE, columns]
            sums += np.add.reduce(picked, axis=1, dtype=np.int16)

    def of(self, start: int, stop: int) -> Array:
        """``[T, M]``: of the experts of layers ``[start, stop)``, as foreseen at the layer that was added last.

        Without what is known of sequences.
        """
        columns = self._weights.columns_of(self._layer, start, stop)
        return np.multiply(self._sums[:, columns], self._weights.unit, dtype=np.float32)
