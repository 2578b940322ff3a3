"""Small traces for tests."""

from __future__ import annotations

import numpy as np

from greenroom.replay import RoutingTrace


def trace_of(*lengths: int, layers: int = 1, k: int = 1, experts: int = 4, seed: int = 0) -> RoutingTrace:
    random = np.random.default_rng(seed)
    tokens = sum(lengths)
    picks = np.argsort(random.random((tokens, layers, experts)), axis=-1)[:, :, :k].astype(np.uint8)
    return RoutingTrace(picks, np.concatenate(([0], np.cumsum(lengths))), experts)
