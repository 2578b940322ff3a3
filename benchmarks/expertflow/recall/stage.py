"""What tokens foretell of a forward's routing, beside what else there is to foretell by (Table 1).

python -m benchmarks.expertflow --stage recall
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.expertflow.recall.batches import batches, union_accuracy
from benchmarks.expertflow.recall.foretellers import (
    SIMPLE,
    TABLES_PAST,
    TOKEN,
    by_tables,
    by_token,
    foretellers,
    named,
    past_logits,
    picked,
    uniform,
)
from benchmarks.expertflow.routings import BUNDLED, Files, Inputs, fitted_to, tables, worlds
from benchmarks.harness.inputs.fitted import QUICK_FIT
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.split_routing import World
from benchmarks.harness.reporting.accuracy import Recalls
from benchmarks.harness.reporting.progress import each
from greenroom.policies.base.array_types import Mask
from greenroom.predictor.kinds.paths.t5_training import T5Options

UNIFORM: Final = "uniform"
PAPER: Final = {"least": 0.73, "most": 0.87}
"""Of the paper's own measure, Eq. 7, which its text does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Inputs):
    """``batches``: rows of one. ``draws``: batches of each size. ``learnt``: shares of the sequences to learn from that
    the tables are fitted to. ``t5``: how the network is trained; the sequences that are measured are none of its."""

    batches: tuple[int, ...] = (8, 16, 32)
    draws: int = 300
    learnt: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0)
    t5: T5Options = field(default_factory=T5Options)


QUICK = Scale(
    prompts=60, sequences=24, seeds=2, fit=QUICK_FIT, draws=20, learnt=(0.5, 1.0), t5=T5Options(epochs=1, seconds=2.0)
)


def run(scale: Scale) -> dict[str, Any]:
    """``models``: of each its ``rows``, a predictor each, its ``batches`` and its ``curve``. On top the figures of
    ``trace``."""
    found: dict[str, Any] = {"models": [], "paper": PAPER}
    for world in worlds(scale):
        own = compared(world, fitted_to(world, scale.fit), scale)
        found["models"].append(own)
        if world.name != BUNDLED:
            recalls = {row["predictor"]: row["recall"] for row in own["rows"]}
            found["path_recall"] = recalls[TABLES_PAST]
            found["path_gain_points"] = own["gain_points"]["mean"]
    return found


def compared(world: World, files: Files, scale: Scale) -> dict[str, Any]:
    catalogue = world.measured.catalogue()
    truth = picked(catalogue, world.measured)[world.rows]
    owner = np.searchsorted(world.measured.seq_starts, world.rows, side="right")
    masks: dict[str, Mask] = {UNIFORM: uniform(catalogue, len(world.rows))}
    made = foretellers(world, files, scale.fit, scale.t5)
    for name, scores in each(made.items(), f"{world.name}: predictors", "predictor"):
        masks[name] = named(catalogue, scores())
    recalls = {name: Recalls(recall_of(mask, truth), owner) for name, mask in masks.items()}
    rows = []
    for name, own in recalls.items():
        low, high = own.within()
        rows.append({"predictor": name, "recall": float(own.values.mean()), "low": low, "high": high})
    best = max(SIMPLE, key=lambda name: recalls[name].values.mean())
    gain = recalls[TABLES_PAST].less(recalls[best])
    low, high = gain.within()
    return {
        "model": world.name,
        "top_k": world.top_k,
        "experts": int(world.measured.experts_per_layer.max()),
        "layers": world.measured.layers,
        "fitted_tokens": world.fitted.tokens,
        "measured_tokens": len(world.rows),
        "measured_sequences": world.measured.sequences,
        "rows": rows,
        "best_simple": best,
        "gain_points": {"mean": 100 * float(gain.values.mean()), "low": 100 * low, "high": 100 * high},
        "batches": [
            {"rows": size, **row}
            for size in scale.batches
            for row in union_accuracy(catalogue, truth, masks, batches(world, size, scale.draws))
        ],
        "curve": curve(world, files, scale, truth),
        "tables_bytes": sum(one.nbytes for one in files.paths.tensors.values()),
    }


def recall_of(mask: Mask, truth: Mask) -> NDArray[np.float64]:
    """``[rows]``: the share of each row's picks that are named."""
    found: NDArray[np.float64] = (mask & truth).sum(axis=1) / np.maximum(truth.sum(axis=1), 1)
    return found


def curve(world: World, files: Files, scale: Scale, truth: Mask) -> list[dict[str, float]]:
    """Recall by how many tokens were learnt from. What is known of sequences stays as it is."""
    catalogue = world.measured.catalogue()
    past = past_logits(world.measured, catalogue, files.reuse)
    found = []
    for share in each(_reached(world, scale.learnt), f"{world.name}: fewer tokens", "fit"):
        part = world.fitted.part(0, max(2, round(share * world.fitted.sequences)))
        file = files.paths if share == 1 else tables(world.name, part, files.reuse, scale.fit, Kept.usual())
        less = World(world.name, part, world.measured, world.rows)
        popularity = picked(catalogue, part).mean(axis=0).astype(np.float32)
        scores = {TOKEN: by_token(less, catalogue, popularity), TABLES_PAST: by_tables(less, catalogue, file, past)}
        recalls = {name: float(recall_of(named(catalogue, own), truth).mean()) for name, own in scores.items()}
        found.append({"tokens": part.tokens, **recalls})
    return found


def _reached(world: World, shares: Sequence[float]) -> list[float]:
    """Without those that leave too little to learn from."""
    ends = {share: int(world.fitted.seq_starts[max(2, round(share * world.fitted.sequences))]) for share in shares}
    return [share for share, tokens in ends.items() if share == 1 or tokens >= LEAST_TOKENS]


LEAST_TOKENS: Final = 1000
