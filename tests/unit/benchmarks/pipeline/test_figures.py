from __future__ import annotations

import pytest

from benchmarks.pipeline.figures import processor_time


def test_processor_time_is_shared_out_over_tokens_and_over_requests() -> None:
    spent = {"worker": 4.0, "gateway": 1.0, "scheduler": 0.5, "broker": 0.25}
    by_tokens, by_request = processor_time(spent, tokens=2000, requests=500)
    assert by_tokens == {"services": 0.75, "broker": 0.125, "worker": 2.0, "outside_worker": 0.875}
    assert by_request == {"worker": 8.0, "gateway": 2.0, "scheduler": 1.0, "broker": 0.5}
    whole = by_tokens["outside_worker"] + by_tokens["worker"]
    assert whole * 2000 / 500 == pytest.approx(sum(by_request.values()))
