"""Several traces of one model as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.policies.base.events import Phase
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.trace_file import TraceError


def joined(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """One trace of all sequences, in the order of ``traces``.

    It does not say which rows ran together, nor when requests arrived. Raises TraceError for traces of several models.
    """
    if len(traces) == 1:
        return traces[0]
    first = traces[0]
    for one in traces[1:]:
        same = one.experts.shape[1:] == first.experts.shape[1:] and one.experts.dtype == first.experts.dtype
        if not same or not np.array_equal(one.experts_per_layer, first.experts_per_layer):
            raise TraceError(f"traces of several models: {_shape(first)} and {_shape(one)}")
    offsets = np.cumsum([0, *(one.tokens for one in traces)])
    starts = [one.seq_starts[:-1] + offset for one, offset in zip(traces, offsets[:-1], strict=True)]
    phases = None
    if any(one.phase is not None for one in traces):
        phases = np.concatenate(
            [np.full(one.tokens, Phase.DECODE, np.uint8) if one.phase is None else one.phase for one in traces]
        )
    models = {one.model for one in traces}
    return RoutingTrace(
        experts=np.concatenate([one.experts for one in traces]),
        seq_starts=np.concatenate([*starts, offsets[-1:]]),
        num_experts=first.num_experts,
        layer_ids=first.layer_ids,
        top_k=first.top_k,
        phase=phases,
        expert_bytes=first.expert_bytes,
        model=models.pop() if len(models) == 1 else "",
        decoder_start=first.decoder_start,
    )


def _shape(trace: RoutingTrace) -> str:
    return f"{trace.layers} layers, {trace.experts.shape[2]} picks, {int(trace.experts_per_layer.sum())} experts"
