"""What is compared: each says how likely a layer's experts are, some layers before their router speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.inputs.split_routing import World
from greenroom.core.artifacts.path_file import LAYERS_AHEAD, PathFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.foresight.path_weights import PathLogits, PathWeights
from greenroom.predictor.kinds.expert_mlp.network import ExpertMlpPredictor
from greenroom.predictor.kinds.expert_mlp.shares import ExpertShares, many_hot
from greenroom.predictor.kinds.path.fit import sequence_logits

Array = NDArray[np.float32]

_AT_ONCE = 4096
"""Tokens that a network is asked about together."""


class Predictor(Protocol):
    def scores(self, layer: int) -> Array:
        """``[rows, experts of the layer]``, for the rows of a world: the higher the likelier."""
        ...


class ByPopularity:
    """How often each expert was picked (Eq. 2)."""

    def __init__(self, world: World, shares: ExpertShares) -> None:
        self._world, self._shares = world, shares

    def scores(self, layer: int) -> Array:
        width = int(self._world.measured.experts_per_layer[layer])
        return np.tile(self._shares.popularity[layer, :width], (len(self._world.rows), 1))


class ByAffinity:
    """How often each expert was picked after those that the token picked ``ahead`` layers before (Eq. 3), in sum."""

    def __init__(self, world: World, shares: ExpertShares) -> None:
        self._world, self._shares = world, shares

    def scores(self, layer: int) -> Array:
        trace, ahead = self._world.measured, self._shares.ahead
        picks = trace.experts[self._world.rows, layer - ahead]
        affinity = self._shares.affinity[layer - ahead]
        found: Array = many_hot(picks, len(affinity)) @ affinity[:, : int(trace.experts_per_layer[layer])]
        return found


class BySequence:
    """What `reuse` knows of the token's sequence: logits. Another layer's are dropped, for they take much memory."""

    def __init__(self, world: World, reuse: ReuseFile) -> None:
        self._world, self._reuse = world, reuse
        self._last: tuple[int, Array] = -1, np.zeros((0, 0), dtype=np.float32)

    def scores(self, layer: int) -> Array:
        if self._last[0] != layer:
            known = sequence_logits(self._world.measured, layer, self._reuse)
            width = int(self._world.measured.experts_per_layer[layer])
            every = np.zeros((self._world.measured.tokens, width), dtype=np.float32)
            every[known.rows] = known.logits
            self._last = layer, every[self._world.rows]
        return self._last[1]


def path_logits(world: World, path: PathFile) -> dict[tuple[int, int], Array]:
    """By layer and how far ahead: ``[rows, experts of the layer]``, from what each row had picked by then."""
    trace = world.measured
    catalogue = trace.catalogue()
    logits = PathLogits(PathWeights.of_artifact(catalogue, artifact_of(catalogue, path, "fitted")))
    logits.begin(len(world.rows))
    found = {}
    for layer in range(trace.layers):
        logits.add(layer, trace.experts[world.rows, layer])
        for target in range(layer + 1, min(layer + 1 + LAYERS_AHEAD, trace.layers)):
            found[target, target - layer] = logits.of(target, target + 1)
    return found


class ByPath:
    """What `duoserve` adds up of the token's own picks."""

    def __init__(self, logits: Mapping[tuple[int, int], Array], ahead: int) -> None:
        self._logits, self._ahead = logits, ahead

    def scores(self, layer: int) -> Array:
        return self._logits[layer, self._ahead]


class ByPathAndSequence:
    """As `duoserve` predicts: the path's sum, and the sequence's logit times ``gains[layers]``."""

    def __init__(self, path: ByPath, sequence: BySequence, gains: Array) -> None:
        self._path, self._sequence, self._gains = path, sequence, gains

    def scores(self, layer: int) -> Array:
        found: Array = self._path.scores(layer) + self._gains[layer] * self._sequence.scores(layer)
        return found


class ByMlp:
    """The paper's network."""

    def __init__(self, world: World, predictor: ExpertMlpPredictor) -> None:
        self._world, self._predictor = world, predictor

    def scores(self, layer: int) -> Array:
        rows = self._world.rows
        parts = np.array_split(rows, max(1, len(rows) // _AT_ONCE))
        return np.concatenate([self._predictor.logits(self._world.measured.experts[part], layer) for part in parts])
