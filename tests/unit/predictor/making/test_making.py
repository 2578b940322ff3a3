"""When something is built, what is kept for it, and what a build is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.tensors import Damaged
from greenroom.predictor.kinds.config import BuildingConfig, DriftConfig, LearningConfig
from greenroom.predictor.kinds.eamc.kind import EamcKind
from greenroom.predictor.kinds.fitted_to_picks import trace_of_job
from greenroom.predictor.kinds.make import make_file
from greenroom.predictor.kinds.registry import FORECAST_KINDS, POLICY_KINDS, building_of
from greenroom.predictor.kinds.reuse.kind import ReuseKind
from greenroom.predictor.making.job import Job, dump_job, load_job
from greenroom.predictor.making.kind import Kind, TracedSequence, kept_of
from greenroom.predictor.making.pace import EveryMany, Retry
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.traces.reading import recall_of
from greenroom.predictor.traces.samples import Sample
from greenroom.replay.traces.activation_matrices import activation_matrices
from greenroom.replay.traces.routing_trace import RoutingTrace
from tests.unit.predictor.worlds import trace

SHAPE = Shape(2, 6)
CONFIG = BuildingConfig(capacity=3, max_sequences=100)
EAMC, REUSE = EamcKind(CONFIG), ReuseKind(CONFIG)
OPTIONS = {"capacity": 3, "most": 10, "after": 5, "seed": 0}


def sequence(seed: int, rows: int = 5, k: int = 2) -> Any:
    """[rows, layers, k], no expert twice in a row, and now and then none."""
    random = np.random.default_rng(seed)
    ranks = random.random((rows, SHAPE.layers, SHAPE.experts)).argsort(axis=2)[:, :, :k].astype(np.uint8)
    ranks[random.random(ranks.shape) < 0.1] = 255
    return ranks


# -- pace --------------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 9)),
    st.lists(st.sampled_from(["sequence", "made", "failed"]), max_size=60),
)
def test_every_many(after: int, again: int, made: bool, retry_after: int | None, happens: list[str]) -> None:
    """What comes while one is made counts for the next."""
    pace, count, needed = EveryMany(after, again, made, retry_after), 0, again if made else after
    for one in happens:
        if one == "sequence":
            assert not pace.note(0.1)
            count += 1
        elif pace.due:
            pace.begun()
            pace.note(0.1)
            if one == "made":
                pace.made()
                count, needed = 1, again
            else:
                assert pace.failed() == retry_after
                count, needed = (count + 1, needed) if retry_after is None else (1, retry_after)
        assert pace.due == (count >= needed)


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
    kept = EAMC.keep(picks, SHAPE.experts)
    assert kept.shape == (1, 2, 6)
    assert np.array_equal(kept.reshape(1, -1), activation_matrices(recorded))


def test_picks_are_kept_as_they_are_and_not_where_they_contradict_themselves() -> None:
    picks = sequence(3)
    kept = REUSE.keep(picks, SHAPE.experts)
    assert kept is not None
    assert np.array_equal(kept, picks)
    twice = picks.copy()
    twice[2, 1] = [4, 4]
    assert REUSE.keep(twice, SHAPE.experts) is None
    twice[2, 1] = [255, 255]  # none is none, however often
    assert REUSE.keep(twice, SHAPE.experts) is not None


def test_kinds_that_keep_the_same_share_it() -> None:
    learned = [kind(LearningConfig()) for kind in FORECAST_KINDS.values()]
    kept = kept_of([*learned, EAMC], TracedSequence(sequence(3), SHAPE.experts))
    assert set(kept) == {"counts by slot", "eamc"}
    assert kept_of((), TracedSequence(sequence(3), SHAPE.experts)) == {}


class OfTokens(ReuseKind):
    keeps_tokens = True


def test_tokens_are_kept_for_the_kinds_that_are_made_of_them_alone() -> None:
    kinds, picks = [OfTokens(CONFIG), REUSE], sequence(3)
    tokens = np.arange(len(picks), dtype=np.uint32)
    kept = kept_of(kinds, TracedSequence(picks, SHAPE.experts, "a", tokens, 2))
    plain, told = kept["picks"], kept["picks and tokens"]
    assert plain is not None
    assert told is not None
    assert (plain.task, plain.tokens, plain.prompt_rows) == ("a", None, 0)
    assert (told.task, told.prompt_rows) == ("a", 2)
    assert told.tokens is not None
    assert told.tokens.tolist() == tokens.tolist()
    assert told.nbytes == plain.nbytes + tokens.nbytes
    silent = kept_of(kinds, TracedSequence(picks, SHAPE.experts))
    assert silent["picks and tokens"] is None
    assert silent["picks"] is not None


def test_a_job_tells_tokens_and_prompts_apart_from_answers() -> None:
    kind = OfTokens(CONFIG)
    samples = [
        Sample("a", sequence(seed, rows=rows), np.arange(rows, dtype=np.uint32) + 10 * seed, rows - 1)
        for seed, rows in enumerate((3, 2))
    ]
    read = again(Job(kind.name, "m", SHAPE, samples, kind.options()))
    trace = trace_of_job(read)
    assert trace.token is not None
    assert trace.phase is not None
    assert trace.token.tolist() == [0, 1, 2, 10, 11]
    assert trace.phase.tolist() == [0, 0, 1, 0, 1]
    assert trace.seq_starts.tolist() == [0, 3, 5]
    bare = trace_of_job(again(job(kind=REUSE)))
    assert (bare.token, bare.phase) == (None, None)


@pytest.mark.parametrize(
    ("said", "known"),
    [({"prefetch_recall": 0.25}, 0.25), ({}, None), ({"other": 0.25}, None), ({"prefetch_recall": 1.5}, None),
     ({"prefetch_recall": float("nan")}, None)],
)  # fmt: skip
def test_a_recall_that_is_none_is_not_known(said: dict[str, float], known: float | None) -> None:
    assert recall_of(trace([[[1]]], 4, report=said)) == known


# -- a build -----------------------------------------------------------------------------------------------------------


def job(count: int = 5, kind: Kind[Any] = EAMC, rows: int = 3, **changed: Any) -> Job:
    told = [sequence(seed, rows=rows + seed % 4) for seed in range(count)]
    kept = [
        kept_of([kind], TracedSequence(one, SHAPE.experts, "ab"[seed % 2], np.arange(len(one), dtype=np.uint32)))
        for seed, one in enumerate(told)
    ]
    samples = [sample for one in kept if (sample := one[kind.keeps]) is not None]
    given = {"kind": kind.name, "model": "m", "shape": SHAPE, "samples": samples, "options": kind.options()}
    return Job(**{**given, **changed})


def again(one: Job) -> Job:
    """As the process is given it."""
    return load_job(dump_job(one))


def rows_of(samples: Sequence[Sample]) -> Any:
    return np.concatenate([one.array.reshape(1, -1) for one in samples]).astype(np.float32)


@pytest.mark.parametrize("kind", [*(kind(CONFIG) for kind in POLICY_KINDS.values()),
                                  *(kind(LearningConfig()) for kind in FORECAST_KINDS.values())])  # fmt: skip
def test_a_job_is_read_as_it_was_written(kind: Kind[Any]) -> None:
    written = job(kind=kind)
    read = again(written)
    assert (read.kind, read.model, read.shape, read.options) == (kind.name, "m", SHAPE, written.options)
    assert [one.task for one in read.samples] == list("ababa")
    for mine, its in zip(read.samples, written.samples, strict=True):
        assert np.array_equal(mine.array, its.array)
        assert (mine.tokens is None, mine.prompt_rows) == (its.tokens is None, its.prompt_rows)
    assert (read.earlier, read.recorded) == (b"", 0)
    other = again(job(kind=kind, earlier=b"file", recorded=2))
    assert (other.earlier, other.recorded) == (b"file", 2)


@pytest.mark.parametrize("damage", ["format", "shape", "lengths", "cut"])
def test_what_is_no_job_is_said_to_be_none(damage: str) -> None:
    data = dump_job(job())
    wrong = {
        "format": data.replace(b"greenroom-making", b"greenroom-makinG"),
        "shape": data.replace(b"[2, 6]", b"[2, x]"),
        "lengths": data.replace(b"[1, 1, 1, 1, 1]", b"[1, 1, 1, 1, a]"),
        "cut": data[:-1],
    }[damage]
    assert wrong != data
    with pytest.raises(Damaged):
        load_job(wrong)


BEFORE = EamcFile(model="m", experts_per_layer=(6, 6), sequences=9, matrices=np.eye(4, 12, dtype=np.float32) + 1)


def test_members_are_sequences_and_those_before_stand_for_what_is_not_here() -> None:
    made = EAMC.make(job(2))
    assert (made.model, made.sequences, len(made.matrices)) == ("m", 2, 2)
    assert made.experts_per_layer == (6, 6)
    assert {row.tobytes() for row in made.matrices} == {row.tobytes() for row in rows_of(job(2).samples)}

    earlier = BEFORE.dump()
    more = EAMC.make(again(job(2, earlier=earlier, options={**OPTIONS, "capacity": 9})))
    assert more.sequences == 6
    assert more.report["earlier"] == 4
    full = EAMC.make(job(2, earlier=earlier, options={**OPTIONS, "capacity": 9, "most": 3}))
    assert full.report["earlier"] == 1, "sequences that are here go first"


def test_after_a_shift_half_of_it_are_those_that_were_foreseen_badly() -> None:
    earlier, options = BEFORE.dump(), {**OPTIONS, "capacity": 20, "after": 3}
    shifted = job(10, recorded=3, earlier=earlier, options=options)
    for made in (EAMC.make(shifted), EAMC.make(again(shifted))):
        assert {row.tobytes() for row in made.matrices} == {row.tobytes() for row in rows_of(shifted.samples[-6:])}
        assert (made.sequences, made.report["earlier"]) == (6, 0)
    few = EAMC.make(job(4, recorded=3, earlier=earlier, options=options))
    assert (few.sequences, few.report["earlier"]) == (6, 2), "the members before, where others are not enough"
    not_yet = EAMC.make(job(10, recorded=2, options=options))
    assert not_yet.sequences == 10


def test_coefficients_are_those_that_recorded_traces_give() -> None:
    from greenroom.predictor.kinds.reuse.fit import FitOptions, fit

    one = job(60, REUSE, rows=20)
    made = ReuseFile.parse(make_file(dump_job(one)))
    picks = [sample.array for sample in one.samples]
    starts = np.concatenate(([0], np.cumsum([len(kept) for kept in picks])))
    expected = fit(RoutingTrace(np.concatenate(picks), starts, SHAPE.experts, model="m"), FitOptions(seed=0))
    assert made.model == "m"
    assert made.arrays.keys() == expected.arrays.keys()
    for name, array in made.arrays.items():
        assert np.array_equal(array, expected.arrays[name])


# -- settings ----------------------------------------------------------------------------------------------------------


def test_what_is_built_is_said_in_a_word() -> None:
    assert building_of("asked") == BuildingConfig()
    assert building_of("none").off
    assert building_of("reuse, eamc").kinds == ("reuse", "eamc")
    assert building_of("eamc,asked", capacity=7) == BuildingConfig(kinds=("eamc",), capacity=7)
    with pytest.raises(InvalidConfig, match=f"build: .*{', '.join(POLICY_KINDS)}"):
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


def test_what_fails_late_is_tried_again_late() -> None:
    retry = Retry(10, 600)
    assert retry.failed(0.0, took_s=600) == 5400
    assert retry.not_before == 5400
    assert retry.failed(6000.0, took_s=1) == 20, "the pause itself is as it was"
