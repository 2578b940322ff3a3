"""Which experts the rows of a step may be routed to, where outputs may be approximate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.bookkeeping.resident_tables import ResidentTables
from greenroom.experts.deciding.target_wait import TargetWait
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import SequenceInfo, Step
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.fidelity import Confinement

NO_LAYER = -1


class RowMasks:
    """The policy's own mask if it gives one, and else the confinement of rows to resident experts (eMoE, section 3.4).

    ``asks_policy``: whether the policy may give masks. ``confinement``: None where rows are not confined.
    ``target_wait``: None where confined layers do not wait. Counts the (row, layer) pairs whose picks a mask changed.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        tables: ResidentTables,
        resident: Mask,
        *,
        asks_policy: bool,
        confinement: Confinement | None,
        target_wait: TargetWait | None,
    ) -> None:
        self.confined_layer = NO_LAYER
        """The layer of the newest mask, if that confines all rows to resident experts."""
        self._policy = policy
        self._tables = tables
        self._resident = resident
        self._asks_policy = asks_policy
        self._confinement = confinement
        self._target_wait = target_wait
        self._rerouted: NDArray[np.int64] | None = None  # [T]: layers in which a mask changed the row's picks
        self._rerouted_rows: dict[int, int] = {}  # by sequence, (row, layer) pairs

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        self._rerouted_rows[sequence.sequence] = 0
        if self._confinement is not None:
            self._confinement.sequence_queued(sequence)

    def sequence_preempted(self, sequence: int) -> None:
        """Its rows run again, and count then."""
        self._rerouted_rows[sequence] = 0

    def sequence_ended(self, sequence: int) -> None:
        self._rerouted_rows.pop(sequence, None)
        if self._confinement is not None:
            self._confinement.sequence_ended(sequence)

    def step_started(self, step: Step) -> None:
        self._rerouted = None
        if self._confinement is not None:
            self._confinement.step_started(step)

    def of(self, step: Step, layer: int) -> Mask | None:
        """See ExpertSource.allowed_experts."""
        self.confined_layer = NO_LAYER
        if self._asks_policy and (mask := self._policy.row_mask(step, layer, self._resident)) is not None:
            return mask
        if self._confinement is None:
            return None
        if self._target_wait is not None and self._confinement.confines(layer):
            self._target_wait.wait(layer)
        resident = self._tables.of(layer).resident
        mask = self._confinement.confine(layer, resident)
        if mask is resident:
            self.confined_layer = layer
        return mask

    def rerouted(self, rows: NDArray[np.bool_]) -> None:
        """See ExpertSource.rerouted."""
        if self._rerouted is None:
            self._rerouted = np.zeros(len(rows), dtype=np.int64)
        self._rerouted += rows

    def step_succeeded(self, step: Step) -> None:
        """Its rows count for their sequences."""
        if self._rerouted is None:
            return
        for row in np.flatnonzero(self._rerouted).tolist():
            sequence = int(step.row_sequences[row])
            if sequence in self._rerouted_rows:
                self._rerouted_rows[sequence] += int(self._rerouted[row])

    def rerouted_pairs(self, sequence: int) -> int:
        """The (row, layer) pairs of a sequence whose picks a mask has changed."""
        return self._rerouted_rows.get(sequence, 0)
