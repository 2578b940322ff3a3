"""Tables of tokens that are written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.tables import GRAMS, MODES, TABLES, feature_names

KEEP = 0.5
Rows = Mapping[tuple[int, ...], Sequence[int]]


def tables(
    experts_per_layer: Sequence[int],
    *,
    tokens: Sequence[int] = (),
    vocabulary: int = 16,
    weights: Mapping[str, float] | None = None,
    **grams: Rows,
) -> PathsFile:
    """``grams``: of each table its rows, whole numbers of 1, by places in ``tokens``. ``weights``: of features, in
    every mode and layer; those of tables are 1 if not said otherwise, all others 0.
    """
    size, layers = sum(experts_per_layer), len(experts_per_layer)
    names = feature_names(1)
    given = dict.fromkeys(GRAMS, 1.0) | dict(weights or {})
    arrays: dict[str, np.ndarray] = {
        "popularity": np.zeros(size, dtype=np.float32),
        "bias": np.zeros((len(MODES), size), dtype=np.float32),
        "weights": np.zeros((len(MODES), len(names), layers), dtype=np.float32),
        "keep": np.array([KEEP], dtype=np.float32),
        "tokens": np.array(tokens, dtype=np.uint32),
    }
    for name, weight in given.items():
        arrays["weights"][:, names.index(name)] = weight
    for name, offsets in GRAMS.items():
        rows = sorted(grams.get(name, {}).items())
        arrays[f"{name}.keys"] = np.array([key for key, _ in rows], dtype=np.uint32).reshape(-1, len(offsets))
        arrays[f"{name}.logits"] = np.array([row for _, row in rows], dtype=np.int8).reshape(-1, size)
        arrays[f"{name}.unit"] = np.ones(1, dtype=np.float32)
    return PathsFile(
        model="", experts_per_layer=tuple(experts_per_layer), sequences=1, form=TABLES, vocabulary=vocabulary,
        tensors=arrays,
    )  # fmt: skip


def empty_tables(
    experts_per_layer: Sequence[int], *, vocabulary: int = 100, version: int = 1, model: str = "", seed: int = 0
) -> PathsFile:
    """Every token has the same chances, which are drawn by ``seed``: to be handed about."""
    made = tables(experts_per_layer, vocabulary=vocabulary)
    chances = np.random.default_rng(seed).normal(size=sum(experts_per_layer)).astype(np.float32)
    return replace(
        made, tensors={**made.tensors, "popularity": chances}, model=model, version=version, created_ms=version
    )  # fmt: skip
