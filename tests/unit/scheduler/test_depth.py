"""When a scheduler says at once how many requests wait."""

from __future__ import annotations

import pytest

from greenroom.scheduler.pool_runner import worth_telling


@pytest.mark.parametrize(
    ("told", "waiting", "limit", "at_once"),
    [
        (0, 0, 64, False),
        (0, 3, 64, False),
        (0, 4, 64, True),
        (10, 6, 64, True),
        (10, 8, 64, False),
        (2, 0, 64, True),  # there is room again
        (63, 64, 64, True),  # there is none any more
        (64, 64, 64, False),
        (64, 66, 64, True),
        (64, 63, 64, False),
        (0, 1, 2, True),
        (0, 1, 0, True),
    ],
)
def test_only_what_gateways_would_refuse_others_by_is_told_at_once(
    told: int, waiting: int, limit: int, at_once: bool
) -> None:
    assert worth_telling(told, waiting, limit) is at_once
