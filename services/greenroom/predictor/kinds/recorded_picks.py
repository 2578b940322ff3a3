"""Whole sequences' picks as samples, and as a trace to fit on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from greenroom.predictor.making.job import Job
from greenroom.predictor.traces.counts import Picks
from greenroom.predictor.traces.samples import Kept

if TYPE_CHECKING:
    from greenroom.replay.traces.routing_trace import RoutingTrace


def distinct_picks(picks: Picks, experts: int) -> Kept | None:
    """[rows, layers, k], as they are; None where a row picks an expert twice."""
    ordered = np.sort(picks, axis=2)
    if ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] < experts)).any():
        return None
    return picks.copy()  # what came off the wire is a view of the whole record


def trace_of(job: Job) -> RoutingTrace:
    """The samples as one trace. Raises TraceError."""
    from greenroom.replay.traces.routing_trace import RoutingTrace

    picks = [one.array for one in job.samples]
    starts = np.concatenate(([0], np.cumsum([len(one) for one in picks]))).astype(np.int64)
    return RoutingTrace(np.concatenate(picks), starts, num_experts=job.shape.experts, model=job.model)
