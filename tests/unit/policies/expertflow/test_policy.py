"""ExpertFlow, our reading: what is wanted by foretold paths, and when (section 3.2.1)."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.events import LayerRouting, Phase, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.expertflow.policy import ExpertFlow
from tests.unit.policies.bench import step_of

EXPERTS = 4
POOL = Catalogue.uniform("p", layers=3, experts=EXPERTS, top_k=1)


def step_with(*paths: dict[int, float], number: int = 1, phase: Phase = Phase.DECODE, size: int = POOL.size) -> Step:
    """A row for each: the chances that its keys are picked."""
    step = step_of(*range(len(paths)), number=number, phase=phase)
    step.row_paths = np.zeros((len(paths), size), dtype=np.float32)
    for row, chances in enumerate(paths):
        for key, chance in chances.items():
            step.row_paths[row, key] = chance
    return step


def policy_of(catalogue: Catalogue = POOL, **options: float) -> ExpertFlow:
    policy = ExpertFlow(catalogue, **options)  # type: ignore[arg-type]
    policy.on_budget_changed(Tier.DEVICE, EXPERTS)
    return policy


def wanted(policy: ExpertFlow) -> list[int]:
    """The most urgent first."""
    if policy.prefetch is None:
        return []
    priority = policy.prefetch.priority
    return sorted(np.flatnonzero(priority > 0).tolist(), key=lambda key: (-priority[key], key))


def routed(policy: ExpertFlow, step: Step, layer: int, *picks: int) -> None:
    policy.on_layer_routed(LayerRouting.from_picks(policy.catalogue, step, layer, np.array([[one] for one in picks])))


def test_what_any_row_probably_picks_is_wanted_before_the_first_layer() -> None:
    policy = policy_of(least=0.5)
    policy.on_step_started(step_with({0: 0.9, 5: 0.9, 6: 0.3, 9: 0.3}, {6: 0.3, 9: 0.4}))

    assert wanted(policy) == [0, 5, 6, 9], "1 − Π(1 − p): 0.9, 0.9, 0.51 and 0.58, of which nearer layers count more"


def test_a_routed_layer_is_wanted_no_more_and_an_unused_expert_is_worth_what_its_next_step_is() -> None:
    policy, step = policy_of(), step_with({0: 0.9, 5: 0.9})
    policy.on_step_started(step)
    foretold = policy.reuse.expected()[0]
    routed(policy, step, 0, 1)

    assert wanted(policy) == [5]
    assert policy.reuse.expected()[0] < foretold


def test_wants_cross_the_border_to_the_forward_that_is_planned_next() -> None:
    policy, step = policy_of(), step_with({4: 0.9, 8: 0.9})
    policy.on_step_planned(step_with({2: 0.9, 7: 0.9}, number=2))
    policy.on_step_started(step)
    routed(policy, step, 0, 0)
    assert wanted(policy) == [4, 8, 2], "the planned step's first layer behind this one's last"
    routed(policy, step, 1, 0)
    routed(policy, step, 2, 0)
    assert wanted(policy) == [2, 7]

    policy.on_step_started(step_with({2: 0.9}, number=2))
    assert wanted(policy) == [2], "it is the running step now"


def test_in_a_prompt_only_the_first_layer_that_it_runs_through_is_wanted_ahead() -> None:
    paths = dict.fromkeys((0, 4, 8), 0.9)
    policy = policy_of()
    policy.on_step_started(step_with(paths, phase=Phase.PREFILL))
    assert wanted(policy) == [0]

    both = Catalogue("p", experts_per_layer=[EXPERTS] * 3, top_k=[1] * 3, expert_bytes=[1] * 3, decoder_start=1)
    policy = policy_of(both)
    policy.on_step_started(step_with(paths, phase=Phase.PREFILL))
    assert wanted(policy) == [4], "the decoder's"


def test_without_paths_nothing_is_wanted_at_the_start_and_nan_is_no_chance() -> None:
    policy = policy_of()
    policy.on_step_started(step_of(0))
    assert wanted(policy) == []
    policy.on_step_started(step_with({0: np.nan, 5: 0.9}))
    assert wanted(policy) == [5]
