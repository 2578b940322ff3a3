"""What the first fill brings counts as never used."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.policies.base.events import Reason, Tier, Transfer
from greenroom.policies.replacement.lru import Recency


def arrive(recency: Recency, reason: Reason, *experts: int) -> None:
    for expert in experts:
        recency.arrived(Transfer(expert, Tier.DISK, Tier.DEVICE, reason))


def leaving(recency: Recency, *experts: int) -> list[int]:
    return sorted(experts, key=lambda expert: int(recency.last[expert]))


def test_the_first_fill_leaves_before_what_was_used_in_the_order_in_which_it_came() -> None:
    recency = Recency(8)
    arrive(recency, Reason.FILL, 0, 1)
    recency.use(np.array([5, 6]))
    arrive(recency, Reason.FILL, 2)
    assert leaving(recency, 0, 1, 2, 5, 6) == [0, 1, 2, 5, 6]
    recency.use(np.array([1]))
    assert leaving(recency, 0, 1, 2, 5, 6) == [0, 2, 5, 6, 1]


def test_what_was_used_before_the_fill_brought_it_keeps_its_time() -> None:
    recency = Recency(8)
    recency.use(np.array([3, 4]))
    arrive(recency, Reason.FILL, 3, 0)
    assert leaving(recency, 0, 3, 4) == [0, 3, 4]


@pytest.mark.parametrize("reason", [Reason.PREFETCH, Reason.TARGET])
def test_what_was_fetched_ahead_counts_as_used(reason: Reason) -> None:
    recency = Recency(8)
    recency.use(np.array([3]))
    arrive(recency, reason, 0)
    arrive(recency, Reason.ON_DEMAND, 3)
    assert leaving(recency, 0, 3) == [3, 0]
