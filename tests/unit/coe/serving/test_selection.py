from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from greenroom.coe.dispatch.early_binding import EarlyBinding
from greenroom.coe.dispatch.first_fill import dealt
from greenroom.coe.dispatch.late_binding import LateBinding
from greenroom.coe.serving.config import AUTO, ServingConfig
from greenroom.coe.serving.costs import ExecutorCosts
from greenroom.coe.serving.memory_plan import (
    ExecutorNeeds,
    plan_inputs,
    plan_intermediates,
    plan_memory,
    plan_regions,
)
from greenroom.coe.serving.selection import OWN_POLICY, Selection
from greenroom.coe.simulation.simulated_memory import SimulatedLink, SimulatedMemory
from greenroom.core.errors import BudgetTooSmall, InvalidConfig
from greenroom.core.units import GIB, MIB
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.placement.placement_policy import Costs
from greenroom.policies.registry import EXECUTOR_SCHEDULINGS, MODEL_POLICIES

NAMES = ["a", "b", "c"]
SIZES = [8192, 40960, 4096]


@pytest.mark.parametrize(("scheduling", "policy"), [*itertools.product(EXECUTOR_SCHEDULINGS, MODEL_POLICIES)])
def test_every_scheduling_goes_with_every_policy(scheduling: str, policy: str) -> None:
    selection = Selection(scheduling, policy)
    catalogue = Catalogue.of_models("models", SIZES)
    dependencies = Dependencies(np.array([0.5, 0.3, 0.2]), (frozenset(), frozenset({0}), frozenset()))
    link = SimulatedLink(lambda expert: 1.0)
    memory = SimulatedMemory(selection.make_policy(catalogue, dependencies), sum(SIZES), link)
    made = selection.make_dispatcher(["e0"], {"e0": memory}, Costs(), {0: 1, 1: 1, 2: 1})
    assert isinstance(made, LateBinding if scheduling == "pull" else EarlyBinding)
    assert selection.one_memory == (scheduling == "pull")


def test_options_are_told() -> None:
    made = Selection("pull", "coserve", {"age_ms": 100}, {"literal": True})
    assert (made.scheduling_spelt, made.policy_spelt) == ("pull:age_ms=100", "coserve:literal=true")
    assert Selection().policy_spelt == "pull"


def test_each_scheduling_has_a_policy_of_its_own() -> None:
    assert {name: Selection(name).policy for name in EXECUTOR_SCHEDULINGS} == OWN_POLICY


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"scheduling": "edf"}, "scheduling"),
        ({"policy": "belady"}, "policy"),
        ({"scheduling": "pull", "shared": False}, "shared"),
        ({"scheduling": "pull", "scheduling_options": {"age_ms": "long"}}, "age_ms"),
        ({"scheduling": "pull", "scheduling_options": {"age_ms": float("nan")}}, "age_ms"),
        ({"scheduling": "pull", "scheduling_options": {"age_ms": float("inf")}}, "age_ms"),
        ({"scheduling": "pull", "scheduling_options": {"ahead": 0}}, "ahead"),
        ({"scheduling": "pull", "scheduling_options": {"patience": 1}}, "patience"),
        ({"scheduling": "coserve", "scheduling_options": {"assigning": 1}}, "assigning"),
        ({"policy": "coserve", "policy_options": {"literal": "yes"}}, "literal"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        Selection(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"executors": 0},
        {"threads": -1},
        {"most_batch": 0},
        {"max_pixels": 0},
        {"expert_share": 1.0},
        {"expert_share": 0.0},
    ],
)
def test_a_bad_number_is_named(wrong: dict[str, Any], tmp_path: Any) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(wrong))):
        ServingConfig(file=tmp_path, **wrong)


def test_regions() -> None:
    assert plan_regions("100%", NAMES, SIZES, 1, None) == (53248,)
    assert plan_regions("160KiB", NAMES, SIZES, 3, None) == (53248, 53248, 53248), "whole pages"
    assert plan_regions(AUTO, NAMES, SIZES, 2, None) == (53248, 53248)
    assert plan_regions(AUTO, NAMES, SIZES, 1, 90_000) == (40960,), "half of what is available"
    assert plan_regions("81920", NAMES, SIZES, 2, None) == (40960, 40960), "the least that works"
    with pytest.raises(BudgetTooSmall, match="'b' alone takes 40 KiB: the least that works is 81920 bytes"):
        plan_regions("81919", NAMES, SIZES, 2, None)
    with pytest.raises(BudgetTooSmall, match="available"):
        plan_regions("1MiB", NAMES, SIZES, 1, 100_000)


