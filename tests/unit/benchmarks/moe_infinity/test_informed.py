"""The policy that knows what picks are drawn from."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.moe_infinity.cache.chance_oracle import Informed
from benchmarks.moe_infinity.synthetic_routing import Mix, Shape, drawn
from greenroom.policies.base.events import LayerRouting, Phase, Reason, SequenceInfo, Step, Tier, VictimRequest
from greenroom.policies.registry import create_policy
from greenroom.policies.replacement.belady import Belady, Future
from greenroom.replay.hit_rates import replay
from greenroom.replay.traces.steps import groups

SHAPE = Shape("small", layers=4, experts=16, top_k=1, decoder_start=2)
MIX = Mix(
    tasks=4, spread=None, breadth=6.0, focus=4.0, locality=0.3, prompt_tokens=6, output_tokens=20, at_once=4
)  # fmt: skip


def test_it_misses_less_than_what_learns_and_more_than_what_knows_the_draws() -> None:
    found = drawn(SHAPE, MIX, 150, seed=2)
    catalogue, steps = found.trace.catalogue(), list(found.trace.steps(concurrent=MIX.at_once))
    rates = [
        replay(policy, steps, 14).hit_rate
        for policy in (
            create_policy("lru", catalogue=catalogue),
            create_policy("lfu", catalogue=catalogue),
            create_policy("moe-infinity", catalogue=catalogue),
            Informed(catalogue, found.shares, MIX),
            Belady(catalogue, future=Future.of_groups(groups(catalogue, steps))),
        )
    ]
    *learning, informed, belady = rates
    assert max(learning) + 0.01 < informed < belady - 0.01


@pytest.mark.parametrize("locality", [0.0, 0.8])
def test_the_victim_is_the_expert_whose_next_use_is_expected_latest(locality: float) -> None:
    """Layers 2 and 3 decode; keys 4 l + e."""
    mix = Mix(1, None, 1.0, 1.0, locality=locality, prompt_tokens=1, output_tokens=9, at_once=2)
    pool = drawn(Shape("tiny", 4, 4, 1, 2), mix, 2, seed=0).trace.catalogue()
    of_layer = [0.6, 0.3, 0.1, 0.0]
    policy = Informed(pool, np.array([of_layer * 4] * 2, dtype=np.float32), mix)
    policy.on_sequence_started(SequenceInfo(0))
    step = Step("pool", 0, np.array([0]), np.array([Phase.DECODE], dtype=np.uint8))
    policy.on_layer_routed(LayerRouting.from_picks(pool, step, 2, np.array([[2]])))
    evictable = np.zeros(pool.size, dtype=np.bool_)
    evictable[[8, 9, 10, 12]] = True
    victims = policy.victims(VictimRequest(Tier.DEVICE, 3, evictable, evictable, Reason.ON_DEMAND))
    assert victims.tolist() == ([9, 8, 12] if locality else [10, 9, 8]), "10 was picked last and may well stay"


def test_the_encoders_experts_are_kept_for_the_next_sequence() -> None:
    pool = drawn(Shape("tiny", 4, 4, 1, 2), MIX, 2, seed=0).trace.catalogue()
    sure = np.tile([1.0, 0.0, 0.0, 0.0], 4)
    policy = Informed(pool, np.stack([sure, np.roll(sure, 1)]).astype(np.float32), MIX)
    evictable = np.ones(pool.size, dtype=np.bool_)
    victims = policy.victims(VictimRequest(Tier.DEVICE, 16, evictable, evictable, Reason.ON_DEMAND)).tolist()
    assert set(victims[-4:]) == {0, 1, 4, 5}, (
        "no sequence runs: only what the next one may encode with is worth keeping"
    )
