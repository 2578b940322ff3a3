"""Recording a routing trace from a running engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.events import UNKNOWN_TASK, SequenceInfo, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.replay.traces.routing_trace import RoutingTrace, narrowest


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedStep:
    sequences: NDArray[np.int64]
    phases: NDArray[np.uint8]
    picks: NDArray[np.integer]
    tokens: NDArray[np.int64] | None


class TraceRecorder:
    """Keeps every finished step's routing: ``engine.listener = TraceRecorder(...)``; ``trace`` returns it.

    A step that fails runs again, and counts once, as do the rows of a sequence that was preempted. The engine calls it
    on its own thread; ``trace`` and ``clear`` are to be called when nothing runs. Grows by layers × k bytes a token,
    twice that beyond 255 experts a layer, and 16 for the token itself.
    """

    def __init__(self, catalogue: Catalogue, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._width = max(1, int(catalogue.top_k.max()))
        self.clear()

    def clear(self) -> None:
        """Forget everything; arrivals count from now."""
        self._began = self._clock()
        self._queued: dict[int, tuple[str, float]] = {}
        self._steps: list[_RecordedStep] = []
        self._layers: dict[int, NDArray[np.integer]] = {}
        self._rows: dict[int, int] = {}
        self._again: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        """Rows recorded so far."""
        return sum(len(step.sequences) for step in self._steps)

    # -- called by the engine --------------------------------------------------------------------------------------

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        self._queued[sequence.sequence] = sequence.task, self._clock() - self._began

    def sequence_preempted(self, sequence: int) -> None:
        self._again[sequence] = self._rows.get(sequence, 0)

    def layer_routed(self, step: Step, layer: int, picks: NDArray[np.integer]) -> None:
        experts = int(self._catalogue.experts_per_layer[layer])
        kept = np.full((len(picks), self._width), experts, dtype=np.int64)
        kept[:, : picks.shape[1]] = picks
        self._layers[layer] = narrowest(kept, experts, int(self._catalogue.experts_per_layer.max()))

    def step_ended(self, step: Step, *, failed: bool) -> None:
        layers, self._layers = self._layers, {}
        if not failed and len(layers) == self._catalogue.layers and step.rows:
            picks = np.stack([layers[layer] for layer in range(len(layers))], axis=1)
            new = self._new_rows(step)
            tokens = None if step.row_tokens is None else step.row_tokens[new]
            if new.any():
                self._steps.append(_RecordedStep(step.row_sequences[new], step.row_phases[new], picks[new], tokens))

    def _new_rows(self, step: Step) -> NDArray[np.bool_]:
        """``[T]``: which rows have not run before. A sequence's rows stand in their order."""
        new = np.ones(step.rows, dtype=np.bool_)
        for sequence, rows in zip(
            *(each.tolist() for each in np.unique(step.row_sequences, return_counts=True)), strict=True
        ):
            again = min(rows, self._again.get(sequence, 0))
            if again:
                self._again[sequence] -= again
                new[np.flatnonzero(step.row_sequences == sequence)[:again]] = False
            self._rows[sequence] = self._rows.get(sequence, 0) + rows - again
        return new

    def sequence_reported(self, sequence: int, report: Mapping[str, float]) -> None:
        """Nothing: only routing is kept."""

    # -- the trace -------------------------------------------------------------------------------------------------

    def trace(self, *, model: str = "", layer_ids: Sequence[int] | None = None) -> RoutingTrace:
        """The trace of all sequences that were queued or run, in the order of their ids."""
        catalogue, steps = self._catalogue, self._steps
        none = np.zeros((0, catalogue.layers, self._width), dtype=np.uint8)
        sequences = np.concatenate([np.zeros(0, dtype=np.int64), *(step.sequences for step in steps)])
        order = np.argsort(sequences, kind="stable")
        known = sorted({*self._queued, *np.unique(sequences).tolist()})
        ends = np.searchsorted(sequences[order], known, side="right")
        numbers = np.repeat(np.arange(len(steps)), [len(step.sequences) for step in steps])
        told = [step.tokens for step in steps if step.tokens is not None]
        tokens = np.concatenate(told) if steps and len(told) == len(steps) else None
        tasks = tuple(self._queued.get(sequence, (UNKNOWN_TASK, 0.0))[0] for sequence in known)
        arrivals = [self._queued.get(sequence, (UNKNOWN_TASK, 0.0))[1] for sequence in known]
        uniform = len(set(catalogue.experts_per_layer.tolist())) == 1
        return RoutingTrace(
            experts=np.concatenate([step.picks for step in steps] or [none])[order],
            seq_starts=np.concatenate(([0], ends)).astype(np.int64),
            num_experts=int(catalogue.experts_per_layer[0]) if uniform else catalogue.experts_per_layer.copy(),
            layer_ids=np.arange(catalogue.layers) if layer_ids is None else np.array(layer_ids, dtype=np.int64),
            top_k=catalogue.top_k.copy(),
            phase=np.concatenate([np.zeros(0, dtype=np.uint8), *(step.phases for step in steps)])[order],
            step=numbers[order].astype(np.int64),
            token=None if tokens is None else tokens[order],
            task=tasks if any(task != UNKNOWN_TASK for task in tasks) else None,
            arrival=np.array(arrivals, dtype=np.float64),
            expert_bytes=catalogue.bytes_of[catalogue.first[:-1]].copy(),
            model=model,
            decoder_start=catalogue.decoder_start,
        )
