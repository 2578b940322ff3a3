"""Recorded routing traces, as predictors learn from them and are measured on them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from greenroom.core.errors import GreenroomError
from greenroom.predictor.kinds.emoe.sequences import Sequences, sequences_of
from greenroom.predictor.traces.counts import Picks, Shape
from greenroom.replay.traces.meta_file import meta_beside
from greenroom.replay.traces.routing_trace import RoutingTrace

TASK_FIELDS = ("task", "task_type", "category")


class BadMeta(GreenroomError):
    """A file beside a trace that does not say which task type each of its sequences is of."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trace with the task type of each sequence; sequences without a row are left out of everything here."""

    trace: RoutingTrace
    tasks: tuple[str, ...]

    @cached_property
    def sequences(self) -> Sequences:
        trace = self.trace
        return sequences_of(trace.experts, trace.seq_starts, self.tasks, self.shape.experts)

    @property
    def shape(self) -> Shape:
        return Shape(self.trace.layers, int(self.trace.experts_per_layer.max()))

    def picks(self) -> Iterator[Picks]:
        """Of each sequence, [rows, layers, k]."""
        starts: npt.NDArray[np.integer] = self.trace.seq_starts
        for begin, end in itertools.pairwise(starts):
            if end > begin:
                yield self.trace.experts[begin:end]


def read_recorded(path: Path, meta: Path | None = None) -> Recorded:
    """A trace that `greenroom trace` wrote or one like it.

    ``meta``: JSON Lines, line i with the task type of sequence i (``task``, ``task_type`` or ``category``). Without it,
    what the trace says itself, else the file ``NAME.meta.jsonl`` beside it, else all are of one type. Raises
    TraceError, BadMeta.
    """
    trace = RoutingTrace.load(path)
    beside = meta_beside(path)
    if meta is None and trace.task is None and beside.exists():
        meta = beside
    if meta is not None:
        return Recorded(trace, _tasks(meta, trace.sequences))
    return Recorded(trace, trace.task or ("",) * trace.sequences)


def _tasks(path: Path, sequences: int) -> tuple[str, ...]:
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
        tasks = tuple(next((str(line[name]) for name in TASK_FIELDS if line.get(name)), "") for line in lines)
    except (OSError, ValueError, AttributeError) as error:
        raise BadMeta(f"{path} has no task types: one JSON object a line is needed, with `task`: {error}") from error
    if len(tasks) != sequences:
        raise BadMeta(f"{path} has {len(tasks)} lines, the trace {sequences} sequences; line i must be of sequence i")
    return tasks
