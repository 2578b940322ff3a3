"""Forecasts from statistics: pure, and quick enough for an event loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from greenroom.core.errors import InvalidRequest
from greenroom.predictor.kinds.statistics.statistics import Statistics
from greenroom.predictor.traces.counts import Floats, Shape


@dataclass(frozen=True, eq=False)
class Forecaster:
    """Forecasts of one task type, from statistics that do not change any more."""

    statistics: Statistics

    @cached_property
    def popularity(self) -> Floats:
        """[layers, experts], every row sums to 1: the next prompt's expected distribution where nothing else is known.
        Uniform in a layer that no row was ever routed in."""
        return _rows_to_one(self.statistics.popularity)

    @cached_property
    def _from_expert(self) -> Floats:
        """[layers - 1, experts]: how much of a layer's routing came through each expert."""
        sums: Floats = self.statistics.affinity.sum(axis=2)
        return sums

    def after(self, previous: Floats) -> Floats:
        """The next prompt's distribution, layer after layer: eMoE-L, section 3.2.2, with affinity as its f.

        ``previous``: the previous prompt's, [layers, experts], rows of sum 1. The first layer is the previous
        prompt's own; each further one follows from the forecast before it: f[0] = previous[0], and
        f[l+1, b] = Σ_a f[l, a] · P(b at l+1 | a at l), where P(b | a) = affinity[l, a, b] / Σ_b affinity[l, a, b].
        From an expert that was never seen to lead anywhere, it is the next layer's popularity.
        """
        forecast = np.empty_like(self.popularity)
        forecast[0] = previous[0]
        for layer, (affinity, through) in enumerate(zip(self.statistics.affinity, self._from_expert, strict=True)):
            known = through > 0
            weights = np.divide(forecast[layer], through, out=np.zeros_like(through), where=known)
            forecast[layer + 1] = weights @ affinity
            forecast[layer + 1] += forecast[layer][~known].sum() * self.popularity[layer + 1]
        return _rows_to_one(forecast)


def uniform(shape: Shape) -> Floats:
    return np.full((shape.layers, shape.experts), 1 / shape.experts, np.float32)


def parse_previous(data: bytes, shape: Shape) -> Floats:
    """A previous prompt's distribution as it comes over the wire. Raises InvalidRequest."""
    expected = 4 * shape.layers * shape.experts
    if len(data) != expected:
        raise InvalidRequest(
            f"previous must be float32[{shape.layers}, {shape.experts}], {expected} bytes, not {len(data)}",
            param="previous",
        )
    previous = np.frombuffer(data, "<f4").reshape(shape.layers, shape.experts)
    with np.errstate(over="ignore"):
        sums = previous.sum(axis=1)
    if not np.isfinite(sums).all() or (previous < 0).any() or not (sums > 0).all():
        raise InvalidRequest(
            "previous must have finite shares from 0, with a sum above 0 in every layer", param="previous"
        )
    shares: Floats = (previous / sums[:, None]).astype(np.float32)
    return shares


def _rows_to_one(sums: Floats) -> Floats:
    totals = sums.sum(axis=1, keepdims=True)
    rows: Floats = np.divide(sums, totals, out=np.full_like(sums, 1 / sums.shape[1]), where=totals > 0)
    return rows
