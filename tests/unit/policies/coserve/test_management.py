"""Who leaves an executor's memory (CoServe, section 4.3), by the example of Fig. 10 and beyond it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.events import SequenceEnd, SequenceInfo, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.coserve.management import CoServe

SIZES = [10, 20, 40, 30, 15, 5]
CATALOGUE = Catalogue.of_models("board", SIZES)
USAGE = np.array([0.5, 0.1, 0.2, 0.3, 0.05, 0.9])
# 3 and 4 follow 0; 2 follows 1 and 5
PREDECESSORS = tuple(map(frozenset, [[], [], [1, 5], [0], [0], []]))


def victims(policy: CoServe, needed: int, resident: set[int], pinned: set[int] | None = None) -> list[int]:
    held, may_go = (np.zeros(len(SIZES), dtype=np.bool_) for _ in range(2))
    held[sorted(resident)] = True
    may_go[sorted(resident - (pinned or set()))] = True
    return [int(key) for key in policy.victims(VictimRequest(Tier.DEVICE, needed, may_go, held))]


@pytest.fixture
def policy() -> CoServe:
    return CoServe(CATALOGUE, dependencies=Dependencies(USAGE, PREDECESSORS))


def test_first_go_those_that_follow_nobody_resident_the_largest_first(policy: CoServe) -> None:
    assert victims(policy, 1, {1, 2, 3, 4}) == [3]  # 2 may follow 1; of 3 and 4 the larger
    assert victims(policy, 40, {1, 2, 3, 4}) == [3, 4]
    assert victims(policy, 50, {1, 2, 3, 4}) == [3, 1]  # 4 is spared where the others free enough without it


def test_then_those_that_are_used_least(policy: CoServe) -> None:
    assert victims(policy, 1, {0, 1, 2, 3, 4}) == [4]
    assert victims(policy, 16, {0, 1, 3, 4}) == [1]
    assert victims(policy, 31, {0, 1, 3, 4}) == [4, 1]


def test_a_predecessor_that_runs_still_counts_as_resident(policy: CoServe) -> None:
    assert victims(policy, 1, {0, 1, 3, 4}, pinned={0}) == [4]


def test_what_the_queue_waits_for_goes_last_but_not_as_printed(policy: CoServe) -> None:
    literal = CoServe(CATALOGUE, dependencies=Dependencies(USAGE, PREDECESSORS), literal=True)
    for each in (policy, literal):
        each.on_sequence_queued(SequenceInfo(1, expert=3))
        each.on_sequence_queued(SequenceInfo(2, expert=3))
        each.on_sequence_queued(SequenceInfo(2, expert=3))  # told twice, counted once
    assert victims(literal, 1, {1, 2, 3, 4}) == [3]
    assert victims(policy, 1, {1, 2, 3, 4}) == [4]
    assert victims(policy, 100, {1, 2, 3, 4}) == [4, 1, 2, 3]
    policy.on_sequence_started(SequenceInfo(1, expert=3))
    assert victims(policy, 1, {1, 2, 3, 4}) == [4]
    policy.on_sequence_ended(2, SequenceEnd.CANCELLED)
    policy.on_sequence_ended(2, SequenceEnd.CANCELLED)
    assert victims(policy, 1, {1, 2, 3, 4}) == [3]


def test_a_large_moe_model_takes_no_memory_for_what_follows_what() -> None:
    catalogue = Catalogue.uniform("moe", layers=60, experts=256, top_k=8)
    tracemalloc.start()
    try:
        made = CoServe(catalogue)
        here = np.ones(catalogue.size, dtype=np.bool_)
        assert len(made.victims(VictimRequest(Tier.DEVICE, 1, here, here))) == 1
        assert tracemalloc.get_traced_memory()[1] < 100 * catalogue.size
    finally:
        tracemalloc.stop()


def test_dependencies_of_other_experts_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="dependencies"):
        CoServe(CATALOGUE, dependencies=Dependencies(USAGE[:3], PREDECESSORS))
