"""A burst or a line, served once by the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.coserve.real.board import RealBoard
from benchmarks.coserve.settings import Setting
from benchmarks.harness.children.process_memory import at_rest, peak_bytes
from benchmarks.harness.reporting.statistics import percentile
from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.coe.serving.selection import Selection
from greenroom.coe.serving.serve_calls import Answers, serve_calls
from greenroom.coe.simulation.simulate import Way


def served(real: RealBoard, selection: Selection, setting: Setting, ways: Sequence[Way]) -> dict[str, Any]:
    """What came of it. ``announced`` and ``peak``: bytes; the peak is over what the process had before the start.

    Raises RuntimeError if a request failed or went another way.
    """
    config = ServingConfig(
        file=real.file, selection=selection, cache_dir=real.cache, profile=real.profile, executors=setting.executors,
        expert_memory=str(setting.expert_bytes), expert_share=min(setting.expert_bytes / real.memory, 0.999),
        progress=False,
    )  # fmt: skip
    calls = real.calls(ways)
    before = at_rest()
    with CollaborationRuntime(config) as runtime:
        busy_s = runtime.link.busy_seconds
        answers = serve_calls(runtime.engine, calls)
        busy_s = runtime.link.busy_seconds - busy_s
        for one in runtime.memories:
            one.audit()
        counted = [one.counters for one in runtime.memories]
        engine = runtime.engine.counters
        announced = runtime.plan.total
    check_answers(real, ways, answers)
    loaded = sum(one.bytes_loaded for one in counted)
    return {
        **figures(answers),
        "switches": sum(one.loads for one in counted),
        "switches_of_a_memory": max(one.loads for one in counted),
        "moved_over_loaded": sum(one.bytes_moved for one in counted) / loaded if loaded else 0.0,
        "link_share": 1000 * busy_s / answers.total_ms,
        "load_ms": 1000 * busy_s / max(1, sum(one.loads for one in counted)),
        "batch": engine.stages / sum(engine.batch_sizes.values()),
        "compute_ms": 1000 * engine.compute_s / sum(engine.batch_sizes.values()),
        "decide_share": 1000 * engine.decide_s / answers.total_ms,
        "decide_ms": 1000 * engine.decide_s / engine.stages,
        "announced": announced,
        "peak": max(0, peak_bytes() - before),
    }


def figures(answers: Answers) -> dict[str, Any]:
    return {
        "per_s": answers.per_s,
        "p50_s": percentile(answers.latencies_ms, 0.5) / 1000,
        "p99_s": percentile(answers.latencies_ms, 0.99) / 1000,
    }


def check_answers(real: RealBoard, ways: Sequence[Way], answers: Answers) -> None:
    for way, outcome in zip(ways, answers.outcomes, strict=True):
        path = tuple(real.graph.names[expert] for expert in way.experts)
        if outcome.error is not None or outcome.path != path:
            raise RuntimeError(f"a request of {path} came to {outcome.path}: {outcome.error}")
