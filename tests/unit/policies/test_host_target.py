"""What the policies that know it want on the host tier."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.policies.base.events import LayerRouting, Phase, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.host_target import HostTarget
from greenroom.policies.registry import create_policy
from greenroom.replay import RoutingTrace
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from tests.unit.policies.bench import keys_of

CATALOGUE = Catalogue.uniform("pool", layers=2, experts=6, top_k=2, expert_bytes=10)


def policy_of(name: str, device: int, host: int, *, host_target: bool = True) -> ExpertPolicy:
    policy = create_policy(name, catalogue=CATALOGUE, options={"host": host_target})
    policy.on_budget_changed(Tier.DEVICE, 10 * device)
    if host:
        policy.on_budget_changed(Tier.HOST, 10 * host)
    return policy


def run_step(policy: ExpertPolicy, number: int, *layers: list[int]) -> None:
    step = Step("pool", number, keys_of([0]), np.array([Phase.DECODE], dtype=np.uint8))
    policy.on_step_started(step)
    for layer, picks in enumerate(layers):
        policy.on_layer_routed(LayerRouting.from_picks(CATALOGUE, step, layer, np.array([picks])))


def wanted(policy: ExpertPolicy) -> list[int]:
    assert policy.target is not None
    assert policy.target.tier is Tier.HOST
    return [*map(int, np.flatnonzero(policy.target.wanted))]


@pytest.mark.parametrize("name", ["decayed", "next-use"])
def test_as_many_of_the_most_used_as_both_tiers_hold(name: str) -> None:
    policy = policy_of(name, device=2, host=3)
    for number in range(30):
        run_step(policy, number, [0, 1] if number % 3 else [2, 3], [0, 4] if number % 2 else [4, 5])
    run_step(policy, 30)
    # By share of the steps: 4 of layer 1 in all, 0 and 1 of layer 0 in two thirds, 0 and 5 of layer 1 in half.
    assert wanted(policy) == [0, 1, 6, 10, 11]


@pytest.mark.parametrize("name", ["decayed", "next-use"])
def test_what_was_never_used_is_not_wanted(name: str) -> None:
    policy = policy_of(name, device=4, host=8)
    run_step(policy, 0, [0, 1], [2, 3])
    run_step(policy, 1)
    assert wanted(policy) == [0, 1, 8, 9]


@pytest.mark.parametrize("name", ["decayed", "next-use"])
@pytest.mark.parametrize(("host", "host_target"), [(0, True), (4, False)])
def test_nothing_is_wanted_without_a_host_tier_or_unless_asked_for(name: str, host: int, host_target: bool) -> None:
    policy = policy_of(name, 4, host, host_target=host_target)
    for number in range(5):
        run_step(policy, number, [0, 1], [2, 3])
    assert policy.target is None


def test_a_member_stays_until_another_is_clearly_worthier_and_the_target_with_it() -> None:
    target = HostTarget(CATALOGUE)
    target.on_budget_changed(Tier.DEVICE, 10)
    target.on_budget_changed(Tier.HOST, 10)
    worth = np.zeros(12)
    worth[[3, 5]] = 1.0
    first = target.of(worth, 0.0, None)
    assert first is not None
    worth[7] = 1.4
    assert target.of(worth, 0.0, first) is first, "the same object, so that the engine does not look at it again"
    worth[7] = 1.6
    second = target.of(worth, 0.0, first)
    assert second is not None
    assert np.flatnonzero(second.wanted).tolist() == [3, 7]
    assert second.generation == first.generation + 1


def test_experts_get_as_many_places_as_there_are_slots_of_their_size() -> None:
    catalogue = Catalogue("two sizes", experts_per_layer=[3, 3], top_k=[1, 1], expert_bytes=[10, 25])
    target = HostTarget(catalogue)
    target.on_budget_changed(Tier.DEVICE, 10 + 25)
    target.on_budget_changed(Tier.HOST, 10 + 25 + 10)
    chosen = target.of(np.array([1.0, 2.0, 3.0, 6.0, 5.0, 4.0]), 0.0, None)
    assert chosen is not None
    assert np.flatnonzero(chosen.wanted).tolist() == [0, 1, 2, 3, 4], "three of 10 bytes, and two of 25"


@pytest.mark.parametrize("name", ["decayed", "next-use"])
def test_where_the_disk_has_time_layers_wait_less(name: str) -> None:
    """The engine on simulated links: a record takes a second from the disk, a layer computes for two."""
    random = np.random.default_rng(4)
    popularity = random.dirichlet(np.full(16, 0.6), 4)
    rows = [[random.choice(16, 2, replace=False, p=0.95 * p + 0.05 / 16) for p in popularity] for _ in range(250)]
    trace = RoutingTrace(np.array(rows, dtype=np.uint8), np.array([0, len(rows)]), 16)
    replay = TimedReplay(
        trace, 4096, LinkProfile(4096), ComputeProfile(layer_s=2.0), upload=LinkProfile(100 * 4096), host_slots=14
    )

    def stall(host: bool) -> float:
        policy = create_policy(name, catalogue=replay.catalogue(), options={"host": host})
        return replay.run(policy, trace.steps(), 12).stall_seconds

    assert stall(True) < 0.9 * stall(False)
