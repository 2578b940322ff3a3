"""From what was measured to the figures that are reported."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.reporting.statistics import Spread, percentile, spread_json
from benchmarks.pipeline.schedule import Measured


def added(engine: Sequence[Measured], pipeline: Sequence[Measured]) -> dict[str, float]:
    """What the pipeline adds, milliseconds, in one round with the same requests at the same times for both arms.

    The median is of the differences request by request; p99 is the difference of the arms' own.
    """
    pairs = [(a, b) for a, b in zip(engine, pipeline, strict=True) if not a.refused and not b.refused]
    if not pairs:
        raise ValueError("every request was refused")
    return {
        "ttft_added_p50_ms": 1e3 * statistics.median(b.ttft - a.ttft for a, b in pairs),
        "ttft_added_p99_ms": 1e3
        * (percentile([b.ttft for _, b in pairs], 0.99) - percentile([a.ttft for a, _ in pairs], 0.99)),
        "itl_added_p50_ms": 1e3 * statistics.median(b.itl - a.itl for a, b in pairs),
        "ttft_engine_p50_ms": 1e3 * statistics.median(a.ttft for a, _ in pairs),
        "ttft_pipeline_p50_ms": 1e3 * statistics.median(b.ttft for _, b in pairs),
        "itl_engine_p50_ms": 1e3 * statistics.median(a.itl for a, _ in pairs),
        "itl_pipeline_p50_ms": 1e3 * statistics.median(b.itl for _, b in pairs),
        "ttft_ratio_p50": statistics.median(b.ttft for _, b in pairs) / statistics.median(a.ttft for a, _ in pairs),
        "itl_ratio_p50": statistics.median(b.itl for _, b in pairs) / statistics.median(a.itl for a, _ in pairs),
        "requests": len(pairs),
        "refused": len(engine) - len(pairs),
    }


def over_main(ours: Mapping[str, float], main: Mapping[str, float]) -> dict[str, float]:
    """One round's ``added`` of this checkout over that of the other one."""
    return {
        "ttft_added_p50_over_main": ours["ttft_added_p50_ms"] / main["ttft_added_p50_ms"],
        "ttft_added_p99_over_main": ours["ttft_added_p99_ms"] / main["ttft_added_p99_ms"],
    }


def processor_time(spent: Mapping[str, float], tokens: int, requests: int) -> tuple[dict[str, float], dict[str, float]]:
    """``spent``: seconds by process, ``worker`` and ``broker`` among them.

    Seconds for 1000 tokens, with all other processes as ``services``; and milliseconds for each request by process.
    """
    by_tokens = {"services": 0.0, "broker": 0.0, "worker": 0.0}
    for name, seconds in spent.items():
        by_tokens[name if name in by_tokens else "services"] += 1e3 * seconds / tokens
    by_tokens["outside_worker"] = by_tokens["services"] + by_tokens["broker"]
    return (
        {name: round(value, 4) for name, value in by_tokens.items()},
        {name: round(1e3 * seconds / requests, 3) for name, seconds in spent.items()},
    )


def throughput(measured: Sequence[Measured], seconds: float) -> float:
    """Tokens a second."""
    return sum(one.tokens for one in measured) / seconds


def spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Each figure's median over rounds, with the least and the most."""
    return {key: spread_json(Spread.of([row[key] for row in rounds]), 4) for key in rounds[0]}
