"""Another policy's prefetching alone: nothing is kept that would hide what it does not foresee."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import (
    Artifact,
    LayerRouting,
    Phase,
    Prediction,
    PredictionRequest,
    Reason,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)
from greenroom.policies.base.expert_policy import ExpertPolicy, Target


class PrefetchAlone(ExpertPolicy):
    """Wants experts and makes room as ``policy`` does, but an expert leaves when its layer has run.

    So every use needs a new prefetch. Otherwise an expert that a policy keeps would look the same whether it had been
    foreseen or not. ``covered`` of the ``used`` experts had been fetched ahead and had landed when their layer's router
    spoke: the recall of prefetching (MoE-Infinity, §8.3). ``covered_decoding`` and ``used_decoding``: of these, in
    steps that only decode.
    """

    def __init__(self, policy: ExpertPolicy) -> None:
        super().__init__(policy.catalogue)
        self._policy = policy
        self.hooks = policy.hooks | {"on_layer_routed", "on_transfer_done", "on_evicted"}
        self._ahead: Mask = np.zeros(policy.catalogue.size, dtype=np.bool_)  # here, and not used since
        self.covered = 0
        self.used = 0
        self.covered_decoding = 0
        self.used_decoding = 0
        self._keep()

    def on_layer_routed(self, routing: LayerRouting) -> None:
        used, covered = len(routing.experts), int(np.count_nonzero(self._ahead[routing.experts]))
        self.used += used
        self.covered += covered
        if routing.step.phase is Phase.DECODE:
            self.used_decoding += used
            self.covered_decoding += covered
        self._ahead[self.catalogue.spans[routing.layer]] = False
        self._keep()
        self._policy.on_layer_routed(routing)
        self.prefetch = self._policy.prefetch

    def on_transfer_done(self, transfer: Transfer) -> None:
        ahead = transfer.target is Tier.DEVICE and transfer.reason is Reason.PREFETCH
        if ahead and self.prefetch is not None and self.prefetch.priority[transfer.expert] > 0:  # not too late
            self._ahead[transfer.expert] = True
            self._keep()
        self._policy.on_transfer_done(transfer)

    def on_evicted(self, tier: Tier, experts: Keys) -> None:
        if self._ahead[experts].any():
            self._ahead[experts] = False
            self._keep()
        self._policy.on_evicted(tier, experts)

    def victims(self, request: VictimRequest) -> Keys:
        return self._policy.victims(request)

    def _keep(self) -> None:
        """Keeps the experts that were fetched ahead; all others leave."""
        generation = 0 if self.target is None else self.target.generation + 1
        self.target = Target(generation, self._ahead.copy(), drop_others=True)

    # -- handed on -------------------------------------------------------------------------------------------------

    def on_sequence_queued(self, sequence: SequenceInfo) -> None:
        self._policy.on_sequence_queued(sequence)

    def on_sequence_started(self, sequence: SequenceInfo) -> None:
        self._policy.on_sequence_started(sequence)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self._policy.on_sequence_ended(sequence, end)

    def on_step_started(self, step: Step) -> None:
        self._policy.on_step_started(step)
        self.prefetch = self._policy.prefetch

    def on_layer_entered(self, step: Step, layer: int) -> None:
        self._policy.on_layer_entered(step, layer)

    def on_experts_done(self, step: Step, layer: int, experts: Keys) -> None:
        self._policy.on_experts_done(step, layer, experts)

    def on_layer_done(self, step: Step, layer: int) -> None:
        self._policy.on_layer_done(step, layer)
        self.prefetch = self._policy.prefetch

    def on_transfer_failed(self, transfer: Transfer) -> None:
        self._policy.on_transfer_failed(transfer)

    def on_prediction(self, prediction: Prediction) -> None:
        self._policy.on_prediction(prediction)
        self.prefetch = self._policy.prefetch

    def on_artifact_swapped(self, artifact: Artifact) -> None:
        self._policy.on_artifact_swapped(artifact)

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        self._policy.on_budget_changed(tier, budget_bytes)

    def take_requests(self) -> tuple[PredictionRequest, ...]:
        return self._policy.take_requests()

    def report(self, sequence: int) -> Mapping[str, float]:
        return self._policy.report(sequence)
