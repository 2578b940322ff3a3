"""The schedulers that are compared, by the names that tables and plots have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.emoe.scheduling.simulator import Machine
from greenroom.policies.placement.latency_estimate import ESTIMATORS, latency_ms
from greenroom.policies.placement.placement_policy import PendingRequest, PlacementPolicy, WorkerView
from greenroom.policies.registry import create_placement_policy

FCFS, EMOE, EMOE_LITERAL, HINDSIGHT = "fcfs", "emoe", "emoe-literal", "hindsight"
VLLM_QUEUE = 100_000


@dataclass(frozen=True, slots=True)
class Arm:
    """One scheduler. ``policy`` and ``options`` as ``--scheduling`` has them.

    ``hindsight``: it is told the true lengths, with the estimator and margin that make the most of them.
    ``kv_on_demand``: continuous batching as in vLLM, with its queue in the worker. Otherwise that equals ``fcfs``,
    whose first request also waits for room.
    """

    name: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    hindsight: bool = False
    kv_on_demand: bool = False

    def create(self) -> PlacementPolicy:
        return create_placement_policy(self.policy, options=self.options)

    def machine(self, machine: Machine) -> Machine:
        """The same machine as this arm sees it."""
        queue = VLLM_QUEUE if self.kv_on_demand else machine.max_queued
        return replace(machine, hindsight=self.hindsight, kv_on_demand=self.kv_on_demand, max_queued=queue)


ARMS = {
    arm.name: arm
    for arm in (
        Arm(FCFS, "fcfs"),
        Arm("edf", "edf"),
        Arm("vllm-like", "fcfs", kv_on_demand=True),
        Arm(EMOE_LITERAL, "emoe-literal"),
        Arm(EMOE, "emoe"),
        Arm("emoe, as worded", "emoe", {"late_share": 1.0}),
        Arm("emoe, margin 1.25", "emoe", {"margin": 1.25}),
        Arm("emoe, processor-sharing", "emoe", {"estimator": "processor-sharing"}),
        Arm(HINDSIGHT, "emoe", {"estimator": "processor-sharing", "margin": 1.25}, hindsight=True),
    )
}


def estimates(view: WorkerView, request: PendingRequest, now_ms: float) -> dict[str, float]:
    """The latency from arrival to end that each estimator expects of a request placed on that worker now."""
    return {name: latency_ms(one, view, (), request, now_ms) for name, one in ESTIMATORS.items()}
