"""Dependency-aware expert management: who leaves an executor's memory (CoServe, ASPLOS 2025, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Counts, Keys, Mask
from greenroom.policies.base.events import LayerRouting, SequenceEnd, SequenceInfo, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.victim_selection import lowest


@dataclass(frozen=True, slots=True, eq=False)
class Dependencies:
    """What is known of the experts of a collaboration before any request.

    ``usage[N]``: the probability that a request uses each. ``predecessors[i]``: the experts whose results lead to
    expert i.
    """

    usage: NDArray[np.float64]
    predecessors: tuple[frozenset[int], ...]


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
        if dependencies is not None and (
            dependencies.usage.shape != (catalogue.size,) or len(dependencies.predecessors) != catalogue.size
        ):
            raise InvalidConfig(
                "dependencies", f"of {len(dependencies.predecessors)} experts", f"those of {catalogue!r}"
            )
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
        self._waiting: Counts = np.zeros(catalogue.size, dtype=np.int64)
        self._waits_for: dict[int, int] = {}  # by sequence, the expert

    def on_sequence_queued(self, sequence: SequenceInfo) -> None:
        if sequence.expert is not None and sequence.sequence not in self._waits_for:
            self._waits_for[sequence.sequence] = sequence.expert
            self._waiting[sequence.expert] += 1

    def on_sequence_started(self, sequence: SequenceInfo) -> None:
        self._no_longer_waits(sequence.sequence)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self._no_longer_waits(sequence)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        if self._counts:
            self._usage[routing.experts] += routing.rows

    def victims(self, request: VictimRequest) -> Keys:
        catalogue = self.catalogue
        idle: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        idle[self._followers] = ~(self._leads & request.resident).any(axis=1)
        waiting = 0 if self._literal else self._waiting
        worth = np.where(idle, -catalogue.bytes_of.astype(np.float64), self._usage)
        stage = np.where(waiting, 2, np.where(idle, 0, 1))
        ranks = np.empty(catalogue.size, dtype=np.int64)
        ranks[np.lexsort((worth, stage))] = np.arange(catalogue.size)
        return lowest(catalogue, request, ranks)

    def _no_longer_waits(self, sequence: int) -> None:
        expert = self._waits_for.pop(sequence, None)
        if expert is not None:
            self._waiting[expert] -= 1
