"""What is foretold of the experts that a batch's rows need together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.harness.inputs.split_routing import World
from greenroom.policies.base.array_types import Ids, Mask
from greenroom.policies.base.expert_keys import Catalogue

ALL_ACTIVE = "all active"


def batches(world: World, rows: int, draws: int, seed: int = 0) -> list[Ids]:
    """``draws`` times ``rows`` of different sequences, places in ``world.rows``; fewer where there are fewer
    sequences."""
    random = np.random.default_rng(seed + rows)
    owner = np.searchsorted(world.measured.seq_starts, world.rows, side="right")
    known, begins, counts = np.unique(owner, return_index=True, return_counts=True)
    rows = min(rows, len(known))
    found = []
    for _ in range(draws):
        chosen = random.choice(len(known), size=rows, replace=False)
        found.append(begins[chosen] + random.integers(counts[chosen]))
    return found


def union_accuracy(
    catalogue: Catalogue, picked: Mask, named: Mapping[str, Mask], drawn: Sequence[Ids]
) -> list[dict[str, float | str]]:
    """Of the experts that any row of a batch picks in a layer: a row for each predictor, the mean over layers and
    batches. A predictor names what it names for any row; the last names every expert."""
    active = np.stack([_layers(catalogue, np.asarray(picked[rows].any(axis=0))) for rows in drawn])
    found: list[dict[str, float | str]] = []
    for name, masks in (*named.items(), (ALL_ACTIVE, np.ones((1, catalogue.size), dtype=np.bool_))):
        rows_of = [np.zeros(1, dtype=np.intp)] * len(drawn) if name == ALL_ACTIVE else drawn
        said = np.stack([_layers(catalogue, np.asarray(masks[rows].any(axis=0))) for rows in rows_of])
        both, either = (active & said).sum(axis=2), (active | said).sum(axis=2)
        found.append(
            {
                "predictor": name,
                "jaccard": float((both / np.maximum(either, 1)).mean()),
                "recall": float((both / np.maximum(active.sum(axis=2), 1)).mean()),
                "precision": float((both / np.maximum(said.sum(axis=2), 1)).mean()),
            }
        )
    return found


def _layers(catalogue: Catalogue, keys: Mask) -> Mask:
    """``[layers, widest]`` of ``[N]``."""
    found: Mask = np.zeros((catalogue.layers, int(catalogue.experts_per_layer.max())), dtype=np.bool_)
    found[catalogue.layer_of, catalogue.index_of] = keys
    return found
