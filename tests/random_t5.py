"""Artifacts of the form ``t5`` with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import T5, T5Shape

SMALL = T5Shape(
    width=16, inner=24, heads=2, key=8, encoder_layers=2, decoder_layers=2, buckets=8, reach=12, window=6, prompt=10
)


def random_t5(
    shape: T5Shape = SMALL, tokens: Sequence[int] = range(3, 40), experts: tuple[int, ...] = (4, 3), *, seed: int = 0
) -> PathsFile:
    random = np.random.default_rng(seed)
    weights = {
        name: random.normal(0, 1 if "bias" in name else 0.5, size).astype(np.float16)
        for name, size in shape.weights(len(tokens), sum(experts)).items()
    }
    known = np.array(tokens, dtype=np.uint32)
    tensors: dict[str, NDArray[Any]] = {"shape": np.array(shape, dtype=np.uint16), "tokens": known, **weights}
    vocabulary = max(tokens, default=0) + 1
    return PathsFile(
        model="random", experts_per_layer=experts, sequences=1, form=T5, vocabulary=vocabulary, tensors=tensors
    )
