"""What a token's picks in earlier layers say of its picks in later ones."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.path_file import LAYERS_AHEAD, targets_of, weights_of
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue

Array = NDArray[np.float32]

PATH: Final = "path"
"""The kind of artifact that holds the weights, and the kind of prediction that they give."""


class PathWeights:
    """The weights as matrices. ``bias[A, N]``; ``sequence[A, layers]``; ``into[s] [E_s, M_s]``: what a pick of each
    expert of layer s adds to the logits of all keys of ``targets[s]``, a list of (layers ahead, keys, columns).
    """

    def __init__(self, catalogue: Catalogue, window: int, flat: NDArray[Any], bias: Array, sequence: Array) -> None:
        """``flat``: as in ``PathFile``."""
        self.catalogue = catalogue
        self.window = window
        self.bias = bias
        self.sequence = sequence
        self.into: list[Array] = []
        self.targets: list[list[tuple[int, slice, slice]]] = []
        first: list[int] = catalogue.first.tolist()
        place = 0
        for layer, width in enumerate(catalogue.experts_per_layer.tolist()):
            parts, columns = [], 0
            for ahead in range(1, LAYERS_AHEAD + 1):
                layers = targets_of(layer, ahead, window, catalogue.layers)
                keys = slice(first[layers.start], first[layers.stop]) if layers else slice(0, 0)
                size = keys.stop - keys.start
                if size:
                    parts.append((ahead, keys, slice(columns, columns + size)))
                columns += size
            self.targets.append(parts)
            self.into.append(flat[place : place + width * columns].reshape(width, columns).astype(np.float32))
            place += width * columns

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
        """What they take in memory, at single precision."""
        return sum(one.nbytes for one in self.into) + self.bias.nbytes + self.sequence.nbytes


class PathLogits:
    """Logits of what each row of a step will pick, from what the same row has picked so far. One step at a time."""

    def __init__(self, weights: PathWeights, rows: int) -> None:
        self._weights = weights
        self._sums: Array = np.repeat(weights.bias[:, None], rows, axis=1)  # [A, T, N]

    def add(self, layer: int, picks: NDArray[np.integer]) -> None:
        """Count ``picks[T, k]``, which may name an expert at or above the layer's number: no pick."""
        into, targets = self._weights.into[layer], self._weights.targets[layer]
        if not targets:
            return
        experts = len(into)
        if len(picks) == 1:
            own = picks[0]
            added = into[own[own < experts]].sum(axis=0, keepdims=True)
        else:
            picked = np.zeros((len(picks), experts + 1), dtype=np.float32)
            np.put_along_axis(picked, np.minimum(picks.astype(np.intp), experts), 1, axis=1)
            added = picked[:, :experts] @ into
        for ahead, keys, columns in targets:
            self._sums[ahead - 1, :, keys] += added[:, columns]

    def of(self, layer: int, ahead: int) -> Array:
        """``[T, experts of the layer]``: foreseen ``ahead`` layers before it. Without what is known of sequences."""
        found: Array = self._sums[ahead - 1, :, self._weights.catalogue.spans[layer]]
        return found
