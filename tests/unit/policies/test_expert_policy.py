"""What the base class gives every policy."""

from __future__ import annotations

from greenroom.policies.base.array_types import NO_KEYS, Keys, Mask
from greenroom.policies.base.events import (
    Artifact,
    LayerRouting,
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
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from tests.unit.policies.bench import keys_of, mask_of, routing_of, step_of

CATALOGUE = Catalogue.uniform("pool", layers=2, experts=4, top_k=2)


class Least(ExpertPolicy):
    def victims(self, request: VictimRequest) -> Keys:
        return NO_KEYS


class Curious(Least):
    """Overrides one event more than its parent."""

    def on_layer_entered(self, step: Step, layer: int) -> None:
        self._ask(PredictionRequest("next-layer", (layer + 1, layer + 2), step=step.number))
        self._ask(PredictionRequest("popularity", (0, 2)))


class Ordered(Curious):
    def compute_order(self, routing: LayerRouting, resident: Mask) -> Keys | None:
        return routing.experts[::-1]


def test_hooks_are_what_a_class_or_its_parents_override() -> None:
    assert Least.hooks == {"victims"}
    assert Curious.hooks == {"victims", "on_layer_entered"}
    assert Ordered.hooks == {"victims", "on_layer_entered", "compute_order"}


def test_of_two_requests_of_one_kind_the_newer_is_handed_over_once() -> None:
    policy = Curious(CATALOGUE)
    policy.on_layer_entered(step_of(1, number=3), 0)
    policy.on_layer_entered(step_of(1, number=4), 1)

    taken = policy.take_requests()

    assert [(request.kind, request.step, request.layers) for request in taken] == [
        ("next-layer", 4, (2, 3)),
        ("popularity", None, (0, 2)),
    ]
    assert policy.take_requests() == ()


def test_a_policy_that_only_picks_victims_takes_every_other_call() -> None:
    policy = Least(CATALOGUE)
    step, routing, resident = step_of(1), routing_of(CATALOGUE, [0, 1]), mask_of(CATALOGUE, [0])
    request = PredictionRequest("kind", (0, 1))

    policy.on_sequence_queued(SequenceInfo(1))
    policy.on_sequence_started(SequenceInfo(1))
    policy.on_step_started(step)
    policy.on_layer_entered(step, 0)
    policy.on_layer_routed(routing)
    policy.on_experts_done(step, 0, keys_of([0]))
    policy.on_layer_done(step, 0)
    policy.on_transfer_done(Transfer(0, Tier.DISK, Tier.DEVICE, Reason.TARGET))
    policy.on_transfer_failed(Transfer(0, Tier.DISK, Tier.DEVICE, Reason.TARGET, "read error"))
    policy.on_evicted(Tier.DEVICE, keys_of([0]))
    policy.on_prediction(Prediction(request, "1", mask_of(CATALOGUE, [0]).astype("float32")))
    policy.on_artifact_swapped(Artifact("eamc", "2", {}))
    policy.on_budget_changed(Tier.HOST, 100)
    policy.on_sequence_ended(1, SequenceEnd.CANCELLED)

    assert policy.prefetch is None
    assert policy.target is None
    assert policy.compute_order(routing, resident) is None
    assert policy.row_mask(step, 0, resident) is None
    assert not policy.streams(routing, routing.experts)
    assert policy.report(1) == {}
