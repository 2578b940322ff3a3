"""Models of the world: routing drawn from known distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from greenroom.core.messages import Trace

Floats = npt.NDArray[np.floating[Any]]


def f32(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    return np.asarray(values, np.float32)


def trace(
    picks: npt.ArrayLike,
    num_experts: int,
    /,
    *,
    request_id: str = "r",
    task_type: str = "",
    model: str = "m",
    dtype: str = "uint8",
    **fields: Any,
) -> Trace:
    """``picks``: [rows, layers, k]."""
    array = np.asarray(picks, np.dtype(dtype).newbyteorder("<"))
    rows, layers, k = array.shape
    given: dict[str, Any] = {
        "request_id": request_id,
        "pool": 0,
        "model": model,
        "task_type": task_type,
        "rows": rows,
        "prompt_rows": rows // 2,
        "layers": layers,
        "k": k,
        "num_experts": num_experts,
        "dtype": dtype,
        "experts": array.tobytes(),
    }
    return Trace(**{**given, **fields})


class World:
    """One pick a row and layer: the first layer from ``first``, each further one from the one before by ``steps``.

    ``first``: [experts]; ``steps``: [layers - 1, experts, experts], rows of sum 1.
    """

    def __init__(self, seed: int, layers: int, experts: int) -> None:
        self.random = np.random.default_rng(seed)
        self.layers, self.experts = layers, experts
        self.first = self.random.dirichlet(np.full(experts, 0.5))
        self.steps = self.random.dirichlet(np.full(experts, 0.3), size=(layers - 1, experts))

    def marginals(self, first: Floats | None = None) -> Floats:
        """[layers, experts]: what the picks of all rows together go to."""
        rows = [self.first if first is None else first]
        for step in self.steps:
            rows.append(rows[-1] @ step)
        return np.asarray(rows)

    def picks(self, rows: int, first: Floats | None = None) -> npt.NDArray[np.int64]:
        """[rows, layers, 1]."""
        chosen = np.empty((rows, self.layers, 1), np.int64)
        chosen[:, 0, 0] = self.random.choice(self.experts, rows, p=self.first if first is None else first)
        for layer, step in enumerate(self.steps):
            draws = self.random.random(rows)
            sums = step.cumsum(axis=1)[chosen[:, layer, 0]]
            chosen[:, layer + 1, 0] = np.minimum((draws[:, None] > sums).sum(axis=1), self.experts - 1)
        return chosen
