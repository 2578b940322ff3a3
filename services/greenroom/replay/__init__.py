"""Traces of routing, and what a policy makes of them, without a model.

``RoutingTrace`` is the file, ``TraceRecorder`` makes one from a running engine. ``replay`` counts hits, with transfers
that take no time, and ``count_hits`` the same ones faster; ``greenroom.replay.timed`` runs the engine itself on
simulated links and a virtual clock.
"""

from greenroom.replay.cache import ReplayCache, ReplayResult, optimum, replay
from greenroom.replay.quick import count_hits
from greenroom.replay.record import TraceRecorder
from greenroom.replay.steps import TraceStep
from greenroom.replay.trace import RoutingTrace
from greenroom.replay.trace_file import TraceError

__all__ = [
    "ReplayCache",
    "ReplayResult",
    "RoutingTrace",
    "TraceError",
    "TraceRecorder",
    "TraceStep",
    "count_hits",
    "optimum",
    "replay",
]
