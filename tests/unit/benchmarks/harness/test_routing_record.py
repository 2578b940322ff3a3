from __future__ import annotations

import numpy as np

from benchmarks.harness.arms.routing_record import RoutingRecord, steady_misses
from greenroom.policies.base.events import Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes


def accesses(*experts: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(experts, dtype=np.int64)


def test_misses_are_those_of_a_cache_that_is_warm_and_goes_on() -> None:
    """Three experts in turn, in two slots: by hand misses a b c, then b, then a and c."""
    stream = accesses(0, 1, 2)
    assert steady_misses(stream, 3) == 0, "what fits is not fetched again"
    assert steady_misses(stream, 2) == 1
    assert steady_misses(stream, 1) == 3
    assert steady_misses(accesses(), 2) == 0


def test_more_slots_never_miss_more() -> None:
    random = np.random.default_rng(3)
    stream = np.concatenate([np.sort(random.choice(20, 4, replace=False)) for _ in range(50)])
    misses = [steady_misses(stream, slots) for slots in range(4, 21)]
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] == 0
    assert misses[0] > 0


def test_a_record_counts_distinct_experts_and_the_bytes_they_touch() -> None:
    catalogue = Catalogue.uniform("m", layers=2, experts=4, top_k=2, expert_bytes=10)
    record = RoutingRecord(catalogue)
    for number in (1, 2):
        step = Step("m", number, np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.uint8))
        record.layer_routed(step, 0, np.array([[0, 1], [1, 3]]))
        record.layer_routed(step, 1, np.array([[2, 4], [2, 4]]))  # 4 is no expert
        record.step_ended(step, failed=False)
    assert [group.tolist() for group in record.groups] == [[0, 1, 3], [6]] * 2
    trace = record.trace(4, 100)
    assert (trace.accesses, trace.belady_bytes, trace.bytes_touched) == (8, 0, 2 * 100 + 8 * 10)
    assert record.trace(3, 100).belady_bytes == 10 * steady_misses(accesses(0, 1, 3, 6, 0, 1, 3, 6), 3) > 0
    assert record.future(3).accesses.tolist() == [0, 1, 3, 6] * 6


def test_experts_of_each_size_have_their_own_slots() -> None:
    """By hand: of three large experts in turn in two slots one is missed, and the two small ones fit in theirs."""
    catalogue = Catalogue("m", experts_per_layer=[3, 3], top_k=[1, 1], expert_bytes=[10, 30])
    record = RoutingRecord(catalogue)
    for number in range(3):
        step = Step("m", number, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint8))
        record.layer_routed(step, 0, np.array([[number % 2]]))
        record.layer_routed(step, 1, np.array([[number]]))
        record.step_ended(step, failed=False)
    assert SlotSizes(catalogue).places(4).tolist() == [2, 2]
    trace = record.trace(4, 100)
    assert (trace.accesses, trace.belady_bytes, trace.bytes_touched) == (6, 30, 3 * 100 + 3 * 10 + 3 * 30)
    assert record.trace(6, 100).belady_bytes == 0
