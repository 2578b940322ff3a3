"""Recorded routing, cut into sequences that predictors are fitted to and others that they are measured on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.replay import RoutingTrace


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """``rows``: of ``measured``, those that are foreseen: tokens that decode, but for the first of a sequence, of which
    no predictor of its sequence knows anything. ``prompts``: of each sequence that is fitted to and then of each that
    is measured, in the tokens' ids, where the routing has no rows of them."""

    name: str
    fitted: RoutingTrace
    measured: RoutingTrace
    rows: NDArray[np.intp]
    prompts: Sequence[NDArray[np.int64]] | None = None

    @property
    def top_k(self) -> int:
        return int(self.measured.experts.shape[2])

    @property
    def digest(self) -> str:
        """Of what is fitted to."""
        return digest_of(self.fitted)


def digest_of(trace: RoutingTrace) -> str:
    """The same for the same routing of the same sequences."""
    found = hashlib.sha256(repr((trace.experts.shape, trace.experts_per_layer.tolist())).encode())
    for array in (trace.experts, trace.seq_starts):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def world_of(name: str, trace: RoutingTrace, measured_share: float) -> World:
    """The last sequences are measured, as many as this share of them and at least one. Raises InvalidConfig where that
    leaves none to fit to, or no token to foresee.
    """
    split = trace.sequences - max(1, math.ceil(trace.sequences * measured_share))
    if split < 1:
        raise InvalidConfig("trace", f"{trace.sequences} sequences", "at least two, to fit to and to measure on")
    fitted, measured = trace.part(0, split), trace.part(split)
    decodes = np.ones(measured.tokens, dtype=np.bool_)
    if measured.phase is not None:
        decodes = measured.phase == Phase.DECODE
    decodes[measured.seq_starts[:-1][np.diff(measured.seq_starts) > 0]] = False
    if not decodes.any():
        raise InvalidConfig("trace", f"{measured.tokens} tokens to measure on", "some that decode")
    return World(name, fitted, measured, np.flatnonzero(decodes))
