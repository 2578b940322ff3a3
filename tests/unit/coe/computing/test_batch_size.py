from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.coe.computing.batch_size import batch_size, bytes_of_batch
from greenroom.core.errors import InvalidConfig

MEASURED = {1: 100, 2: 180, 8: 660}


@pytest.mark.parametrize(
    ("waiting", "free", "most", "expected"),
    [
        (10, 10_000, 4, 4),  # the profiled maximum
        (3, 10_000, 4, 3),  # who waits
        (10, 180, 8, 2),  # the memory, as measured
        (10, 339, 8, 3),  # between measurements: 180 + 80 a request
        (10, 340, 8, 4),
        (20, 10_000, 20, 20),  # beyond them
        (20, 819, 20, 9),
        (10, 99, 8, 0),  # not even one
        (0, 10_000, 8, 0),
    ],
)
def test_the_smaller_of_memory_and_profile(waiting: int, free: int, most: int, expected: int) -> None:
    assert batch_size(waiting, free, MEASURED, most) == expected


def test_one_measurement_is_a_share_a_request() -> None:
    assert [bytes_of_batch({4: 402}, batch) for batch in (1, 4, 5, 8)] == [402, 402, 503, 804]


def test_without_a_measurement_there_is_no_answer() -> None:
    with pytest.raises(InvalidConfig, match="at least one measured batch size"):
        batch_size(1, 100, {}, 1)


measurements = st.dictionaries(st.integers(1, 64), st.integers(0, 10**12), min_size=1, max_size=6)


@given(measurements, st.integers(0, 10**12), st.integers(0, 200), st.integers(0, 200))
def test_it_is_the_largest_that_fits(measured: dict[int, int], free: int, waiting: int, most: int) -> None:
    found = batch_size(waiting, free, measured, most)
    assert found == max(
        (size for size in range(1, min(waiting, most) + 1) if bytes_of_batch(measured, size) <= free), default=0
    )


@given(measurements)
def test_bytes_never_shrink_and_are_no_less_than_measured(measured: dict[int, int]) -> None:
    needed = [bytes_of_batch(measured, batch) for batch in range(1, 80)]
    assert needed == sorted(needed)
    for batch, nbytes in measured.items():
        assert bytes_of_batch(measured, batch) >= nbytes
