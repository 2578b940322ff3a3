"""Table 3: what is counted, what misses are foreseen, and the stage on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.duoserve.table3 import QUICK, draw, stage, table
from benchmarks.duoserve.table3.hidden import by_policy
from benchmarks.duoserve.table3.misses import Foresight, absent_experts, at_precision
from benchmarks.harness.inputs.bundled_rows import RecordedRows
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.split_routing import World, world_of
from benchmarks.harness.reporting.accuracy import Accuracy, Recalls, accuracy, named
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.errors import InvalidConfig
from greenroom.moe.routing.router_look_ahead import LookAhead
from greenroom.policies.base.events import Phase
from greenroom.policies.registry import create_policy
from greenroom.predictor.kinds.expert_mlp.shares import many_hot
from greenroom.predictor.kinds.path import fit as path_fit
from greenroom.predictor.kinds.reuse import fit as reuse_fit
from greenroom.replay import RoutingTrace
from greenroom.replay.hit_rates import replay

LAYERS, EXPERTS, HIDDEN = 4, 8, 12


class Routers:
    """Run ahead they see the first expert that a token is about to pick, and not which follows."""

    def weights(self, layer: int, ahead: int, rows: torch.Tensor) -> np.ndarray:
        turned = np.roll(rows[:, :EXPERTS].float().numpy(), ahead - layer, axis=1)
        return np.asarray(0.9 * turned + 0.05, dtype=np.float32)


def with_rows(trace: RoutingTrace, seed: int = 0) -> RecordedRows:
    """Rows that are ones at the picks of their layer, among small noise."""
    noise = np.random.default_rng(seed).normal(0, 0.1, size=(trace.tokens, LAYERS, HIDDEN))
    first = trace.experts[..., 0].astype(np.int64)
    noise[np.arange(trace.tokens)[:, None], np.arange(LAYERS), first] = 1
    return RecordedRows(trace, noise.astype(np.float16), cast(LookAhead, Routers()))


def drifting(sequences: int, tokens: int = 30, *, seed: int = 0, noise: float = 0.2) -> RoutingTrace:
    """Top-2: a token that picks e and e + 1 in a layer mostly picks e + 1 and e + 2 in the next one."""
    random = np.random.default_rng(seed)
    first = random.integers(EXPERTS, size=sequences * tokens)
    picks = (first[:, None] + np.arange(LAYERS)) % EXPERTS
    drawn = random.random(picks.shape) < noise
    picks = np.where(drawn, random.integers(EXPERTS, size=picks.shape), picks)
    both = np.stack([picks, (picks + 1) % EXPERTS], axis=2)
    return RoutingTrace(both.astype(np.uint8), np.arange(sequences + 1) * tokens, EXPERTS, model="drifting")


def test_a_pick_is_named_if_it_is_among_the_likeliest_as_many_as_were_picked() -> None:
    scores = np.array([[0.4, 0.3, 0.2, 0.1]] * 4)
    picks = np.array([[1, 0], [0, 3], [3, 2], [0, 255]])
    found = named(scores, picks)
    assert found.tolist() == [1, 0.5, 0, 1]
    assert accuracy([found[:2], found[2:]]) == Accuracy(exact=0.5, half=0.75, one=0.75, recall=0.625)


def test_the_interval_of_a_recall_is_that_of_sequences_drawn_anew() -> None:
    alike = Recalls.of([np.array([0.0, 0, 1, 1]), np.array([0.5, 0.5, 1, 1])], np.array([3, 3, 8, 8]))
    assert alike.values.tolist() == [0.25, 0.25, 1, 1]
    assert alike.within() == (0.25, 1), "two sequences: either alone may be drawn"
    many = Recalls(np.random.default_rng(0).random(4000), np.arange(4000))
    low, high = many.within()
    assert (low, high) == pytest.approx(
        (0.5 - 1.96 * 12**-0.5 / 4000**0.5, 0.5 + 1.96 * 12**-0.5 / 4000**0.5), abs=0.01
    )
    gain = many.less(Recalls(many.values - 0.25, many.sequences))
    assert gain.within() == pytest.approx((0.25, 0.25))
    none = Recalls.of([np.array([np.nan, 1.0])], np.array([0, 1]))
    assert (none.values.tolist(), none.sequences.tolist()) == ([1], [1])


def test_the_policy_is_answered_on_the_row_that_decodes_and_names_what_it_was_told() -> None:
    """Of an answer that knows the picks, between prompts of several rows, it makes the picks."""
    phase = np.tile(np.array([Phase.PREFILL] * 6 + [Phase.DECODE] * 24, np.uint8), 40)
    world = world_of("tiny", replace(drifting(40), phase=phase), 0.2)
    reuse = reuse_fit.fit(world.fitted, QUICK.reuse)
    path = path_fit.fit(world.fitted, reuse, QUICK.path)
    picks = world.measured.experts
    knowing = {
        (layer, ahead): (0.98 * many_hot(picks[:, layer], EXPERTS) + 0.01).astype(np.float32)
        for layer in range(1, LAYERS)
        for ahead in range(1, min(layer, 2) + 1)
    }
    told = by_policy(world, reuse, path, knowing)
    assert told.keys() == knowing.keys()
    for (layer, _), scores in told.items():
        assert named(scores[world.rows], picks[world.rows, layer]).mean() > 0.95
        assert not scores[phase[-len(scores) :] == Phase.PREFILL].any(), "prompts' rows are not asked about"
    blind = by_policy(world, reuse, path, {key: np.full_like(each, 0.5) for key, each in knowing.items()})
    by_path = [named(scores[world.rows], picks[world.rows, layer]).mean() for (layer, _), scores in blind.items()]
    assert 0.5 < np.mean(by_path) < 0.95, "a router that says nothing leaves the path and the sequence"


def test_rows_without_a_pick_do_not_count() -> None:
    scores, picks = np.array([[0.4, 0.3], [0.4, 0.3]]), np.array([[255], [0]])
    assert accuracy([named(scores, picks)]).recall == 1


def test_fetching_goes_on_as_long_as_enough_of_it_is_used() -> None:
    scores = [np.array([0.9, 0.5]), np.array([0.8, 0.7, 0.1])]
    hits = [np.array([True, True]), np.array([True, False, True])]
    assert at_precision(scores, hits, 1.0) == 2
    assert at_precision(scores, hits, 0.75) == 4
    assert at_precision(scores, [~one for one in hits], 1.0) == 0
    assert at_precision([np.zeros(0)], [np.zeros(0, dtype=np.bool_)], 0.8) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30), st.sampled_from([0.3, 0.8, 1.0]))
def test_no_bound_on_the_scores_does_better(drawn: list[tuple[int, bool]], precision: float) -> None:
    scores, hits = np.array([one for one, _ in drawn], float), np.array([hit for _, hit in drawn], np.bool_)
    by_bound = [(int(hits[scores >= bound].sum()), int((scores >= bound).sum())) for bound in range(6)]
    best = max((right for right, all_ in by_bound if right >= precision * all_), default=0)
    assert at_precision([scores], [hits], precision) == best


def test_what_is_absent_is_what_the_policy_misses() -> None:
    trace = drifting(4)
    absent = absent_experts(trace, 12)
    catalogue = trace.catalogue()
    picked = np.concatenate([many_hot(trace.experts[:, layer], EXPERTS) for layer in range(LAYERS)], axis=1)
    result = replay(create_policy("next-use", catalogue=catalogue), trace.steps(concurrent=1), 12)
    assert int((absent & (picked > 0)).sum()) == result.misses


class Knows:
    """Scores that are the picks themselves."""

    def __init__(self, world: World) -> None:
        self._world = world

    def scores(self, layer: int) -> np.ndarray:
        return many_hot(self._world.measured.experts[self._world.rows, layer], EXPERTS)


def test_who_knows_the_picks_foresees_all_misses_but_those_of_the_first_layer() -> None:
    world = world_of("tiny", drifting(10), 0.2)
    absent = absent_experts(world.measured, 12)
    foresight = Foresight(world, absent)
    for layer in range(1, LAYERS):
        foresight.add("knows", layer, Knows(world).scores(layer))
    found = foresight.found()["knows"]
    picked = np.concatenate([Knows(world).scores(layer) for layer in range(LAYERS)], axis=1) > 0
    missed = picked & absent[world.rows]
    assert found.misses == missed.sum()
    assert found.share == pytest.approx(missed[:, EXPERTS:].sum() / missed.sum())


def test_sequences_are_measured_that_nothing_was_fitted_to_and_of_them_what_decodes() -> None:
    trace = drifting(10, 5)
    phase = np.tile(np.array([Phase.PREFILL, Phase.PREFILL, *[Phase.DECODE] * 3], np.uint8), 10)
    world = world_of("tiny", replace(trace, phase=phase), 0.2)
    assert (world.fitted.sequences, world.measured.sequences) == (8, 2)
    assert world.rows.tolist() == [2, 3, 4, 7, 8, 9]
    assert world_of("tiny", trace, 0.2).rows.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert world.digest != world_of("tiny", drifting(10, 5, seed=1), 0.2).digest


@pytest.mark.parametrize("ahead", [1, 2])
def test_nobody_is_told_of_picks_that_are_not_routed_yet(ahead: int, tmp_path: Path) -> None:
    world = world_of("tiny", drifting(40), 0.2)
    layer = 2
    later = world.measured.experts.copy()
    later[:, layer - ahead + 1 :] = (later[:, layer - ahead + 1 :] + 3) % EXPERTS
    other = replace(world, measured=replace(world.measured, experts=later))
    kept = Kept(tmp_path)
    known = stage.predictors(world, QUICK, kept)[0][ahead]
    for name, predictor in stage.predictors(other, QUICK, kept)[0][ahead].items():
        if name not in (stage.SEQUENCE, stage.PATH_AND_SEQUENCE):  # these know the same layers of tokens before
            np.testing.assert_allclose(predictor.scores(layer), known[name].scores(layer), rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("trace", [drifting(1), drifting(5, 1)])
def test_too_little_to_measure_on_is_said(trace: RoutingTrace) -> None:
    with pytest.raises(InvalidConfig, match="trace"):
        world_of("tiny", trace, 0.2)


def test_what_is_fitted_is_made_once_and_again_where_something_else_was_asked_for_or_the_file_is_broken(
    tmp_path: Path,
) -> None:
    made: list[int] = []

    def make() -> EamcFile:
        made.append(1)
        return EamcFile(model="", experts_per_layer=(2,), sequences=1, matrices=np.ones((1, 2), np.float32))

    def get(digest: str = "a", options: object = 1, makers: tuple[ModuleType, ...] = (stage,)) -> EamcFile:
        return Kept(tmp_path).get(EamcFile, digest, options, makers, make)

    assert get().matrices.tolist() == get().matrices.tolist() == [[1, 1]]
    assert len(made) == 1
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"broken")
    get()
    get()
    assert len(made) == 2
    for changed in ({"digest": "b"}, {"options": 2}, {"makers": (pytest,)}):
        before = len(made)
        get(**changed)
        assert len(made) == before + 1


def test_the_stage_has_a_row_for_each_predictor_and_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "record_bundled_rows", lambda _: with_rows(drifting(40)))
    monkeypatch.setattr(Kept, "usual", lambda: Kept(tmp_path / "kept"))
    drifting(50, seed=3).save(tmp_path / "recorded.npz")
    scale = replace(QUICK, trace=tmp_path / "recorded.npz", sequences=45)
    found = stage.run(scale)

    assert [own["model"] for own in found["models"]] == ["bundled", "recorded"]
    recorded = found["models"][1]
    names = ["popularity", "affinity", *stage.MLPS, stage.SEQUENCE, stage.PATH, stage.PATH_AND_SEQUENCE]
    assert [(row["predictor"], row["ahead"]) for row in recorded["rows"]] == [
        (name, ahead) for ahead in (1, 2) for name in names
    ]
    bundled = found["models"][0]
    seeing = [stage.ROUTER, *stage.MAPS, stage.ALL, stage.ALL_RESIDUAL]
    assert [(row["predictor"], row["ahead"]) for row in bundled["rows"]] == [
        *((name, ahead) for ahead in (1, 2) for name in (*names, *seeing)),
        *((name, 3) for name in seeing[:-2]),
    ]
    recalls = {(row["predictor"], row["ahead"]): row["recall"] for row in bundled["rows"]}
    for row in bundled["rows"]:
        assert row["recall_low"] <= row["recall"] <= row["recall_high"]
    for ahead in (1, 2):
        assert recalls[stage.ROUTER, ahead] < 0.6, "one of two picks"
        assert recalls[stage.RESIDUAL, ahead] > recalls[stage.ROUTER, ahead] + 0.1
        assert recalls[stage.ALL_RESIDUAL, ahead] > recalls[stage.ROUTER, ahead] + 0.1
    gain = 100 * (recalls[stage.ALL, 1] - recalls[stage.ROUTER, 1])
    assert found["router_gain_points"] == bundled["gains"]["router_gain_points"] == pytest.approx(gain)
    assert found["router_gain_points_2_low"] <= found["router_gain_points_2"] <= found["router_gain_points_2_high"]
    assert set(bundled["cost_us"]) == {stage.ROUTER, *stage.MAPS}
    recalls = {(row["predictor"], row["ahead"]): row["recall"] for row in recorded["rows"]}
    for ahead in (1, 2):
        assert recalls["affinity", ahead] > recalls["popularity", ahead] + 0.2
    assert found["trace_recall"] == recalls[stage.PATH_AND_SEQUENCE, 1]
    assert 0 <= found["misses_foreseen"] <= 1
    json.dumps(found)
    assert "ExpertMLP, as printed" in table(found)
    draw(found, tmp_path / "table3.png")
    assert (tmp_path / "table3.png").stat().st_size > 0

    without = stage.run(replace(scale, trace=None))
    (again,) = without["models"]
    assert again | {"cost_us": 0} == bundled | {"cost_us": 0}, "what is kept gives the same figures"
    assert "trace_recall" not in without
