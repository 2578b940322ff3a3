"""How long prompts and answers are (eMoE, section 2.2.2, Fig. 4), and which experts tasks are routed to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import Lengths
from greenroom.replay.traces.routing_trace import RoutingTrace

MOST_POINTS = 100
"""The most points of a CDF: a picture shows no more."""


def lengths_of(tokens: Sequence[int]) -> Lengths:
    """``tokens``: the length of each prompt or answer, at least one. A percentile is the length of one of them."""
    ordered = np.sort(np.asarray(tokens, dtype=np.int64))
    values, counts = np.unique(ordered, return_counts=True)
    if len(values) > MOST_POINTS:
        chosen = np.unique(np.linspace(0, len(values) - 1, MOST_POINTS).round().astype(int))
    else:
        chosen = np.arange(len(values))
    shares = np.cumsum(counts) / len(ordered)
    p50, p90, p99 = (float(value) for value in np.percentile(ordered, (50, 90, 99), method="inverted_cdf"))
    return Lengths(
        mean=round(float(ordered.mean()), 3),
        p50=p50,
        p90=p90,
        p99=p99,
        most=float(ordered[-1]),
        cdf=tuple((float(values[place]), round(float(shares[place]), 4)) for place in chosen),
    )


def counts_of(trace: RoutingTrace, sequences: Sequence[int]) -> NDArray[np.int64]:
    """``[layers, experts]``: how many picks of these sequences of the trace were of each expert."""
    experts = int(trace.experts_per_layer.max())
    counts = np.zeros((trace.layers, experts), dtype=np.int64)
    for sequence in sequences:
        picks = trace.experts[trace.seq_starts[sequence] : trace.seq_starts[sequence + 1]]
        for layer in range(trace.layers):
            own = picks[:, layer].ravel()
            counts[layer] += np.bincount(own[own < trace.experts_per_layer[layer]], minlength=experts)
    return counts


def shares_of(counts: NDArray[np.int64], experts_per_layer: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each layer's picks as shares that sum to 1; equal shares in a layer without picks."""
    there = np.arange(counts.shape[1]) < experts_per_layer[:, None]
    sums = counts.sum(axis=1, keepdims=True)
    return np.asarray(np.where(sums > 0, counts, there) / np.where(sums > 0, sums, experts_per_layer[:, None]))


def rounded(shares: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    """As a profile keeps them."""
    return tuple(tuple(round(float(share), 6) for share in row) for row in shares)
