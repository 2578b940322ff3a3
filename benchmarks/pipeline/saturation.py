"""Throughput of all arms with twice as many clients as requests may run, each sending its next when its last ended."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.harness.reporting.progress import each
from benchmarks.pipeline.arms import Arms
from benchmarks.pipeline.figures import spreads, throughput
from benchmarks.pipeline.schedule import closed


def measure(arms: Arms) -> list[dict[str, Any]]:
    """For each of ``arms.sides``: tokens a second of its arms, their ``ratio`` round by round, and its pipeline's
    ``requests_per_s``."""
    effort = arms.effort
    at_once = 2 * effort.max_running
    trial = closed(arms.texts, 4 * at_once, effort.tokens)
    began = time.perf_counter()
    arms.ours.engine.run(trial, at_once)
    count = max(at_once, int(len(trial) * effort.seconds / 2 / (time.perf_counter() - began)))
    plan = closed(arms.texts, count, effort.tokens)
    measured: list[list[dict[str, float]]] = [[] for _ in arms.sides]
    for number in each(range(effort.rounds), "saturation"):
        speeds: list[dict[str, float]] = [{} for _ in arms.sides]
        for side, name, arm in arms.in_turn(number):
            began = time.perf_counter()
            results = arm.run(plan, at_once)
            speeds[arms.sides.index(side)][name] = throughput(results, time.perf_counter() - began)
        for side, rounds, speed in zip(arms.sides, measured, speeds, strict=True):
            row = {**speed, "ratio": speed["pipeline"] / speed["engine"]}
            rounds.append(row)
            about = {"stage": "saturation", "commit": side.checkout.commit, "round": number, "requests": count}
            arms.rows.append({**about, **row})
    found = [spreads(rounds) for rounds in measured]
    return [{**one, "requests_per_s": one["pipeline"]["median"] / effort.tokens} for one in found]
