"""What a quick replay asks: who leaves. See ``greenroom.replay.quick``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from greenroom.replay.traces.steps import TraceStep

Group = list[int]
"""The distinct experts of one layer of one step, in the order in which they count as used."""


class Rule(ABC):
    """Who leaves. Knows who is resident by what it was told, and starts with nobody."""

    def begin_step(self, step: TraceStep, layers: Sequence[Group]) -> None:
        """These will be routed, layer after layer."""
        return

    @abstractmethod
    def route(self, layer: int, group: Group, missing: Group, leaving: int) -> Sequence[int]:
        """``group`` is used, which brings in those of it that are ``missing``: so many leave, and none of the group."""

    def end_step(self, step: TraceStep) -> None:
        """All its layers have been."""
        return
