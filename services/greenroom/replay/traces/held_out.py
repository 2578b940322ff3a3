"""Which of a trace's sequences are learnt from, and which are held out to measure by."""

from __future__ import annotations

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.replay.traces.routing_trace import RoutingTrace


def sequences_to_learn_from(trace: RoutingTrace, held_out: float, *, least: int, field: str = "trace") -> int:
    """How many of the first sequences. The others are held out: this share of all that have tokens, and at least one.

    Sequences without tokens were queued, and not recorded. Raises InvalidConfig, naming ``field``, where those to learn
    from have fewer than ``least`` tokens.
    """
    recorded = np.flatnonzero(np.diff(trace.seq_starts))
    out_of = max(1, round(len(recorded) * held_out))
    count = int(recorded[-out_of]) if out_of <= len(recorded) else 0
    tokens = int(trace.seq_starts[count])
    if tokens < least:
        out = f"{trace.tokens - tokens:,} tokens of {min(out_of, len(recorded))} of {len(recorded)} sequences"
        allowed = f"at least {least:,} tokens, beside the {out} held out: give more prompts, or let answers be longer"
        raise InvalidConfig(field, f"{tokens:,} tokens to learn from", allowed)
    return count
