"""The last finished prompt of each task type."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.predictor.kinds.statistics.forecaster import parse_previous
from greenroom.predictor.traces.counts import Shape
from greenroom.worker.generation_engine import RecordedRouting
from greenroom.worker.predictions.last_prompts import LastPrompts, distribution_of
from greenroom.worker.service_config import ForecastConfig, ServiceConfig, TraceConfig, predictor_for
from tests.unit.policies.model_profiles import model_profile, task_profile


def routed(*rows: list[list[int]]) -> RecordedRouting:
    return RecordedRouting(np.array(rows, dtype=np.uint8), 1, 3)


def test_a_distribution_is_each_layers_picks_and_what_is_none_counts_as_nothing() -> None:
    one = routed([[0, 1], [255, 255]], [[0, 255], [255, 255]])
    assert distribution_of(one).ravel().tolist() == pytest.approx([2 / 3, 1 / 3, 0, 1 / 3, 1 / 3, 1 / 3])


def test_it_is_what_the_predictor_takes() -> None:
    last = LastPrompts()
    last.finished("sort", routed([[0, 1], [2, 2]], [[0, 1], [2, 1]]))
    taken = parse_previous(last.of("sort"), Shape(2, 3))
    assert taken.ravel().tolist() == pytest.approx([0.5, 0.5, 0, 0, 0.25, 0.75])


def test_the_newest_of_a_type_counts_and_of_many_types_those_that_finished_last() -> None:
    last = LastPrompts()
    for number in range(40):
        last.finished(f"task{number}", routed([[0, 0], [0, 0]]))
        last.finished("sort", routed([[number % 3] * 2, [1, 1]]))
    assert np.frombuffer(last.of("sort"), "<f4").tolist() == [1, 0, 0, 0, 1, 0]
    assert last.of("task0") == b""
    assert last.of("task39") != b""


def test_what_was_asked_for_is_as_it_was_then() -> None:
    last = LastPrompts()
    nothing = last.now("sort")
    last.finished("sort", routed([[0, 0], [1, 1]]))
    then = last.now("sort")
    last.finished("sort", routed([[2, 2], [2, 2]]))
    assert nothing() == b""
    assert np.frombuffer(then(), "<f4").tolist() == [1, 0, 0, 0, 1, 0]


def test_one_without_rows_says_nothing() -> None:
    last = LastPrompts()
    last.finished("sort", RecordedRouting(np.empty((0, 2, 2), dtype=np.uint8), 0, 3))
    assert last.of("sort") == b""


def test_before_there_is_one_it_is_the_profiles_popularity() -> None:
    last = LastPrompts(model_profile({"sort": task_profile([[1, 1, 2], [0, 0, 1]])}))
    assert np.frombuffer(last.of("sort"), "<f4").tolist() == pytest.approx([0.25, 0.25, 0.5, 0, 0, 1])
    assert last.of("unheard-of") == b""


def test_routing_is_recorded_where_it_is_of_use() -> None:
    def records(*, traced: bool, every: int, predictor: str) -> bool:
        config = ServiceConfig(
            instance="w",
            traces=TraceConfig(enabled=traced),
            forecasts=ForecastConfig(every=every, predictor=predictor),
        )
        return config.records_routing

    assert records(traced=True, every=0, predictor="statistics")
    assert records(traced=False, every=40, predictor="emoe-l")
    assert not records(traced=False, every=0, predictor="emoe-l")
    assert not records(traced=False, every=40, predictor="statistics")


def test_the_predictor_follows_the_policy_and_a_wrong_one_is_refused() -> None:
    assert (predictor_for("emoe"), predictor_for("popularity")) == ("emoe-a", "statistics")
    with pytest.raises(InvalidConfig, match="statistics, emoe-a, emoe-l"):
        ForecastConfig(predictor="emoe-x")
