"""The routing of each sequence while it runs, for the traces that a worker publishes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Ids
from greenroom.policies.base.events import SequenceInfo, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.worker.generation_engine import RecordedRouting

_FIRST_ROWS = 64
_OF_A_PROMPT = 0.75
"""Of the rows that are kept: the prompt's part at most. What decoding is foretold by is learnt from the answer's."""


class _Rows:
    """One sequence's rows so far: ``seen`` in all, of which ``count`` are kept, ``prompt_rows`` of the prompt. The next
    ``again`` rows have been seen.
    """

    __slots__ = ("again", "count", "experts", "prompt_rows", "prompt_tokens", "report", "seen", "tokens", "tokens_told")

    def __init__(self, prompt_tokens: int, *, tokens_told: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self.seen = self.count = self.prompt_rows = self.again = 0
        self.experts: NDArray[np.unsignedinteger] | None = None
        self.tokens: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self.tokens_told = tokens_told
        self.report: Mapping[str, float] = {}


class RoutingRecorder:
    """Keeps ``most_rows`` rows of every sequence until ``take``: ``engine.listener = RoutingRecorder(...)``. They are
    the prompt's first ones, up to three quarters, and then the answer's first ones.

    Told on the engine's thread. A step that fails is run again and counts once, as do a preempted sequence's rows.
    ``take`` must be called for every sequence once it has ended, from any thread. Held for each are at most
    ``most_rows`` × layers × k bytes (twice that beyond 255 experts a layer). ``tokens``: keep each row's token too, 4
    bytes a row; a sequence of which some step did not tell them has none.
    """

    def __init__(self, catalogue: Catalogue, *, most_rows: int, tokens: bool = False) -> None:
        self._catalogue = catalogue
        self._most_rows = most_rows
        self._tokens = tokens
        self._most_prompt_rows = max(1, int(_OF_A_PROMPT * most_rows))
        self._num_experts = int(catalogue.experts_per_layer.max())
        self._dtype = np.dtype(np.uint8 if self._num_experts <= 255 else np.uint16)
        self._none = 255 if self._dtype == np.uint8 else 65535
        self._width = max(1, int(catalogue.top_k.max()))
        self._step = self._buffer(_FIRST_ROWS)
        self._seen = 0
        self._sequences: dict[int, _Rows] = {}

    def _buffer(self, rows: int) -> NDArray[np.unsignedinteger]:
        return np.full((rows, self._catalogue.layers, self._width), self._none, dtype=self._dtype)

    # -- told by the engine ----------------------------------------------------------------------------------------

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        self._sequences[sequence.sequence] = _Rows(sequence.prompt_tokens, tokens_told=self._tokens)

    def sequence_preempted(self, sequence: int) -> None:
        rows = self._sequences.get(sequence)
        if rows is not None:
            rows.again = rows.seen

    def layer_routed(self, step: Step, layer: int, picks: NDArray[np.integer]) -> None:
        rows, k = picks.shape
        if rows > len(self._step):
            larger = self._buffer(2 * rows)
            larger[: len(self._step)] = self._step
            self._step = larger
        # A number from the layer's experts on means no pick. It must not wrap around to a pick.
        np.minimum(picks, self._none, out=self._step[:rows, layer, :k], casting="unsafe")
        self._seen += 1

    def step_ended(self, step: Step, *, failed: bool) -> None:
        seen, self._seen = self._seen, 0
        if failed or seen != self._catalogue.layers:
            return
        sequences, tokens = step.row_sequences, step.row_tokens
        starts = [0, *(np.flatnonzero(sequences[1:] != sequences[:-1]) + 1).tolist(), len(sequences)]
        owners = sequences[starts[:-1]].tolist() if len(sequences) else []
        for place, owner in enumerate(owners):
            rows = self._sequences.get(owner)
            if rows is not None:
                rows.tokens_told &= tokens is not None
                self._take_rows(rows, starts[place], starts[place + 1], tokens if rows.tokens_told else None)

    def sequence_reported(self, sequence: int, report: Mapping[str, float]) -> None:
        rows = self._sequences.get(sequence)
        if rows is not None:
            rows.report = report

    def _take_rows(self, rows: _Rows, start: int, stop: int, tokens: Ids | None) -> None:
        again = min(stop - start, rows.again)
        rows.again -= again
        start += again
        of_prompt = min(stop - start, max(0, rows.prompt_tokens - rows.seen))
        rows.seen += stop - start
        kept = min(of_prompt, self._most_prompt_rows - rows.prompt_rows)
        rows.prompt_rows += kept
        self._keep(rows, start, start + kept, tokens)
        self._keep(rows, start + of_prompt, stop, tokens)

    def _keep(self, rows: _Rows, start: int, stop: int, tokens: Ids | None) -> None:
        count = min(stop - start, self._most_rows - rows.count)
        if count <= 0:
            return
        end = rows.count + count
        if rows.experts is None or end > len(rows.experts):
            room = min(self._most_rows, max(2 * end, min(rows.prompt_tokens, self._most_prompt_rows) + _FIRST_ROWS))
            larger = np.empty((room, *self._step.shape[1:]), dtype=self._dtype)
            told = np.empty(room if rows.tokens_told else 0, dtype=np.uint32)
            if rows.experts is not None:
                larger[: rows.count] = rows.experts[: rows.count]
                told[: rows.count] = rows.tokens[: len(told)][: rows.count]
            rows.experts, rows.tokens = larger, told
        rows.experts[rows.count : end] = self._step[start : start + count]
        if tokens is not None:
            rows.tokens[rows.count : end] = tokens[start : start + count]
        rows.count = end

    # -- what came of it -------------------------------------------------------------------------------------------

    def take(self, sequence: int) -> RecordedRouting | None:
        """The sequence's rows, which are forgotten; None where there are none."""
        rows = self._sequences.pop(sequence, None)
        if rows is None or rows.experts is None:
            return None
        experts = rows.experts[: rows.count].copy()
        experts[experts >= self._catalogue.experts_per_layer[None, :, None]] = self._none
        tokens = rows.tokens[: rows.count].copy() if rows.tokens_told else None
        return RecordedRouting(experts, rows.prompt_rows, self._num_experts, rows.report, tokens=tokens)

    @property
    def held(self) -> int:
        """Sequences whose rows have not been taken."""
        return len(self._sequences)
