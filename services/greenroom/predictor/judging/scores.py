"""How well experts were predicted: eMoE's Table 2, and what loading them would be worth. Pure.

A prediction is ``by_slot`` [n, layers, k, experts]: of each of n prompts, layer by layer, how likely the expert of
each slot (the place among a row's picks) is. ``actual``: the counts that really came, of the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from greenroom.predictor.traces.counts import Counts, Floats

COVERAGE_AT = (20, 40, 60, 80)


@dataclass(frozen=True, slots=True)
class Score:
    """``accuracy``: share of (token, layer, slot) whose expert is the likeliest of its slot. ``precision``, ``recall``,
    ``f1``: over the classes (layer, expert), each weighed by how often it really came, so recall is the accuracy
    again. ``overlap``: Σ min(forecast, real) over a layer's experts, mean over layers and prompts.
    ``coverage``: by percent of a layer's experts, the share of picks within so many of the likeliest."""

    accuracy: float
    precision: float
    recall: float
    f1: float
    overlap: float
    coverage: Mapping[int, float]

    def as_json(self) -> dict[str, object]:
        found = asdict(self)
        found["coverage"] = {str(percent): share for percent, share in self.coverage.items()}
        return found


def score(by_slot: Floats, actual: Counts) -> Score:
    """At least one prompt with a pick."""
    tp, named, came = _by_class(by_slot.argmax(axis=-1), actual)
    total = came.sum()
    precision = np.divide(tp, named, out=np.zeros_like(tp), where=named > 0)
    recall = np.divide(tp, came, out=np.zeros_like(tp), where=came > 0)
    f1 = np.divide(2 * precision * recall, precision + recall, out=np.zeros_like(tp), where=tp > 0)
    layers = actual.sum(axis=2, dtype=np.int64)
    forecast = over_slots(by_slot, actual)
    return Score(
        accuracy=float(tp.sum() / total),
        precision=float((precision * came).sum() / total),
        recall=float((recall * came).sum() / total),
        f1=float((f1 * came).sum() / total),
        overlap=overlap(forecast, layers),
        coverage={percent: coverage(forecast, layers, percent / 100) for percent in COVERAGE_AT},
    )


def overlap(forecast: Floats, layers: npt.NDArray[np.int64]) -> float:
    """Mean over those layers of those prompts that have a pick; both [n, layers, experts]."""
    totals = layers.sum(axis=-1)
    real = layers / np.maximum(totals, 1)[..., None]
    return float(np.minimum(forecast, real).sum(axis=-1)[totals > 0].mean())


def coverage(forecast: Floats, layers: npt.NDArray[np.int64], share: float) -> float:
    """Share of all picks that go to the ``share`` of each layer's experts that were forecast likeliest."""
    kept = max(1, round(share * forecast.shape[-1]))
    best = np.argsort(-forecast, axis=-1, kind="stable")[..., :kept]
    return float(np.take_along_axis(layers, best, axis=-1).sum() / layers.sum())


def over_slots(by_slot: Floats, actual: Counts) -> Floats:
    """[n, layers, experts]: the mean over those slots of a layer that are used at all."""
    used = (actual.sum(axis=(0, 3), dtype=np.int64) > 0)[None, :, :, None]
    mean: Floats = ((by_slot * used).sum(axis=2) / np.maximum(used.sum(axis=2), 1)).astype(np.float32)
    return mean


def ranked(by_layer: Floats, slots: int) -> Floats:
    """[n, layers, slots, experts] for ``score`` from a forecast that knows no slots: the expert of slot j is the j-th
    likeliest, and each slot's shares are the layer's own otherwise."""
    order = np.argsort(-by_layer, axis=-1, kind="stable")
    by_slot = np.repeat(by_layer[:, :, None, :], slots, axis=2)
    for slot in range(min(slots, by_layer.shape[-1])):
        np.put_along_axis(by_slot[:, :, slot], order[:, :, slot : slot + 1], 2.0, axis=-1)
    return by_slot


def score_ranked(by_layer: Floats, actual: Counts) -> Score:
    """Of a forecast [n, layers, experts] that knows no slots."""
    found = score(ranked(by_layer, actual.shape[2]), actual)
    layers = actual.sum(axis=2, dtype=np.int64)
    return Score(
        accuracy=found.accuracy,
        precision=found.precision,
        recall=found.recall,
        f1=found.f1,
        overlap=overlap(by_layer, layers),
        coverage={percent: coverage(by_layer, layers, percent / 100) for percent in COVERAGE_AT},
    )


def _by_class(named: npt.NDArray[np.int64], actual: Counts) -> tuple[Floats64, Floats64, Floats64]:
    """Of each (layer, expert): tokens rightly predicted, tokens predicted, tokens that came."""
    _, layers, _, experts = actual.shape
    hits = np.take_along_axis(actual, named[..., None], axis=-1)[..., 0].astype(np.int64)
    tokens = actual.sum(axis=-1, dtype=np.int64)
    classes = (np.arange(layers)[None, :, None] * experts + named).ravel()
    size = layers * experts
    return (
        np.bincount(classes, weights=hits.ravel(), minlength=size).astype(np.float64),
        np.bincount(classes, weights=tokens.ravel(), minlength=size).astype(np.float64),
        actual.sum(axis=(0, 2), dtype=np.int64).ravel().astype(np.float64),
    )


Floats64 = npt.NDArray[np.float64]
