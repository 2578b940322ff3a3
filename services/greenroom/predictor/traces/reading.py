"""What a record of ``traces`` says."""

from __future__ import annotations

from greenroom.core.messages import Trace, Undecodable, decode
from greenroom.fabric.log import Record
from greenroom.policies.moe_infinity.policy import RECALL
from greenroom.predictor.traces.counts import BadTrace


def trace_of(record: Record) -> Trace:
    """Raises Undecodable, BadTrace."""
    if record.value is None:
        raise Undecodable("a record without a value")
    trace: Trace = decode(record.value, Trace)
    if not trace.model:
        raise BadTrace("a trace that names no model")
    return trace


def recall_of(trace: Trace) -> float | None:
    """The share of the sequence's picks that its worker foresaw, 0 to 1. None: the worker does not say, or says
    something that is no share."""
    recall = trace.report.get(RECALL)
    return recall if recall is not None and 0 <= recall <= 1 else None
