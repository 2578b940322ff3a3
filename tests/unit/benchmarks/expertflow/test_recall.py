"""The stage `recall`: which experts are named, and what is counted of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.expertflow.recall.batches import ALL_ACTIVE, batches, union_accuracy
from benchmarks.expertflow.recall.foretellers import by_layer_before, by_paths, by_token, named, picked
from benchmarks.expertflow.recall.stage import recall_of
from benchmarks.harness.inputs.split_routing import World
from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.events import Phase
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.replay import RoutingTrace
from greenroom.replay.traces.token_numbers import tokens_of
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


class Asked(TokenPaths):
    """Writes down what it is asked; foretells the position."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._size = catalogue.size
        self.prompts: dict[int, list[int]] = {}
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.told: dict[int, list[int]] = {}

    def begin(self, sequence: int, prompt: Ids) -> None:
        self.prompts[sequence] = prompt.tolist()

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        for one in zip(sequences.tolist(), positions.tolist(), tokens.tolist(), strict=True):
            self.rows.setdefault(one[0], []).append(one[1:])
        return np.repeat(positions[:, None], self._size, axis=1).astype(np.float32)

    def picked(self, sequences: Ids, positions: Ids, picks: NDArray[np.integer]) -> None:
        for sequence, position in zip(sequences.tolist(), positions.tolist(), strict=True):
            self.told.setdefault(sequence, []).append(position)

    def end(self, sequence: int) -> None:
        raise AssertionError("nothing ends while it is asked")


@pytest.mark.parametrize("prompts", ["rows of the trace", "beside it"])
def test_whatever_foretells_is_asked_in_the_order_of_each_sequence(prompts: str) -> None:
    world = world_of_two()
    catalogue, tokens = world.measured.catalogue(), tokens_of(world.measured)
    if prompts == "beside it":
        world = replace(world, prompts=[np.array([n, n + 1]) for n in range(4)])
        expected = {0: [2, 3], 1: [3, 4]}
    else:
        phase = np.where(np.arange(60) % 30 < 5, Phase.PREFILL, Phase.DECODE)
        world = replace(world, measured=replace(world.measured, phase=phase))
        expected = {0: tokens[:5].tolist(), 1: tokens[30:35].tolist()}
    asked = Asked(catalogue)
    past = np.zeros((60, catalogue.size), dtype=np.float32)
    found = by_paths(world, catalogue, "asked", lambda known: asked, past)
    assert asked.prompts == expected
    for sequence, begin in enumerate((0, 30)):
        assert asked.rows[sequence] == list(enumerate(tokens[begin : begin + 30].tolist()))
        assert asked.told[sequence] == list(range(30))
    assert found[:, 0].tolist() == (world.rows % 30).tolist()


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
