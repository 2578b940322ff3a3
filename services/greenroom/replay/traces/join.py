"""Several traces of one model as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.events import Phase
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.token_numbers import numbered, texts_of, tokens_of
from greenroom.replay.traces.trace_file import TraceError


def joined(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """One trace of all sequences, in the order of ``traces``.

    It does not say which rows ran together, nor when requests arrived. It has tokens where all of them have. Raises
    TraceError for traces of several models, and where tokens are ids in one and texts in another.
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
    tokens, texts = _tokens(traces)
    models = {one.model for one in traces}
    return RoutingTrace(
        experts=np.concatenate([one.experts for one in traces]),
        seq_starts=np.concatenate([*starts, offsets[-1:]]),
        num_experts=first.num_experts,
        layer_ids=first.layer_ids,
        top_k=first.top_k,
        phase=phases,
        token=tokens,
        token_texts=texts,
        expert_bytes=first.expert_bytes,
        model=models.pop() if len(models) == 1 else "",
        decoder_start=first.decoder_start,
    )


def _tokens(traces: Sequence[RoutingTrace]) -> tuple[Counts | None, tuple[str, ...] | None]:
    """Texts are numbered anew, by first appearance in all of the traces; the unknown token follows the last."""
    if any(one.token is None for one in traces):
        return None, None
    if all(one.token_texts is None for one in traces):
        return np.concatenate([one.token for one in traces if one.token is not None]), None
    if any(one.token_texts is None for one in traces):
        raise TraceError("token: these are ids of the model in one trace, and texts in another")
    texts = tuple(dict.fromkeys(text for one in traces for text in texts_of(one, one.sequences)))
    return np.concatenate([tokens_of(numbered(one, texts)) for one in traces]), texts


def _shape(trace: RoutingTrace) -> str:
    return f"{trace.layers} layers, {trace.experts.shape[2]} picks, {int(trace.experts_per_layer.sum())} experts"
