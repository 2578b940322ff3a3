"""A profile as dispatchers and placement take it."""

from __future__ import annotations

import pytest

from greenroom.coe.computing.profiled_costs import executor_costs, largest_batches
from greenroom.core.errors import InvalidConfig
from tests.coe_profiles import small_profile

NAMES = ("chip", "resistor", "turned")


def test_costs_are_those_of_each_experts_architecture_beside_as_many_executors() -> None:
    alone, beside = (executor_costs(small_profile(), NAMES, "cpu", count) for count in (1, 2))
    assert [alone.request_ms(expert) for expert in range(3)] == [4.0, 1.0, 1.0]
    assert [beside.request_ms(expert) for expert in range(3)] == [8.0, 2.0, 2.0]
    assert [beside.batch_ms_of(expert) for expert in range(3)] == [6.0, 6.0, 6.0]
    assert [beside.load_ms(expert) for expert in range(3)] == [9.0, 5.0, 5.0]


def test_a_batch_is_the_smaller_of_what_memory_holds_and_the_maximum() -> None:
    def most(nbytes: int) -> dict[int, int]:
        return largest_batches(small_profile(), NAMES, "cpu", 2, nbytes)

    assert most(1_000_000) == {0: 4, 1: 8, 2: 8}
    assert most(5_500) == {0: 4, 1: 5, 2: 5}
    assert most(1_499) == {0: 0, 1: 0, 2: 0}


def test_a_kind_that_was_not_measured_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="cuda"):
        executor_costs(small_profile(), NAMES, "cuda", 1)
