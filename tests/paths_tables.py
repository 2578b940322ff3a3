"""Tables of tokens that say nothing, of any shape: to be handed about."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.tables import GRAMS, MODES, TABLES, feature_names


def empty_tables(
    experts_per_layer: tuple[int, ...], *, vocabulary: int = 100, version: int = 1, model: str = "", seed: int = 0
) -> PathsFile:
    """Every token has the same chances, which are drawn by ``seed``."""
    size, layers = sum(experts_per_layer), len(experts_per_layer)
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "popularity": np.random.default_rng(seed).normal(size=size).astype(np.float32),
        "bias": np.zeros((len(MODES), size), np.float32),
        "weights": np.zeros((len(MODES), len(feature_names(1)), layers), np.float32),
        "keep": np.array([0.9], np.float32),
        "tokens": np.zeros(0, np.uint32),
    }
    for name, offsets in GRAMS.items():
        tensors[f"{name}.keys"] = np.zeros((0, len(offsets)), np.uint32)
        tensors[f"{name}.logits"] = np.zeros((0, size), np.int8)
        tensors[f"{name}.unit"] = np.ones(1, np.float32)
    return PathsFile(
        model=model, experts_per_layer=experts_per_layer, sequences=1, version=version, created_ms=version,
        form=TABLES, vocabulary=vocabulary, tensors=tensors,
    )  # fmt: skip
