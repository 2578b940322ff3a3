"""How near forecasts come to what really was routed, on a real model's trace (decode rows only).

Needs that trace: GREENROOM_DATA names the folder that holds ``routing/gpt-oss-20b.npz``. The sequences in file order,
their subjects as task types; each is forecast from those before it, where its subject came before. The measure is the
overlap Σ min(forecast, real) of a layer, over all layers and sequences.
"""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np

from greenroom.predictor.kinds.statistics.forecaster import Forecaster, uniform
from greenroom.predictor.kinds.statistics.statistics import Statistics
from greenroom.predictor.traces.counts import Floats, Shape, count
from tests.real_data import real_data
from tests.unit.predictor.worlds import trace

HALF_LIFE = 500.0


def test_overlap_with_what_was_routed() -> None:
    path = real_data("routing/gpt-oss-20b.npz")
    with np.load(path) as file:
        experts, starts, each = file["experts"], file["seq_starts"], int(file["num_experts"])
    lines = path.with_name("gpt-oss-20b.meta.jsonl").read_bytes().splitlines()
    shape = Shape(experts.shape[1], each)
    statistics: dict[str, Statistics] = defaultdict(lambda: Statistics.empty(shape))
    previous: dict[str, Floats] = {}
    overlaps: dict[str, list[float]] = defaultdict(list)
    for number, line in enumerate(lines):
        subject = json.loads(line)["category"]
        counts = count(trace(experts[starts[number] : starts[number + 1]], each))
        if subject in previous:
            by_type, by_all = Forecaster(statistics[subject].copy()), Forecaster(statistics[""].copy())
            for name, forecast in (
                ("uniform", uniform(shape)),
                ("all tasks", by_all.popularity),
                ("task type", by_type.popularity),
                ("previous prompt itself", previous[subject]),
                ("after the previous prompt", by_type.after(previous[subject])),
            ):
                overlaps[name].append(float(np.minimum(forecast, counts.popularity).sum(axis=1).mean()))
        statistics[subject].add(counts, HALF_LIFE)
        statistics[""].add(counts, HALF_LIFE)
        previous[subject] = counts.popularity
    figures = {name: round(float(np.mean(values)), 3) for name, values in overlaps.items()}
    assert figures == {
        "uniform": 0.544,
        "all tasks": 0.703,
        "task type": 0.738,
        "previous prompt itself": 0.716,
        "after the previous prompt": 0.737,
    }
    assert len(overlaps["uniform"]) == 146
