"""What everything but the model can carry: the pipeline with a worker that has none (``stub_worker``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.harness.children.processes import background
from benchmarks.harness.machine import cache_folder
from benchmarks.harness.reporting.progress import each
from benchmarks.pipeline.arms import ENGINE_CORE, OTHERS, Effort, PipelineArm
from benchmarks.pipeline.figures import spreads, throughput
from benchmarks.pipeline.pinning import pin
from benchmarks.pipeline.schedule import Measured, closed
from tests.integration.cluster import Cluster
from tests.kafka.broker import JarBroker


def measure(
    broker: JarBroker, folder: Path, texts: Sequence[str], effort: Effort, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The services have core 1, the stub core 0. Tokens and requests a second; each round is added to ``rows``."""
    folder.mkdir()
    cluster = Cluster(folder, broker.address, prefix="stub.", cache=cache_folder(), workers=0, predictors=0)
    services = cluster.processes.values()
    with closing(cluster):
        for process in services:
            process.start()
        with background("benchmarks.pipeline.stub_worker", broker.address, "stub.") as stub:
            for process in services:
                process.wait_ready()
                pin(process.pid, OTHERS)
            pin(stub, {ENGINE_CORE})
            return _rounds(PipelineArm(cluster.urls[0]), texts, effort, rows)


def _rounds(arm: PipelineArm, texts: Sequence[str], effort: Effort, rows: list[dict[str, Any]]) -> dict[str, Any]:
    measured: list[dict[str, float]] = []
    plan = closed(texts, 64, effort.tokens)
    arm.run(plan, at_once=32)
    for number in each(range(effort.rounds), "ceiling"):
        began = time.perf_counter()
        results: list[Measured] = []
        while time.perf_counter() - began < effort.seconds / 2:
            results += arm.run(plan, at_once=64)
        took = time.perf_counter() - began
        good = [one for one in results if not one.refused]
        row = {"tokens_per_s": throughput(good, took), "requests_per_s": len(good) / took}
        measured.append(row)
        rows.append({"stage": "ceiling", "round": number, **row, "refused": len(results) - len(good)})
    return spreads(measured)
