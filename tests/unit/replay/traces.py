"""Small traces for tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from greenroom.policies.base.events import Phase
from greenroom.replay import RoutingTrace


def trace_of(*lengths: int, layers: int = 1, k: int = 1, experts: int = 4, seed: int = 0) -> RoutingTrace:
    random = np.random.default_rng(seed)
    tokens = sum(lengths)
    picks = np.argsort(random.random((tokens, layers, experts)), axis=-1)[:, :, :k].astype(np.uint8)
    return RoutingTrace(picks, np.concatenate(([0], np.cumsum(lengths))), experts)


@st.composite
def odd_traces(draw: st.DrawFn) -> RoutingTrace:
    """Layers of different widths, rows with fewer picks than others, a few experts picked far more than the rest, the
    first rows of a sequence in one step or in one each.
    """
    widths = np.array(draw(st.lists(st.integers(2, 9), min_size=1, max_size=4)))
    k = draw(st.integers(1, int(widths.min())))
    lengths = draw(st.lists(st.integers(0, 25), min_size=1, max_size=8))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (sum(lengths), len(widths))
    scores = random.random((*shape, int(widths.max()))) ** (1 + np.arange(widths.max()))
    scores[:, np.arange(widths.max()) >= widths[:, None]] = -1
    picks = np.argsort(-scores, axis=-1, kind="stable")[:, :, :k].astype(np.uint8)
    if draw(st.booleans()):
        picks[random.random(picks.shape) < 0.3] = 255
    phase = None
    if draw(st.booleans()):
        prompt = draw(st.integers(0, 9))
        places = np.concatenate([np.arange(length) for length in lengths])
        phase = np.where(places < prompt, Phase.PREFILL, Phase.DECODE).astype(np.uint8)
    return RoutingTrace(picks, np.concatenate(([0], np.cumsum(lengths))), widths, phase=phase)
