"""Who leaves a memory of whole models that all executors share: ``pull``, our own (docs/decisions/0031)."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.events import LayerRouting, SequenceEnd, SequenceInfo, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth
from greenroom.policies.base.waiting_sequences import WaitingSequences
from greenroom.policies.replacement.decayed_frequency import Decayed

_WAITED_FOR = 1 << 62


class Pull(RankingPolicy):
    """An expert that no request waits for leaves first, by ascending probability of use. Then those that requests wait
    for: the one that has been waited for since the shortest time, because its turn comes last.

    Without ``dependencies`` the probabilities are decayed counts: a request counts for its expert when it is queued,
    and ``decay`` times as much with each request after it. Where requests name no expert (a model of MoE layers), the
    uses count.
    """

    def __init__(self, catalogue: Catalogue, *, dependencies: Dependencies | None = None, decay: float = 0.999) -> None:
        """Raises InvalidConfig for dependencies of other experts, and for a decay that is not between 0 and 1."""
        if dependencies is not None:
            dependencies.check(catalogue)
        super().__init__(catalogue)
        self._usage = None if dependencies is None else dependencies.usage
        self._counts = Decayed(catalogue, decay=decay)
        self._requests_name_experts = False
        self._waiting = WaitingSequences(catalogue.size)

    def on_sequence_queued(self, sequence: SequenceInfo) -> None:
        self._waiting.queued(sequence)
        if sequence.expert is not None:
            self._requests_name_experts = True
            self._counts.use(np.array([sequence.expert], dtype=np.int64))

    def on_sequence_started(self, sequence: SequenceInfo) -> None:
        self._waiting.left(sequence.sequence)

    def on_sequence_preempted(self, sequence: SequenceInfo) -> None:
        self._waiting.queued(sequence)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self._waiting.left(sequence)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        if not self._requests_name_experts:
            self._counts.on_layer_routed(routing)

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        waiting = self._waiting
        turns: Counts = np.where(waiting.counts > 0, _WAITED_FOR - waiting.since, 0)
        return turns, self._counts.worth(tier)[0] if self._usage is None else self._usage
