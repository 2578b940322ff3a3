"""Three times the rate that the pipeline carries: memory, waiting, refusals, and how soon all is as before."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from benchmarks.harness.reporting.statistics import percentile
from benchmarks.pipeline.arms import Arms
from benchmarks.pipeline.pinning import resident_bytes
from benchmarks.pipeline.schedule import poisson

REST_S = 10.0
"""After the overload and before latency is measured again."""


def measure(arms: Arms, saturating: float) -> dict[str, Any]:
    """``saturating``: requests a second. Latency before and after is at half of that."""
    effort, pids = arms.effort, list(arms.ours.pids().values())
    window = max(3.0, effort.overload_seconds / 6)

    def calm(seed: int) -> float:
        results = arms.ours.pipeline.run(poisson(arms.texts, saturating / 2, window, effort.tokens, seed))
        return percentile([one.ttft for one in results if not one.refused], 0.5)

    before = [calm(100 + number) for number in range(3)]
    memory_before = resident_bytes(pids)
    plan = poisson(arms.texts, 3 * saturating, effort.overload_seconds, effort.tokens, seed=77)
    results = arms.ours.pipeline.run(plan)
    memory_after = resident_bytes(pids)
    time.sleep(REST_S)
    after = calm(200)
    accepted = [one for one in results if not one.refused]
    outcome = {
        "requests": len(results),
        "accepted": len(accepted),
        "refused": dict(Counter(one.refused for one in results if one.refused)),
        "accepted_ttft_p50_ms": round(1e3 * percentile([one.ttft for one in accepted], 0.5), 1),
        "accepted_ttft_max_ms": round(1e3 * max(one.ttft for one in accepted), 1),
        "queue_wait_bound_ms": 10_000.0,
        "resident_bytes_before": memory_before,
        "resident_bytes_after": memory_after,
        "ttft_p50_before_ms": [round(1e3 * one, 1) for one in before],
        "ttft_p50_after_ms": round(1e3 * after, 1),
    }
    arms.rows.append({"stage": "overload", "rate": 3 * saturating, **outcome})
    return outcome
