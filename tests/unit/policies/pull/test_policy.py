"""Who leaves the memory that all executors share, under ``pull``."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.events import LayerRouting, Reason, SequenceEnd, SequenceInfo, Step, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.pull.policy import Pull

CATALOGUE = Catalogue.of_models("board", [10] * 5)
USAGE = np.array([0.5, 0.1, 0.2, 0.3, 0.05])
GRAPH = Dependencies(USAGE, (frozenset(),) * 5)


def order(policy: Pull) -> list[int]:
    """In which all would leave."""
    every = np.ones(5, dtype=np.bool_)
    return [*map(int, policy.victims(VictimRequest(Tier.DEVICE, 50, every, every, Reason.ON_DEMAND)))]


def queue(policy: Pull, *experts: int, first: int = 0) -> None:
    for number, expert in enumerate(experts, first):
        policy.on_sequence_queued(SequenceInfo(number, expert=expert))


def test_by_ascending_probability_where_nobody_waits() -> None:
    assert order(Pull(CATALOGUE, dependencies=GRAPH)) == [4, 1, 2, 3, 0]


def test_what_is_waited_for_leaves_last_and_first_of_it_what_was_so_for_the_shortest_time() -> None:
    policy = Pull(CATALOGUE, dependencies=GRAPH)
    queue(policy, 4, 1, 4, 2)
    assert order(policy) == [3, 0, 2, 1, 4]
    policy.on_sequence_started(SequenceInfo(0, expert=4))  # so it is the third request's turn that counts
    assert order(policy) == [3, 0, 2, 4, 1]
    policy.on_sequence_ended(0, SequenceEnd.FINISHED)
    policy.on_sequence_ended(1, SequenceEnd.CANCELLED)
    assert order(policy) == [1, 3, 0, 2, 4]


def test_without_probabilities_requests_count_and_older_ones_for_less() -> None:
    policy = Pull(CATALOGUE, decay=0.5)
    queue(policy, 0, 0, 0, 1, 2)
    for number in range(5):
        policy.on_sequence_ended(number, SequenceEnd.FINISHED)
    assert order(policy) == [3, 4, 0, 1, 2]
    slow = Pull(CATALOGUE, decay=0.999)
    queue(slow, 0, 0, 0, 1, 2)
    for number in range(5):
        slow.on_sequence_ended(number, SequenceEnd.FINISHED)
    assert order(slow) == [3, 4, 1, 2, 0]


def test_uses_count_where_no_request_names_an_expert() -> None:
    def use(policy: Pull, expert: int) -> None:
        step = Step("board", 1, np.array([0]), np.array([1], dtype=np.uint8))
        policy.on_layer_routed(LayerRouting.from_picks(CATALOGUE, step, 0, np.array([[expert]])))

    policy = Pull(CATALOGUE)
    use(policy, 0)
    assert order(policy)[-1] == 0
    queue(policy, 3)
    policy.on_sequence_started(SequenceInfo(0, expert=3))
    before = order(policy)
    use(policy, 4)
    assert order(policy) == before


def test_dependencies_of_other_experts_are_refused() -> None:
    with pytest.raises(InvalidConfig):
        Pull(CATALOGUE, dependencies=Dependencies(USAGE[:3], (frozenset(),) * 5))
    with pytest.raises(InvalidConfig):
        Pull(CATALOGUE, decay=1.5)
