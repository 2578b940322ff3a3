"""The systems that really serve. What is not here is replayed only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.coserve.systems import OURS, SAMBA, SAMBA_TORCH, Early
from greenroom.coe.serving.selection import Selection
from greenroom.profiling.coe.replayed_throughput import Scheme

COSERVE: Final = "CoServe"
SIMPLE: Final = "one memory, LRU"


@dataclass(frozen=True, slots=True)
class RealSystem:
    """``selection``: what the engine is told; None: no engine serves, experts come by `from_pretrained`. ``replayed``:
    what foretells it. ``executors``: None, as many as the replay of a sample finds best."""

    name: str
    selection: Selection | None
    replayed: Scheme
    executors: int | None = None


def _on_engine(name: str, selection: Selection, executors: int | None = None) -> RealSystem:
    return RealSystem(name, selection, selection, executors)


SYSTEMS: Final = (
    RealSystem(SAMBA_TORCH, None, Early("lru", ahead=False), 1),
    _on_engine(SAMBA, Selection("fcfs", "lru"), 1),
    _on_engine(COSERVE, Selection("coserve")),
    _on_engine(SIMPLE, Selection("coserve", "lru", {"assigning": False}, shared=True)),
    _on_engine(OURS, Selection("pull")),
)
ON_THE_LINE: Final = (COSERVE, SIMPLE, OURS)