def test_what_executors_need_besides_counts_as_taken() -> None:
    """A batch of 9000 bytes, 3000 for a request and 5000 for images, of two executors."""
    needs = ExecutorNeeds(batch=9000, least=3000, preparing=5000, executors=2)
    assert plan_memory("81920", NAMES, SIZES, 2, needs, None).total == 81920 + 2 * (9000 + 5000)
    roomy, tight = (plan_memory("81920", NAMES, SIZES, 2, needs, available) for available in (200_000, 100_000))
    assert (roomy.intermediates, roomy.preparing, roomy.total) == (9000, 5000, 109_920)
    assert (tight.intermediates, tight.total) == (4040, 100_000), "a batch gets what is left"
    with pytest.raises(BudgetTooSmall, match=r"80 KiB, executors need .* lower --expert-memory"):
        plan_memory("81920", NAMES, SIZES, 2, needs, 81920 + 2 * 8000 - 1)
    auto = plan_memory(AUTO, NAMES, SIZES, 1, needs, 60_000)
    assert (auto.experts, auto.total <= 60_000) == (40_960, True)


def test_inputs_that_wait_count_as_taken() -> None:
    needs = ExecutorNeeds(batch=9000, least=3000, preparing=5000, executors=2)
    plan = plan_memory("81920", NAMES, SIZES, 2, needs, 100_000, inputs=2000)
    assert (plan.inputs, plan.intermediates, plan.total) == (2000, 3040, 100_000)
    with pytest.raises(BudgetTooSmall, match="for inputs that wait"):
        plan_memory("81920", NAMES, SIZES, 2, needs, 100_000, inputs=2100)
    assert [plan_inputs(one) for one in (None, 1, 2 * GIB, 100 * GIB)] == [512 * MIB, 32 * MIB, 128 * MIB, 512 * MIB]


def test_a_share_leaves_batches_what_one_request_takes_unless_it_was_asked_for() -> None:
    needs = ExecutorNeeds(batch=9000, least=3000, preparing=0, executors=2)
    own, asked = (
        plan_memory("81920", NAMES, SIZES, 2, needs, None, 0.99, strict_share=strict) for strict in (False, True)
    )
    assert (own.intermediates, asked.intermediates) == (3000, 413)


@pytest.mark.parametrize(
    ("available", "share", "regions", "intermediates"),
    [
        (None, 0.75, 73_728, 12_288),
        (1_000_000, 0.75, 73_728, 12_288),
        (110_000, 0.75, 73_728, 12_288),
        (70_000, 0.75, 40_960, 6_826),
        (70_000, 0.3, 16_384, 19_114),
        (70_000, 0.9, 53_248, 2_958),
        (17_000, 0.75, 4_096, 1_000),
    ],
)
def test_auto_divides_what_is_available_as_the_profile_does(
    available: int | None, share: float, regions: int, intermediates: int
) -> None:
    """Experts of 102,400 bytes, and a profile for 100,000 bytes. In whole pages, and no less than one request takes."""
    sizes, names = [4096] * 25, [str(number) for number in range(25)]
    needs = ExecutorNeeds(batch=90_000, least=1000, preparing=5000, executors=2)
    chosen = int(100_000 * share)
    plan = plan_memory(AUTO, names, sizes, 1, needs, available, share, chosen=chosen)
    assert plan.regions == (regions,)
    assert plan.intermediates == intermediates
    assert available is None or plan.total <= available
    asked = plan_memory("81920", names, sizes, 1, needs, None, share, chosen=chosen)
    assert asked.experts == 81920, "what was asked for is not the profile's"


def test_the_share_is_of_experts_and_intermediates_together() -> None:
    assert plan_intermediates([300, 300], 2, 0.75) == 100


def test_experts_are_dealt_in_turn() -> None:
    """By descending probability; one that does not fit goes on to the next memory, and smaller ones still come."""
    usage = np.array([0.1, 0.9, 0.5, 0.8, 0.3])
    assert dealt(usage, [1, 1, 1, 1, 1], [3, 3]) == [[1, 2, 0], [3, 4]]
    assert dealt(usage, [1, 4, 1, 4, 5], [4, 6]) == [[1], [3, 2, 0]]
    assert dealt(usage, [9, 9, 9, 9, 9], [3, 3]) == [[], []]


def test_batches_fit_into_intermediates() -> None:
    costs = ExecutorCosts(Costs(), [16, 4], [{1: 100, 8: 800}, {1: 50, 8: 400}])
    assert costs.intermediates() == 1600
    assert costs.least_intermediates() == 100
    assert costs.largest_batches(["a", "b"], 1600) == {0: 16, 1: 4}
    assert costs.largest_batches(["a", "b"], 250) == {0: 2, 1: 4}
    assert costs.limited(2).largest_batches(["a", "b"], 1600) == {0: 2, 1: 2}
    with pytest.raises(BudgetTooSmall, match="expert 'a' takes 100 B"):
        costs.largest_batches(["a", "b"], 99)
