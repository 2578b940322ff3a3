"""The steps of a trace: which of its rows run together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.events import Phase
from greenroom.policies.base.expert_keys import Catalogue


@dataclass(frozen=True, slots=True, eq=False)
class TraceStep:
    """One step of a replay: rows of ``sequences[T]`` in ``phases[T]`` with their ``picks[T, layers, k]``.

    ``started`` and ``ended``: sequences whose first and whose last rows are among them. ``tokens[T]``: the token that
    each row is of; ``positions[T]``: its place in its sequence. ``tokens`` is None where it was not recorded.
    ``prompts``: of each sequence of ``started``, the tokens of its whole prompt, where they were recorded.
    """

    sequences: NDArray[np.int64]
    picks: NDArray[np.integer]
    phases: NDArray[np.uint8]
    started: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    tokens: NDArray[np.int64] | None = None
    positions: NDArray[np.int64] | None = None
    prompts: tuple[NDArray[np.int64], ...] = ()


NO_TOKENS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
NO_TOKENS.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class TraceRows:
    """What steps are made of: the arrays of a ``RoutingTrace``, by row, and where each sequence's rows start."""

    experts: NDArray[np.integer]
    seq_starts: Counts
    phase: NDArray[np.uint8] | None
    step: Counts | None
    token: Counts | None = None

    def side_by_side(self, concurrent: int, tokens: int | None, prefill_chunk: int) -> Iterator[TraceStep]:
        """See ``RoutingTrace.steps``."""
        left = len(self.experts) if tokens is None else tokens
        starts, ends = self.seq_starts[:-1].tolist(), self.seq_starts[1:].tolist()
        full = [(n, begin, end) for n, (begin, end) in enumerate(zip(starts, ends, strict=True)) if begin < end]
        if self.phase is None:
            return self._of_single_rows(iter(full), concurrent, left)
        chunks = iter((n, _chunks(self.phase, self.step, begin, end, prefill_chunk)) for n, begin, end in full)
        return self._of_chunks(chunks, concurrent, left)

    def as_recorded(self, step: Counts, tokens: int | None) -> Iterator[TraceStep]:
        """See ``RoutingTrace.recorded_steps``; ``step[tokens]``."""
        left = len(self.experts) if tokens is None else tokens
        owner = np.repeat(np.arange(len(self.seq_starts) - 1), np.diff(self.seq_starts))
        order = np.argsort(step, kind="stable")
        bounds = np.flatnonzero(np.diff(step[order])) + 1
        first = np.zeros(len(self.experts), dtype=np.bool_)
        last = np.zeros(len(self.experts), dtype=np.bool_)
        full = self.seq_starts[:-1] < self.seq_starts[1:]
        first[self.seq_starts[:-1][full]] = True
        last[self.seq_starts[1:][full] - 1] = True
        for group in np.split(order, bounds) if len(order) else ():
            if left <= 0:
                return
            rows = group[:left]
            started, ended = owner[rows[first[rows]]].tolist(), owner[rows[last[rows]]].tolist()
            yield self._step_of(rows, owner[rows], tuple(started), tuple(ended))
            left -= len(rows)

    def _of_single_rows(
        self, waiting: Iterator[tuple[int, int, int]], concurrent: int, left: int
    ) -> Iterator[TraceStep]:
        running: list[tuple[int, int, int]] = []
        decode = np.full(concurrent, Phase.DECODE, dtype=np.uint8)
        while left > 0:
            fresh = list(itertools.islice(waiting, concurrent - len(running)))
            running.extend(fresh)
            if not running:
                return
            rows = running[:left]
            numbers = np.array([number for number, _, _ in rows], dtype=np.int64)
            places = np.array([row for _, row, _ in rows], dtype=np.int64)
            yield TraceStep(
                numbers,
                self.experts[places],
                decode[: len(rows)],
                tuple(number for number, _, _ in fresh),
                tuple(number for number, row, end in rows if row + 1 == end),
                None if self.token is None else self.token[places],
                places - self.seq_starts[numbers],
            )
            left -= len(rows)
            running = [(number, row + 1, end) for number, row, end in running if row + 1 < end]

    def _of_chunks(
        self, waiting: Iterator[tuple[int, Iterator[tuple[range, bool]]]], concurrent: int, left: int
    ) -> Iterator[TraceStep]:
        running: list[tuple[int, Iterator[tuple[range, bool]]]] = []
        while left > 0:
            fresh = list(itertools.islice(waiting, concurrent - len(running)))
            running.extend(fresh)
            if not running:
                return
            rows, numbers, over = [], [], []
            for number, chunks in running:
                chunk, last = next(chunks)
                rows.append(np.arange(chunk.start, chunk.stop))
                numbers.append(np.full(len(chunk), number))
                if last:
                    over.append((number, sum(map(len, rows))))
            taken = np.concatenate(rows)[:left]
            ended = tuple(number for number, rows_until in over if rows_until <= left)
            yield self._step_of(taken, np.concatenate(numbers)[:left], tuple(number for number, _ in fresh), ended)
            left -= len(taken)
            running = [(number, chunks) for number, chunks in running if number not in ended]

    def _step_of(self, rows: Counts, sequences: Counts, started: tuple[int, ...], ended: tuple[int, ...]) -> TraceStep:
        phases = np.full(len(rows), Phase.DECODE, dtype=np.uint8) if self.phase is None else self.phase[rows]
        tokens = None if self.token is None else self.token[rows]
        positions = rows - self.seq_starts[sequences]
        prompts = () if self.token is None else tuple(map(self._prompt, started))
        return TraceStep(sequences, self.experts[rows], phases, started, ended, tokens, positions, prompts)

    def _prompt(self, sequence: int) -> NDArray[np.int64]:
        """The tokens of its rows before the first that decodes."""
        if self.token is None or self.phase is None:
            return NO_TOKENS
        rows = slice(int(self.seq_starts[sequence]), int(self.seq_starts[sequence + 1]))
        decodes = np.flatnonzero(self.phase[rows] == Phase.DECODE)
        return self.token[rows][: decodes[0] if len(decodes) else None]


def layers_of(catalogue: Catalogue, step: TraceStep) -> list[list[int]]:
    """The distinct experts that each layer of the step uses, as keys of ``catalogue``, in their order of use.

    That order is the recorded one where the step has one row, else ascending.
    """
    keys = step.picks + catalogue.first[:-1, None]
    real = step.picks < catalogue.experts_per_layer[:, None]
    keys[~real] = -1
    if len(keys) == 1:
        layers = keys[0].tolist()
    else:
        layers = [sorted(set(layer)) for layer in keys.swapaxes(0, 1).reshape(catalogue.layers, -1).tolist()]
    return layers if real.all() else [[key for key in layer if key >= 0] for layer in layers]


def groups(catalogue: Catalogue, steps: Iterable[TraceStep]) -> Iterator[list[int]]:
    """``layers_of`` of all steps, layer after layer."""
    return itertools.chain.from_iterable(layers_of(catalogue, step) for step in steps)


def _chunks(
    phase: NDArray[np.uint8], step: Counts | None, begin: int, end: int, prefill_chunk: int
) -> Iterator[tuple[range, bool]]:
    """The rows ``begin:end`` of a sequence, chunk by chunk as they run in a step, and whether a chunk is the last."""
    row = begin
    while row < end:
        stop = row + 1
        if phase[row] != Phase.DECODE:
            limit = end if step is not None else min(end, row + prefill_chunk)
            while stop < limit and phase[stop] == phase[row] and (step is None or step[stop] == step[row]):
                stop += 1
        yield range(row, stop), stop == end
        row = stop
