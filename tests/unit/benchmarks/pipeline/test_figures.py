from __future__ import annotations

import pytest

from benchmarks.pipeline.arms import Prefill
from benchmarks.pipeline.figures import over_main, processor_time


def test_processor_time_is_shared_out_over_tokens_and_over_requests() -> None:
    spent = {"worker": 4.0, "gateway": 1.0, "scheduler": 0.5, "broker": 0.25}
    by_tokens, by_request = processor_time(spent, tokens=2000, requests=500)
    assert by_tokens == {"services": 0.75, "broker": 0.125, "worker": 2.0, "outside_worker": 0.875}
    assert by_request == {"worker": 8.0, "gateway": 2.0, "scheduler": 1.0, "broker": 0.5}
    whole = by_tokens["outside_worker"] + by_tokens["worker"]
    assert whole * 2000 / 500 == pytest.approx(sum(by_request.values()))


def test_one_checkout_over_another_is_compared_by_what_its_pipeline_adds() -> None:
    ours = {"ttft_added_p50_ms": 6.0, "ttft_added_p99_ms": 20.0}
    main = {"ttft_added_p50_ms": 12.0, "ttft_added_p99_ms": 80.0}
    assert over_main(ours, main) == {"ttft_added_p50_over_main": 0.5, "ttft_added_p99_over_main": 0.25}


def test_the_share_of_prefill_for_nothing_is_that_of_what_came_since() -> None:
    assert Prefill(300.0, 30.0).share_since(Prefill(100.0, 10.0)) == 0.1
    assert Prefill(100.0, 10.0).share_since(Prefill(100.0, 10.0)) == 0.0
