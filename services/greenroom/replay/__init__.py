"""Replay of recorded routing without a model: what a policy makes of it.

``traces`` holds the trace and its file, ``RoutingTrace``, and ``TraceRecorder``, which makes one from a running engine.
``replay`` counts hits, with transfers that take no time. ``simulation`` runs the engine itself on simulated links and a
virtual clock. ``sweeps`` compares policies and budgets.
"""

from greenroom.replay.hit_rates import ReplayCache, ReplayResult, optimum, replay
from greenroom.replay.traces.recorder import TraceRecorder
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.steps import TraceStep
from greenroom.replay.traces.trace_file import TraceError

__all__ = [
    "ReplayCache",
    "ReplayResult",
    "RoutingTrace",
    "TraceError",
    "TraceRecorder",
    "TraceStep",
    "optimum",
    "replay",
]
