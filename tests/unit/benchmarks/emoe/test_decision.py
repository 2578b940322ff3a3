"""The benchmark of the scheduler's decision times what it says it does."""

from __future__ import annotations

import pytest

from benchmarks.emoe.decision import START_MS, TO_SPARE_MS, full_pool, run
from greenroom.policies.placement.latency_estimate import ESTIMATORS


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_can_be_placed_for_the_slos_of_those_that_run_alone(estimator: str) -> None:
    pool = full_pool(60, 8, estimator)
    assert pool.schedule(START_MS + 1.0) == []
    assert pool.workers["worker"].capacity.max_running == 9
    late = pool.schedule(START_MS + TO_SPARE_MS + 1.0)
    assert late, "none would meet its SLO any more, so none is in the way"


def test_it_says_its_key() -> None:
    found = run(waiting=20, running=4, rounds=5)
    assert 0 < found["decision_p50_ms"] <= found["decision_ms_at_20"] == found["decision_p99_ms"]
