"""Which experts sequences wait for, in a graph of whole models."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.events import SequenceInfo


class WaitingSequences:
    """``counts[N]``: how many wait for each expert. ``since[N]``: the place of the one that has waited longest, among
    all sequences in the order in which they were queued; meaningless where none waits.
    """

    def __init__(self, experts: int) -> None:
        self.counts: Counts = np.zeros(experts, dtype=np.int64)
        self.since: Counts = np.zeros(experts, dtype=np.int64)
        self._expert_of: dict[int, int] = {}
        self._places: dict[int, dict[int, int]] = {}  # by expert, of its sequences in order
        self._queued = 0

    def queued(self, sequence: SequenceInfo) -> None:
        expert, number = sequence.expert, sequence.sequence
        if expert is None or number in self._expert_of:
            return
        self._expert_of[number] = expert
        self._queued += 1
        if not self.counts[expert]:
            self.since[expert] = self._queued
        self.counts[expert] += 1
        self._places.setdefault(expert, {})[number] = self._queued

    def left(self, sequence: int) -> None:
        """It has started or ended. One that does not wait is passed over."""
        expert = self._expert_of.pop(sequence, None)
        if expert is None:
            return
        self.counts[expert] -= 1
        places = self._places[expert]
        del places[sequence]
        if places:
            self.since[expert] = next(iter(places.values()))
        else:
            del self._places[expert]
