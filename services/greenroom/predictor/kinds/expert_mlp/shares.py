"""Popularity and affinity of a model's experts (DuoServe-MoE, §4.1), counted over the tokens of recorded routing."""

from __future__ import annotations

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.policies.duoserve.mlp_states import Array, MlpShares, many_hot
from greenroom.replay.traces.routing_trace import RoutingTrace

__all__ = ["Array", "ExpertShares", "many_hot"]

_CHUNK = 8192
"""Tokens that are counted together."""


class ExpertShares(MlpShares):
    """Counted. An affinity that was never seen is the popularity of the layer it leads to."""

    __slots__ = ()

    @classmethod
    def of_trace(cls, trace: RoutingTrace, ahead: int = 1) -> ExpertShares:
        """Raises InvalidConfig where the trace has no layer so far ahead, or no token."""
        if not 1 <= ahead < trace.layers:
            raise InvalidConfig(
                "ahead", ahead, f"from 1 to {trace.layers - 1}, in a model of {trace.layers} MoE layers"
            )
        if not trace.tokens:
            raise InvalidConfig("trace", "no token", "at least one token to count")
        width = int(trace.experts_per_layer.max())
        picked = np.zeros((trace.layers, width), dtype=np.float64)
        together = np.zeros((trace.layers - ahead, width, width), dtype=np.float64)
        for start in range(0, trace.tokens, _CHUNK):
            hot = many_hot(trace.experts[start : start + _CHUNK], width)
            picked += hot.sum(axis=0)
            for layer in range(trace.layers - ahead):
                together[layer] += hot[:, layer].T @ hot[:, layer + ahead]
        popularity = picked / np.maximum(picked.sum(axis=1, keepdims=True), 1)
        counts = together.sum(axis=2, keepdims=True)
        affinity = np.where(counts > 0, together / np.maximum(counts, 1), popularity[ahead:, None])
        return cls(ahead, popularity.astype(np.float32), affinity.astype(np.float32))
