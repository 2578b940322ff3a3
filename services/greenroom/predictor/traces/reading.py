"""What is read of a record of ``traces``, and what each who learns from it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from greenroom.core.messages import Trace, Undecodable, decode
from greenroom.fabric.log import Record
from greenroom.predictor.kinds.emoe.samples import Sample, count_slots
from greenroom.predictor.making.kind import Kept
from greenroom.predictor.making.maker import keep
from greenroom.predictor.traces.counts import BadTrace, SequenceCounts, count, picks_of


class Counted(NamedTuple):
    """Of one sequence: for statistics, for predictors that are learnt, for artifacts of expert policies by kind."""

    counts: SequenceCounts
    sample: Sample | None
    kept: Mapping[str, Kept | None]


def trace_of(record: Record) -> Trace:
    """Raises Undecodable, BadTrace."""
    if record.value is None:
        raise Undecodable("a record without a value")
    trace: Trace = decode(record.value, Trace)
    if not trace.model:
        raise BadTrace("a trace that names no model")
    return trace


def counted(trace: Trace, for_learning: bool, kinds: Sequence[str]) -> Counted:
    """``kinds``: of artifacts that something is to be kept for. In any thread. Raises BadTrace."""
    counts = count(trace)
    if not trace.rows:
        return Counted(counts, None, {})
    picks = picks_of(trace)
    sample = Sample(trace.task_type, count_slots(picks, trace.num_experts)) if for_learning else None
    return Counted(counts, sample, keep(kinds, picks, trace.num_experts))
