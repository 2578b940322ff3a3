"""Predictors that need no learning, measured on the same prompts as a learned one. Without torch."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from greenroom.predictor.judging.scores import Score, score, score_ranked
from greenroom.predictor.kinds.emoe.priors import priors_of, tasks_of
from greenroom.predictor.kinds.emoe.recorded import Recorded
from greenroom.predictor.kinds.emoe.sequences import Sequences
from greenroom.predictor.kinds.statistics.forecaster import Forecaster
from greenroom.predictor.kinds.statistics.statistics import Statistics
from greenroom.predictor.traces.counts import count_picks

HALF_LIFE = 500.0


def places_to_test(sequences: Sequences, train: int) -> npt.NDArray[np.int64]:
    """The prompts from ``train`` on that have a previous one of their type, wherever that is."""
    return np.flatnonzero((np.arange(len(sequences)) >= train) & (sequences.previous() >= 0))


def trivial(recorded: Recorded, train: int, places: npt.NDArray[np.int64]) -> dict[str, Score]:
    """By name, on the prompts at ``places``; what is counted is counted in those before ``train``.

    ``all tasks`` and ``task type``: popularity by slot. ``previous prompt``: its own distribution by slot. ``after the
    previous prompt``: the statistics' chain through affinity, which knows no slots. ``half previous, half task type``:
    the mean of the two. ``the prompt itself``: its own distribution, which no forecast can know: the most that one
    distribution a prompt can say about its tokens.
    """
    sequences = recorded.sequences
    actual = sequences.counts[places]
    trained = Sequences(sequences.tasks[:train], sequences.counts[:train])
    priors = priors_of(trained, tasks_of(trained))
    numbers = np.asarray([priors.number(sequences.tasks[place]) for place in places], np.int64)
    shares = sequences.by_slot()
    before = shares[sequences.previous()[places]]
    return {
        "all tasks": score(priors.by_slot[np.zeros_like(numbers)], actual),
        "task type": score(priors.by_slot[numbers], actual),
        "previous prompt": score(before, actual),
        "half previous, half task type": score(
            (before + priors.by_slot[numbers]).astype(np.float32) / np.float32(2), actual
        ),
        "after the previous prompt": score_ranked(_chained(recorded, train, places), actual),
        "the prompt itself": score(shares[places], actual),
    }


def _chained(recorded: Recorded, train: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    sequences = recorded.sequences
    statistics: dict[str, Statistics] = defaultdict(lambda: Statistics.empty(recorded.shape))
    for place, picks in zip(range(train), recorded.picks(), strict=False):
        counts = count_picks(picks, recorded.shape)
        for name in {"", sequences.tasks[place]}:
            statistics[name].add(counts, HALF_LIFE)
    forecasters = {name: Forecaster(one) for name, one in statistics.items()}
    layers, previous = sequences.by_layer(), sequences.previous()
    return np.stack(
        [
            forecasters.get(sequences.tasks[place], forecasters[""]).after(layers[previous[place]])
            for place in places
        ]
    )  # fmt: skip
