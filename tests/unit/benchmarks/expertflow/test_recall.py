"""The stage `recall`: which experts are named, and what is counted of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.expertflow.recall.batches import ALL_ACTIVE, batches, union_accuracy
from benchmarks.expertflow.recall.foretellers import by_layer_before, by_token, named, picked
from benchmarks.expertflow.recall.stage import recall_of
from benchmarks.harness.inputs.split_routing import World
from greenroom.replay import RoutingTrace
from tests.unit.replay.traces import trace_of


def world_of_two(seed: int = 0) -> World:
    fitted, measured = (trace_of(30, 30, layers=2, k=1, seed=seed + n) for n in range(2))
    tokens = [one.experts[:, 0, 0].astype(np.int64) for one in (fitted, measured)]
    fitted, measured = (replace(one, token=own) for one, own in zip((fitted, measured), tokens, strict=True))
    return World("small", fitted, measured, np.flatnonzero(np.arange(60) % 30))


def test_as_many_are_named_as_a_row_picks_in_each_layer() -> None:
    catalogue = trace_of(1, layers=3, k=2).catalogue()
    scores = np.random.default_rng(0).random((5, catalogue.size)).astype(np.float32)
    found = named(catalogue, scores)
    for span in catalogue.spans:
        assert (found[:, span].sum(axis=1) == 2).all()
        assert (np.where(found[:, span], scores[:, span], 2).min(axis=1)
                >= np.where(found[:, span], -1, scores[:, span]).max(axis=1)).all()  # fmt: skip


def test_what_follows_from_the_token_is_named_by_its_table() -> None:
    """In these traces the token says the pick of the first layer, and nothing of the second."""
    world = world_of_two()
    catalogue = world.measured.catalogue()
    popularity = picked(catalogue, world.fitted).mean(axis=0).astype(np.float32)
    mask = named(catalogue, by_token(world, catalogue, popularity))
    truth = picked(catalogue, world.measured)[world.rows]
    first = catalogue.spans[0]
    assert (mask[:, first] == truth[:, first]).all()
    assert 0.5 <= recall_of(mask, truth).mean() < 1


def test_the_layer_before_names_what_follows_it() -> None:
    world = world_of_two()

    def followed(trace: RoutingTrace) -> RoutingTrace:
        return replace(trace, experts=np.concatenate((trace.experts[:, :1], (trace.experts[:, :1] + 1) % 4), axis=1))

    world = World("small", followed(world.fitted), followed(world.measured), world.rows)
    catalogue = world.measured.catalogue()
    popularity = picked(catalogue, world.fitted).mean(axis=0).astype(np.float32)
    mask = named(catalogue, by_layer_before(world, catalogue, popularity))
    second = catalogue.spans[1]
    assert (mask[:, second] == picked(catalogue, world.measured)[world.rows][:, second]).all()


def test_a_batch_is_held_against_the_union_of_its_rows() -> None:
    catalogue = trace_of(1, layers=1, k=1).catalogue()
    truth = np.eye(4, dtype=np.bool_)[[0, 1]]
    mask = np.eye(4, dtype=np.bool_)[[0, 2]]
    one, every = union_accuracy(catalogue, truth, {"one": mask}, [np.array([0, 1])])
    assert one["jaccard"] == pytest.approx(1 / 3)
    assert one["recall"] == one["precision"] == 0.5
    assert every == {"predictor": ALL_ACTIVE, "jaccard": 0.5, "recall": 1.0, "precision": 0.5}


def test_a_batch_has_rows_of_different_sequences() -> None:
    world = world_of_two()
    owner = np.searchsorted(world.measured.seq_starts, world.rows, side="right")
    for rows in batches(world, 2, 20):
        assert len(set(owner[rows].tolist())) == 2
    assert all(len(rows) == 2 for rows in batches(world, 8, 3)), "there are two sequences"
