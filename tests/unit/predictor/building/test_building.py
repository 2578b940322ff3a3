"""When something is built, what is kept for it, and what a build is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.tensors import Damaged
from greenroom.predictor.building.builder import keep, recall_of
from greenroom.predictor.building.config import BUILT_KINDS, EAMC, REUSE, BuildingConfig, building_of
from greenroom.predictor.building.job import BUILDERS, build_eamc
from greenroom.predictor.building.jobs import Job, dump_job, load_job
from greenroom.predictor.building.kinds import KINDS
from greenroom.predictor.building.pace import EveryMany, Retry
from greenroom.predictor.counts import Shape
from greenroom.predictor.eamc.drift import DriftConfig
from greenroom.replay.activations import activation_matrices
from greenroom.replay.trace import RoutingTrace
from tests.unit.predictor.worlds import trace

SHAPE = Shape(2, 6)
OPTIONS = {"capacity": 3, "most": 10, "after": 5, "seed": 0}


def sequence(seed: int, rows: int = 5, k: int = 2) -> Any:
    """[rows, layers, k], no expert twice in a row, and now and then none."""
    random = np.random.default_rng(seed)
    ranks = random.random((rows, SHAPE.layers, SHAPE.experts)).argsort(axis=2)[:, :, :k].astype(np.uint8)
    ranks[random.random(ranks.shape) < 0.1] = 255
    return ranks


# -- pace --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.lists(st.booleans(), max_size=60))
def test_every_many(after: int, again: int, made: bool, builds: list[bool]) -> None:
    pace, count = EveryMany(after, again, made), 0
    for built in builds:
        assert not pace.note(0.1)
        count += 1
        assert pace.due == (count >= (again if made else after))
        if pace.due and built:
            pace.built()
            made, count = True, 0
            assert not pace.due


@given(st.lists(st.booleans(), max_size=30), st.floats(0.1, 10), st.floats(10, 100))
def test_retries_come_less_and_less_often(fails: list[bool], first: float, longest: float) -> None:
    retry, streak, now = Retry(first, longest), 0, 0.0
    for failed in fails:
        now += 1000.0
        streak = streak + 1 if failed else 0
        if failed:
            pause = retry.failed(now)
            assert pause == pytest.approx(min(longest, first * 2 ** (streak - 1)))
            assert retry.not_before == now + pause
        else:
            retry.succeeded()
            assert retry.not_before <= now


# -- what is kept ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 3))
def test_a_matrix_is_that_of_replayed_traces(seed: int, rows: int, k: int) -> None:
    picks = sequence(seed, rows, k)
    recorded = RoutingTrace(picks, np.array([0, rows]), SHAPE.experts)
    kept = keep((EAMC,), picks, SHAPE.experts)[EAMC]
    assert kept is not None
    assert kept.shape == (1, 2, 6)
    assert np.array_equal(kept.reshape(1, -1), activation_matrices(recorded))


def test_picks_are_kept_as_they_are_and_not_where_they_contradict_themselves() -> None:
    picks = sequence(3)
    kept = keep((REUSE,), picks, SHAPE.experts)[REUSE]
    assert kept is not None
    assert np.array_equal(kept, picks)
    twice = picks.copy()
    twice[2, 1] = [4, 4]
    assert keep((REUSE,), twice, SHAPE.experts) == {REUSE: None}
    twice[2, 1] = [255, 255]  # none is none, however often
    assert keep((REUSE,), twice, SHAPE.experts)[REUSE] is not None
    assert keep((), picks, SHAPE.experts) == {}


@pytest.mark.parametrize(
    ("said", "known"),
    [({"prefetch_recall": 0.25}, 0.25), ({}, None), ({"other": 0.25}, None), ({"prefetch_recall": 1.5}, None),
     ({"prefetch_recall": float("nan")}, None)],
)  # fmt: skip
def test_a_recall_that_is_none_is_not_known(said: dict[str, float], known: float | None) -> None:
    assert recall_of(trace([[[1]]], 4, report=said)) == known


# -- a build -----------------------------------------------------------------------------------------------------------


def job(count: int = 5, kind: str = EAMC, rows: int = 3, **changed: Any) -> Job:
    kept = [keep((kind,), sequence(seed, rows=rows + seed % 4), SHAPE.experts)[kind] for seed in range(count)]
    options = KINDS[kind].options(BuildingConfig(capacity=3, max_sequences=100))
    given = {"kind": kind, "model": "m", "shape": SHAPE, "kept": kept, "options": options}
    return Job(**{**given, **changed})


@pytest.mark.parametrize("kind", BUILT_KINDS)
def test_a_job_is_read_as_it_was_written(kind: str) -> None:
    written = job(kind=kind)
    read = load_job(dump_job(written))
    assert (read.kind, read.model, read.shape, read.options) == (kind, "m", SHAPE, written.options)
    assert len(read.kept) == len(written.kept)
    assert all(np.array_equal(one, other) for one, other in zip(read.kept, written.kept, strict=True))
    assert read.earlier is None


@pytest.mark.parametrize("damage", ["format", "kind", "shape", "lengths", "cut"])
def test_what_is_no_job_is_said_to_be_none(damage: str) -> None:
    data = dump_job(job())
    wrong = {
        "format": data.replace(b"greenroom-build", b"greenroom-built"),
        "kind": data.replace(b'"kind": "eamc"', b'"kind": "what"'),
        "shape": data.replace(b"[2, 6]", b"[2, x]"),
        "lengths": data.replace(b"[1, 1, 1, 1, 1]", b"[1, 1, 1, 1, a]"),
        "cut": data[:-1],
    }[damage]
    assert wrong != data
    with pytest.raises(Damaged):
        load_job(wrong)


def test_members_are_sequences_and_those_before_stand_for_what_is_not_here() -> None:
    built = build_eamc(job(2))
    assert (built.model, built.sequences, len(built.matrices)) == ("m", 2, 2)
    assert built.experts_per_layer == (6, 6)
    own = np.concatenate([one.reshape(1, -1) for one in job(2).kept])
    assert {row.tobytes() for row in built.matrices} == {row.tobytes() for row in own.astype(np.float32)}

    before = EamcFile(model="m", experts_per_layer=(6, 6), sequences=9, matrices=np.eye(4, 12, dtype=np.float32) + 1)
    again = build_eamc(load_job(dump_job(job(2, earlier=before, options={**OPTIONS, "capacity": 9}))))
    assert again.sequences == 6
    assert again.report["earlier"] == 4
    full = build_eamc(job(2, earlier=before, options={**OPTIONS, "capacity": 9, "most": 3}))
    assert full.report["earlier"] == 1, "sequences that are here go first"


def test_after_a_shift_half_of_it_are_those_that_were_foreseen_badly() -> None:
    before = EamcFile(model="m", experts_per_layer=(6, 6), sequences=9, matrices=np.eye(4, 12, dtype=np.float32) + 1)
    options = {**OPTIONS, "capacity": 20, "after": 3}
    shifted = job(10, recorded=3, earlier=before, options=options)
    newest = np.concatenate([one.reshape(1, -1) for one in shifted.kept[-6:]]).astype(np.float32)
    for built in (build_eamc(shifted), build_eamc(load_job(dump_job(shifted)))):
        assert {row.tobytes() for row in built.matrices} == {row.tobytes() for row in newest}
        assert (built.sequences, built.report["earlier"]) == (6, 0)
    few = build_eamc(job(4, recorded=3, earlier=before, options=options))
    assert (few.sequences, few.report["earlier"]) == (6, 2), "the members before, where others are not enough"
    not_yet = build_eamc(job(10, recorded=2, options=options))
    assert not_yet.sequences == 10


def test_coefficients_are_those_that_recorded_traces_give() -> None:
    from greenroom.predictor.reuse.fit import FitOptions, fit

    one = job(60, REUSE, rows=20)
    built = BUILDERS[REUSE](load_job(dump_job(one)))
    rows = np.concatenate(one.kept)
    starts = np.concatenate(([0], np.cumsum([len(kept) for kept in one.kept])))
    expected = fit(RoutingTrace(rows, starts, SHAPE.experts, model="m"), FitOptions(seed=0))
    assert built.model == "m"
    assert built.arrays.keys() == expected.arrays.keys()
    for name, array in built.arrays.items():
        assert np.array_equal(array, expected.arrays[name])


# -- settings ----------------------------------------------------------------------------------------------------------


def test_what_is_built_is_said_in_a_word() -> None:
    assert building_of("asked") == BuildingConfig()
    assert building_of("none").off
    assert building_of("reuse, eamc").kinds == (REUSE, EAMC)
    assert building_of("eamc,asked", capacity=7) == BuildingConfig(kinds=(EAMC,), capacity=7)
    with pytest.raises(InvalidConfig, match=r"build: .*eamc, reuse"):
        building_of("none,eamc")
    with pytest.raises(UnknownName, match="kind to build"):
        building_of("emoe-a")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"capacity": 0}, "build_capacity"),
        ({"reuse_after": 0}, "build_reuse_after"),
        ({"max_bytes": 0}, "build_max_bytes"),
        ({"max_sequences": 99}, "build_max_sequences"),
        ({"timeout_s": 0.0}, "build_timeout"),
        ({"retry_s": float("inf")}, "build_retry"),
    ],
)
def test_a_bad_value_is_named(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{field}: ") as caught:
        BuildingConfig(**changed)
    assert caught.value.field == field


def test_the_memory_holds_what_a_rebuild_is_made_of() -> None:
    with pytest.raises(InvalidConfig, match="eamc_after"):
        BuildingConfig(max_sequences=200, drift=DriftConfig(after=201))
