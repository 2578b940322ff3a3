"""Writes down, beside the routing, the rows that each layer's router and experts get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.units import GIB
from greenroom.experts.source import Arriving, ExpertSource
from greenroom.moe.kernels.expert_hooks import ModelHooks
from greenroom.policies.base.events import Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.replay.traces.recorder import TraceRecorder

Rows = NDArray[np.float16]

MOST_BYTES = 2 * GIB
_MOST = float(np.finfo(np.float16).max)
"""Some models have a few numbers beyond it. What is learnt needs to be told that they are large."""


class RowRecorder(TraceRecorder):
    """A TraceRecorder that keeps the rows too, as half floats, for as long as they take at most ``most_bytes``.

    A later step is not kept, neither its rows nor its routing. It is the engine's listener and, in ``recording``, the
    model's look-ahead hook.
    """

    def __init__(self, catalogue: Catalogue, *, most_bytes: int = MOST_BYTES) -> None:
        super().__init__(catalogue)
        self._most_bytes = most_bytes
        self._bytes = 0
        self._now: dict[int, Rows] = {}  # by layer, of the step that runs
        self._kept: list[Rows] = []

    @property
    def is_full(self) -> bool:
        """Whether a step was left out."""
        return self._bytes > self._most_bytes

    def __call__(self, layer: int, rows: torch.Tensor) -> None:
        found = rows.detach().float().nan_to_num(0.0, _MOST, -_MOST).clamp_(-_MOST, _MOST)
        self._now[layer] = found.cpu().numpy().astype(np.float16)

    def answer(self) -> None:
        """Nothing: it is asked nothing."""

    def step_ended(self, step: Step, *, failed: bool) -> None:
        now, self._now = self._now, {}
        if not failed:
            self._bytes += sum(rows.nbytes for rows in now.values())
        before = len(self._steps)
        super().step_ended(step, failed=failed or self.is_full)
        if len(self._steps) > before:
            self._kept.append(np.stack([now[layer] for layer in range(len(now))], axis=1))

    def rows(self) -> Rows:
        """``[T, layers, H]``: those of the rows of ``trace()``, which are handed over: it has none afterwards, so that
        they are in memory once. Raises ValueError where none was recorded.
        """
        order = np.argsort(np.concatenate([step.sequences for step in self._steps]), kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        found: Rows = np.empty((len(order), *self._kept[0].shape[1:]), dtype=np.float16)
        end = len(order)
        while self._kept:
            step = self._kept.pop()
            found[places[end - len(step) : end]] = step
            end -= len(step)
        return found


class _Unabridged:
    """An ExpertSource whose layers never run in one compiled call, which would hear of no rows."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source

    def step(
        self,
        sequences: NDArray[np.int64],
        prefill: NDArray[np.bool_],
        tokens: NDArray[np.int64] | None = None,
        paths: NDArray[np.float32] | None = None,
    ) -> AbstractContextManager[None]:
        return self._source.step(sequences, prefill, tokens, paths)

    def layer_entered(self, layer: int) -> None:
        self._source.layer_entered(layer)

    def allowed_experts(self, layer: int) -> NDArray[np.bool_] | None:
        return self._source.allowed_experts(layer)

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None:
        self._source.rerouted(layer, rows)

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        return self._source.routed(layer, picks)


@contextmanager
def recording(hooks: ModelHooks, engine: Any, recorder: RowRecorder) -> Iterator[None]:
    """``engine``, the source of the model with these ``hooks``, tells ``recorder``. No router runs ahead meanwhile."""
    source, look_ahead, listener = hooks.source, hooks.look_ahead, engine.listener
    hooks.source, hooks.look_ahead, engine.listener = _Unabridged(engine), recorder, recorder
    try:
        yield
    finally:
        hooks.source, hooks.look_ahead, engine.listener = source, look_ahead, listener
