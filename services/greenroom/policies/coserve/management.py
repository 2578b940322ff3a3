"""Dependency-aware expert management: who leaves an executor's memory (CoServe, ASPLOS 2025, section 4.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.events import LayerRouting, SequenceEnd, SequenceInfo, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.victim_selection import lowest
from greenroom.policies.base.waiting_sequences import WaitingSequences


class CoServe(ExpertPolicy):
    """Two stages, each until enough is free. Stage 1: experts that others lead to, none of which is resident; the
    largest first. Stage 2: the others, by ascending probability of use.

    What the executor's own queue waits for leaves after all others. The paper does not say so; ``literal`` is as
    printed. Without ``dependencies`` there is no stage 1, and the probabilities are the shares of uses so far.
    """

    def __init__(
        self, catalogue: Catalogue, *, dependencies: Dependencies | None = None, literal: bool = False
    ) -> None:
        """Raises InvalidConfig for dependencies of other experts."""
        if dependencies is not None:
            dependencies.check(catalogue)
        super().__init__(catalogue)
        self._literal = literal
        self._usage: NDArray[np.float64] = np.zeros(catalogue.size)
        self._counts = dependencies is None
        before = () if dependencies is None else dependencies.predecessors
        if dependencies is not None:
            self._usage[:] = dependencies.usage
        self._followers: Keys = np.flatnonzero([bool(own) for own in before])
        self._leads: Mask = np.zeros((len(self._followers), catalogue.size), dtype=np.bool_)
        """``[follower, predecessor]``. Not of all experts: an MoE model may have 20,000, of which none follows."""
        for place, key in enumerate(self._followers.tolist()):
            self._leads[place, sorted(before[key])] = True
        self._waiting = WaitingSequences(catalogue.size)

    def on_sequence_queued(self, sequence: SequenceInfo) -> None:
        self._waiting.queued(sequence)

    def on_sequence_started(self, sequence: SequenceInfo) -> None:
        self._waiting.left(sequence.sequence)

    def on_sequence_preempted(self, sequence: SequenceInfo) -> None:
        self._waiting.queued(sequence)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self._waiting.left(sequence)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        if self._counts:
            self._usage[routing.experts] += routing.rows

    def victims(self, request: VictimRequest) -> Keys:
        catalogue = self.catalogue
        idle: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        idle[self._followers] = ~(self._leads & request.resident).any(axis=1)
        waiting = 0 if self._literal else self._waiting.counts
        worth = np.where(idle, -catalogue.bytes_of.astype(np.float64), self._usage)
        stage = np.where(waiting, 2, np.where(idle, 0, 1))
        ranks = np.empty(catalogue.size, dtype=np.int64)
        ranks[np.lexsort((worth, stage))] = np.arange(catalogue.size)
        return lowest(catalogue, request, ranks)
