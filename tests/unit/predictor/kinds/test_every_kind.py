"""What holds of every kind that is made from live traces: from the picks of sequences to what is kept and served."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from greenroom.core.tensors import Damaged
from greenroom.predictor.kinds.config import BuildingConfig, LearningConfig
from greenroom.predictor.kinds.make import make_file
from greenroom.predictor.kinds.registry import FORECAST_KINDS, POLICY_KINDS
from greenroom.predictor.making.job import Job, dump_job
from greenroom.predictor.making.kind import ForecastKind, Kind, TracedSequence, kept_of
from greenroom.predictor.traces.counts import Shape

SHAPE, SLOTS, SEQUENCES = Shape(3, 8), 2, 12
KINDS: dict[str, Kind[Any]] = {
    **{name: kind(LearningConfig()) for name, kind in FORECAST_KINDS.items()},
    **{name: kind(BuildingConfig()) for name, kind in POLICY_KINDS.items()},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind[Any]:
    return KINDS[request.param]


def picks(number: int) -> Any:
    """[rows, layers, k], no expert twice in a row."""
    random = np.random.default_rng(number)
    return random.random((60 + number, *(SHAPE.layers, SHAPE.experts))).argsort(axis=2)[:, :, :SLOTS].astype(np.uint8)


def tokens(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 20, size=len(picks(number))).astype(np.uint32)


def job(kind: Kind[Any]) -> Job:
    kept = [
        kept_of([kind], TracedSequence(picks(number), SHAPE.experts, "ab"[number % 2], tokens(number), 5))
        for number in range(SEQUENCES)
    ]
    samples = [sample for one in kept if (sample := one[kind.keeps]) is not None]
    return Job(kind.name, "m", SHAPE, samples, kind.options())


@cache
def artifact(name: str) -> Any:
    return KINDS[name].codec.load(make_file(dump_job(job(KINDS[name]))))


def test_it_is_registered_under_its_name() -> None:
    assert {name: kind.name for name, kind in KINDS.items()} == {name: name for name in KINDS}


def test_what_is_kept_has_the_axes_of_its_model(kind: Kind[Any]) -> None:
    assert len({sample.shape for sample in job(kind).samples}) == 1
    assert kind.usual_sequences >= kind.least_sequences >= 1


def test_it_is_due_at_some_time_and_not_again_at_once(kind: Kind[Any]) -> None:
    for there_is_one in (False, True):
        pace, count = kind.pace(there_is_one), 0
        while not pace.due:
            pace.note(None)
            count += 1
            assert count <= 1000
        pace.begun()
        pace.made()
        assert not pace.due


def test_what_is_made_is_what_was_asked_for(kind: Kind[Any]) -> None:
    made = artifact(kind.name)
    assert kind.fits(made, job(kind))
    assert not kind.fits(made, replace(job(kind), model="other"))
    assert 0 < made.sequences <= SEQUENCES
    info = kind.codec.info(kind.judged(made), 7)
    assert (info.model, info.kind, info.bytes) == ("m", kind.name, 7)


def test_its_file_is_read_again_and_is_no_other_kinds(kind: Kind[Any]) -> None:
    data = kind.codec.dump(replace(artifact(kind.name), version=3, created_ms=5))
    again = kind.codec.load(data)
    assert (again.version, again.created_ms) == (3, 5)
    for other in KINDS.values():
        if other is not kind:
            with pytest.raises(Damaged):
                other.codec.load(data)


@pytest.mark.parametrize("name", FORECAST_KINDS)
def test_forecasts_are_distributions(name: str) -> None:
    kind, made = KINDS[name], artifact(name)
    assert isinstance(kind, ForecastKind)
    assert kind.shape(made) == SHAPE
    previous = np.full((SHAPE.layers, SHAPE.experts), 1 / SHAPE.experts, np.float32)
    for given in (None, previous):
        found = kind.load(made).forecast("a", given)
        assert found.shape == (SHAPE.layers, SHAPE.experts)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-4)
