"""The dense keys of a pool's experts, which every policy, ledger and replay uses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Counts, Keys


class Catalogue:
    """The experts of one pool (one MoE model, or one graph of whole expert models). Immutable.

    Experts are keyed densely 0..N-1, layer by layer, so ``first[l] + i`` is expert ``i`` of layer ``l``. ``layer``
    counts the MoE layers from 0 (a dense first layer is not counted). Slots belong to no layer: a key is all that
    a policy or the ledger needs. In a graph of whole models every model is an expert of the only layer 0.

    ``bytes_of[key]`` is what the expert occupies in a slot. ``top_k[l]`` is how many experts layer ``l``'s router
    gives a row (0 where there is no router). ``decoder_start`` is the first MoE layer of the decoder of an
    encoder-decoder, 0 for a decoder-only model. All arrays are read-only.
    """

    __slots__ = (
        "bytes_of",
        "decoder_start",
        "experts_per_layer",
        "first",
        "index_of",
        "layer_of",
        "layers",
        "pool",
        "record_bytes",
        "size",
        "spans",
        "top_k",
    )

    def __init__(
        self,
        pool: str,
        *,
        experts_per_layer: Sequence[int],
        top_k: Sequence[int],
        expert_bytes: Sequence[int],
        decoder_start: int = 0,
    ) -> None:
        """``expert_bytes`` has one entry a layer (its experts are alike) or, with one layer, one an expert.

        Raises InvalidConfig, naming the field, where the sequences do not fit together.
        """
        layers = len(experts_per_layer)
        if layers == 0 or min(experts_per_layer) < 1:
            raise InvalidConfig(
                "experts_per_layer", tuple(experts_per_layer), "at least one layer, each with an expert"
            )
        if len(top_k) != layers:
            raise InvalidConfig("top_k", tuple(top_k), f"one number for each of the {layers} layers")
        if any(not 0 <= k <= n for k, n in zip(top_k, experts_per_layer, strict=True)):
            raise InvalidConfig("top_k", tuple(top_k), "from 0 to the layer's number of experts")
        if not 0 <= decoder_start < layers:
            raise InvalidConfig("decoder_start", decoder_start, f"a layer from 0 to {layers - 1}")
        per_layer = np.asarray(experts_per_layer, dtype=np.int64)
        sizes = np.asarray(expert_bytes, dtype=np.int64)
        if len(sizes) == layers:
            sizes = np.repeat(sizes, per_layer)
        elif layers > 1 or len(sizes) != per_layer[0]:
            raise InvalidConfig("expert_bytes", len(sizes), "one size a layer, or one an expert of a single layer")
        if sizes.min() < 1:
            raise InvalidConfig("expert_bytes", int(sizes.min()), "every expert occupies at least one byte")
        self.pool = pool
        self.layers = layers
        self.experts_per_layer: Counts = per_layer
        self.top_k: Counts = np.asarray(top_k, dtype=np.int64)
        self.decoder_start = decoder_start
        self.first: Keys = np.concatenate(([0], np.cumsum(per_layer)))
        self.size = int(self.first[-1])
        self.layer_of: Counts = np.repeat(np.arange(layers, dtype=np.int64), per_layer)
        self.index_of: Counts = np.arange(self.size, dtype=np.int64) - self.first[self.layer_of]
        self.bytes_of: Counts = sizes
        self.record_bytes: int | None = int(sizes[0]) if bool((sizes == sizes[0]).all()) else None
        """The bytes of every expert where all are of one size, else None."""
        firsts = self.first.tolist()
        self.spans: tuple[slice, ...] = tuple(slice(*ends) for ends in itertools.pairwise(firsts))
        """Where each layer's experts lie in an array over all keys."""
        for array in (self.experts_per_layer, self.top_k, self.first, self.layer_of, self.index_of, self.bytes_of):
            array.setflags(write=False)

    @classmethod
    def uniform(cls, pool: str, *, layers: int, experts: int, top_k: int, expert_bytes: int = 1) -> Catalogue:
        """A model whose MoE layers are all alike."""
        return cls(
            pool, experts_per_layer=[experts] * layers, top_k=[top_k] * layers, expert_bytes=[expert_bytes] * layers
        )

    @classmethod
    def of_models(cls, pool: str, model_bytes: Sequence[int]) -> Catalogue:
        """A graph of whole expert models (CoE): key ``i`` is the model of size ``model_bytes[i]``."""
        return cls(pool, experts_per_layer=[len(model_bytes)], top_k=[0], expert_bytes=model_bytes)

    def __repr__(self) -> str:
        return f"Catalogue({self.pool!r}: {self.size} experts in {self.layers} layers)"

    def key(self, layer: int, index: int) -> int:
        """The key of expert ``index`` of ``layer``; raises IndexError where there is no such expert."""
        if not (0 <= layer < self.layers and 0 <= index < self.experts_per_layer[layer]):
            raise IndexError(f"{self!r} has no expert {index} in layer {layer}")
        return int(self.first[layer]) + index

    def span(self, layer: int) -> slice:
        """Where ``layer``'s experts lie in an array over all keys."""
        return self.spans[layer]
