"""The expert activation matrices of a trace's sequences (MoE-Infinity, §4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.replay.traces.routing_trace import RoutingTrace


def activation_matrices(trace: RoutingTrace) -> NDArray[np.float32]:
    """``[sequences, N]``: tokens of each sequence by expert of all layers, prefill and decode together.

    A layer's part of a row sums to the sequence's picks in it."""
    per_layer = trace.experts_per_layer
    first = np.concatenate(([0], np.cumsum(per_layer)))
    found = np.zeros((trace.sequences, int(first[-1])), dtype=np.float32)
    for place, (begin, end) in enumerate(
        zip(trace.seq_starts[:-1].tolist(), trace.seq_starts[1:].tolist(), strict=True)
    ):
        picks = trace.experts[begin:end].astype(np.int64)
        keys = (picks + first[:-1, None])[picks < per_layer[:, None]]
        found[place] = np.bincount(keys, minlength=found.shape[1])
    return found
