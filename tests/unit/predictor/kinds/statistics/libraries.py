"""Libraries of statistics, and traces that they learn from."""

from __future__ import annotations

from typing import Any

from greenroom.core.messages import Trace
from greenroom.predictor import PredictorConfig
from greenroom.predictor.kinds.statistics.library import Library
from greenroom.predictor.kinds.statistics.snapshot import Snapshot
from greenroom.predictor.traces.counts import Shape, count
from tests.unit.predictor.worlds import trace

ENTRY = Shape(2, 4).nbytes + 2048


def config(entries: int = 100, **fields: Any) -> PredictorConfig:
    return PredictorConfig(max_bytes=max(entries, 8) * ENTRY, **fields)


def new(rules: PredictorConfig | None = None) -> Library:
    rules = rules or config()
    return Library(
        max_bytes=rules.max_bytes, half_life_sequences=rules.half_life_sequences, seen_window=rules.seen_window
    )


def one(request_id: str, task_type: str = "", model: str = "m", **fields: Any) -> Trace:
    return trace([[[0], [1]]], 4, request_id=request_id, task_type=task_type, model=model, **fields)


def snapshot(version: int, model: str = "m", sequences: int = 2) -> Snapshot:
    library = new()
    for number in range(sequences):
        given = one(f"{version}.{number}", "question", model)
        library.learn(given, count(given))
    return library.snapshot(model, version, 1000 + version)
