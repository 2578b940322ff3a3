"""Which of a trace's sequences are learnt from, and which are held out to measure by."""

from __future__ import annotations

from greenroom.core.errors import InvalidConfig
from greenroom.replay.traces.routing_trace import RoutingTrace


def sequences_to_learn_from(trace: RoutingTrace, held_out: float, *, least: int, field: str = "trace") -> int:
    """How many of the first sequences. The others are held out: this share of all, and at least one.

    Raises InvalidConfig, naming ``field``, where those to learn from have fewer than ``least`` tokens.
    """
    count = max(0, trace.sequences - max(1, round(trace.sequences * held_out)))
    tokens = int(trace.seq_starts[count])
    if tokens < least:
        out = f"{trace.tokens - tokens:,} tokens of {trace.sequences - count} of {trace.sequences} sequences"
        allowed = f"at least {least:,} tokens, beside the {out} held out: give more prompts, or let answers be longer"
        raise InvalidConfig(field, f"{tokens:,} tokens to learn from", allowed)
    return count
