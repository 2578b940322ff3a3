"""Throughput of both arms with twice as many clients as requests may run, each sending its next when its last ended."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.harness.reporting.progress import each
from benchmarks.pipeline.arms import BothArms
from benchmarks.pipeline.figures import spreads, throughput
from benchmarks.pipeline.schedule import closed


def measure(both: BothArms) -> dict[str, Any]:
    """Tokens a second of each arm, their ``ratio`` round by round, and the pipeline's ``requests_per_s``."""
    effort = both.effort
    at_once = 2 * effort.max_running
    trial = closed(both.texts, 4 * at_once, effort.tokens)
    began = time.perf_counter()
    both.engine.run(trial, at_once)
    count = max(at_once, int(len(trial) * effort.seconds / 2 / (time.perf_counter() - began)))
    plan = closed(both.texts, count, effort.tokens)
    measured: list[dict[str, float]] = []
    for number in each(range(effort.rounds), "saturation"):
        speeds: dict[str, float] = {}
        for name, arm in both.arms(number):
            began = time.perf_counter()
            results = arm.run(plan, at_once)
            speeds[name] = throughput(results, time.perf_counter() - began)
        row = {**speeds, "ratio": speeds["pipeline"] / speeds["engine"]}
        measured.append(row)
        both.rows.append({"stage": "saturation", "round": number, "requests": count, **row})
    found = spreads(measured)
    return {**found, "requests_per_s": found["pipeline"]["median"] / effort.tokens}
