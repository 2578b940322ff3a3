from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.emoe.scheduling.jobs import Job
from benchmarks.emoe.scheduling.measures import estimate_errors, summary
from benchmarks.emoe.scheduling.simulator import Served

JOB = Job("r", "short", 1000.0, 3, 2, 8, slo_e2e_ms=100.0)


def served(end_ms: float | None, *, task: str = "short", at_ms: float = 1000.0) -> Served:
    job = replace(JOB, task=task, at_ms=at_ms)
    if end_ms is None:
        return Served(job, None, None, None, "waited too long")
    return Served(job, at_ms + 10, end_ms, end_ms, estimates={"eq3": 60.0})


def test_goodput_counts_what_ended_in_time_over_the_time_in_which_requests_came() -> None:
    found = summary([served(1050.0), served(1101.0), served(2050.0, task="long", at_ms=2000.0), served(None)])
    assert found["requests"] == 4
    assert found["attainment"] == 0.5
    assert found["goodput"] == 1.0  # two in two seconds
    assert found["given_up"] == 1
    assert found["mean_latency_ms"] == pytest.approx((50 + 101 + 50) / 3)
    assert found["by_task"]["long"]["attainment"] == 1.0
    assert found["by_task"]["short"]["attainment"] == pytest.approx(1 / 3)


def test_an_estimates_error_is_of_the_time_after_the_queue() -> None:
    errors = estimate_errors([served(1110.0), served(None)])["eq3"]
    assert errors == {"median": -0.5, "mean_size": 0.5, "of": 1}  # 50 of 100 ms
