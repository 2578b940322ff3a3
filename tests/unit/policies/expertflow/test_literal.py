"""What ExpertFlow's caching as printed decides (sections 3.2.1 and 3.2.2)."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.events import LayerRouting, Reason, Step, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.expertflow.literal import LiteralExpertFlow
from tests.unit.policies.bench import keys_of, mask_of, step_of, transfer_of

EXPERTS = 4
POOL = Catalogue.uniform("p", layers=4, experts=EXPERTS, top_k=1)


def step_with(*paths: dict[int, float]) -> Step:
    """A row for each: the chances that its keys are picked."""
    step = step_of(*range(len(paths)))
    step.row_paths = np.zeros((len(paths), POOL.size), dtype=np.float32)
    for row, chances in enumerate(paths):
        for key, chance in chances.items():
            step.row_paths[row, key] = chance
    return step


def begun(*paths: dict[int, float]) -> tuple[LiteralExpertFlow, Step]:
    policy, step = LiteralExpertFlow(POOL), step_with(*paths)
    policy.on_step_started(step)
    return policy, step


def in_order(policy: LiteralExpertFlow) -> list[int]:
    """What is wanted, the most urgent first."""
    assert policy.prefetch is not None
    priority = policy.prefetch.priority
    return sorted(np.flatnonzero(priority > 0).tolist(), key=lambda key: (-priority[key], key))


def routed(policy: LiteralExpertFlow, step: Step, layer: int, *picks: int) -> None:
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, layer, np.array([[pick] for pick in picks])))


def victims(policy: LiteralExpertFlow, count: int, resident: set[int], reason: Reason = Reason.ON_DEMAND) -> list[int]:
    mask = mask_of(POOL, resident)
    request = VictimRequest(Tier.DEVICE, count, mask, mask, reason, keys_of([0]))
    found: list[int] = policy.victims(request).tolist()
    return found


def test_all_layers_are_wanted_before_the_first_nearer_ones_first() -> None:
    policy, _ = begun({13: 1.0, 0: 0.5, 5: 0.8}, {9: 0.6, 10: 0.49})

    assert in_order(policy) == [0, 5, 9, 13], "½ is active, less is not; any row's counts"


def test_a_layer_that_has_been_routed_is_wanted_no_more() -> None:
    policy, step = begun({0: 1.0, 5: 1.0, 9: 1.0})
    routed(policy, step, 0, 1)

    assert in_order(policy) == [5, 9]


def test_a_miss_displaces_what_was_wrongly_fetched_then_what_has_run_then_what_is_idle() -> None:
    policy, step = begun({1: 1.0, 5: 1.0, 9: 1.0, 12: 1.0})
    for key in (1, 5, 6, 9, 12, 15):
        policy.on_transfer_done(transfer_of(key, reason=Reason.PREFETCH))
    routed(policy, step, 0, 1)
    routed(policy, step, 1, 0)  # 4: missed, and 5 was wrong; 6 is idle in the same layer, and came later

    assert victims(policy, 6, {1, 5, 6, 9, 12, 15}) == [5, 6, 1, 15, 12, 9], "of later layers the farthest first"


def test_no_prefetch_displaces_what_a_later_layer_is_foretold_to_need() -> None:
    policy, step = begun({9: 1.0, 12: 1.0})
    routed(policy, step, 0, 1)

    assert victims(policy, 1, {9, 12}, Reason.PREFETCH) == []
    assert victims(policy, 1, {9, 2}, Reason.PREFETCH) == [2]


def test_without_paths_it_wants_nothing_and_evicts_the_least_recently_used() -> None:
    policy, step = LiteralExpertFlow(POOL), step_of(0)
    policy.on_step_started(step)
    routed(policy, step, 3, 1)
    routed(policy, step_of(0), 0, 1)

    assert policy.prefetch is None
    assert victims(policy, 1, {13, 8}) == [8]
