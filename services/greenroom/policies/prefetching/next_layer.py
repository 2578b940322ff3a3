"""Prefetching of the next layer's experts, whatever the sequence: the papers' baselines."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Counts, Scores
from greenroom.policies.base.events import LayerRouting
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.prefetching.prefetching_policy import PrefetchingPolicy


class NextLayerPolicy(PrefetchingPolicy):
    """While a layer's experts run, it wants some of the next layer's.

    After the last layer it wants some of the next step's first layer: in an encoder-decoder, the decoder's first.
    """

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        following = routing.layer + 1 if routing.layer + 1 < self.catalogue.layers else self.catalogue.decoder_start
        priority = np.zeros(self.catalogue.size, dtype=np.float32)
        priority[self.catalogue.span(following)] = self._priorities(following)
        self._publish(priority)

    @abstractmethod
    def _priorities(self, layer: int) -> Scores | float:
        """``[experts of the layer]``, or one number for all of them; 0: not wanted."""


class NextLayer(NextLayerPolicy):
    """Prefetches the whole next layer, as SE-MoE and MoESys do (Shen et al., arXiv:2205.10034, "ring memory")."""

    def __init__(self, catalogue: Catalogue, *, retention: str = "lru", evict: bool = True) -> None:
        super().__init__(catalogue, retention=retention, evict=evict)

    def _priorities(self, layer: int) -> Scores | float:
        return 1.0


class TopK(NextLayerPolicy):
    """Prefetches the first ``count`` experts of the next layer by their index.

    MoE-Infinity's baseline (§8.3) for ZeRO-Infinity, which "prefetches the top-K experts by expert IDs in the next
    layer". ``count`` None: as many as the layer's router gives a row.
    """

    def __init__(
        self, catalogue: Catalogue, *, count: int | None = None, retention: str = "lru", evict: bool = True
    ) -> None:
        """Raises InvalidConfig for a count below 1."""
        super().__init__(catalogue, retention=retention, evict=evict)
        self._counts = counts_of(catalogue, count)

    def _priorities(self, layer: int) -> Scores | float:
        experts = int(self.catalogue.experts_per_layer[layer])
        return (np.arange(experts) < self._counts[layer]).astype(np.float32)


class TracedTopK(NextLayerPolicy):
    """Prefetches the ``count`` experts of the next layer that were used in the most steps so far.

    MoE-Infinity's baseline (§8.3) for BrainStorm, which "traces the usage frequency of experts and prefetches the
    top-K popular experts in the next layer". ``count`` as for TopK. An expert that was never used is not wanted.
    """

    def __init__(
        self, catalogue: Catalogue, *, count: int | None = None, retention: str = "lfu", evict: bool = True
    ) -> None:
        """Raises InvalidConfig for a count below 1."""
        super().__init__(catalogue, retention=retention, evict=evict)
        self._counts = counts_of(catalogue, count)
        self._uses: Counts = np.zeros(catalogue.size, dtype=np.int64)

    def learn(self, uses: Counts) -> None:
        """Add uses from before: ``uses[N]`` steps used each expert."""
        self._uses += uses

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._uses[routing.experts] += 1
        super().on_layer_routed(routing)

    def _priorities(self, layer: int) -> Scores | float:
        uses = self._uses[self.catalogue.span(layer)]
        popular = np.argsort(-uses, kind="stable")[: self._counts[layer]]
        priorities = np.zeros(len(uses), dtype=np.float32)
        priorities[popular] = uses[popular]
        return priorities


def counts_of(catalogue: Catalogue, count: int | None) -> list[int]:
    """How many experts of each layer to prefetch: ``count``, or the layer's top-k where it is None."""
    if count is not None and count < 1:
        raise InvalidConfig("count", count, "at least 1")
    experts = catalogue.experts_per_layer.tolist()
    return [min(k if count is None else count, n) for k, n in zip(catalogue.top_k.tolist(), experts, strict=True)]
