from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.profiling.model.confinement import ConfiningPolicy, KeptExperts, LackingOne, RandomRouting

CATALOGUE = Catalogue("", experts_per_layer=[6, 9, 4], top_k=[2, 3, 1], expert_bytes=[1, 1, 1])
NAMES = {10: 0, 11: 1, 12: 2}
rows = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.integers(0, 500)), min_size=1, max_size=30)


def mask(routing: RandomRouting, drawn: list[tuple[int, int]], layer: int) -> Mask | None:
    sequences, positions = (np.array(column) for column in zip(*drawn, strict=True))
    return routing.mask(sequences, positions, layer)


@given(rows, st.integers(0, 2), st.integers(0, 99))
def test_each_row_has_k_experts_that_follow_from_its_place_alone(
    drawn: list[tuple[int, int]], layer: int, seed: int
) -> None:
    routing = RandomRouting(CATALOGUE, 3, seed=seed, names=NAMES)
    together = mask(routing, drawn, layer)
    assert together is not None
    assert (together.sum(axis=1) == CATALOGUE.top_k[layer]).all()
    for row, own in zip(drawn, together, strict=True):
        alone = mask(RandomRouting(CATALOGUE, layer + 1, seed=seed, names=NAMES), [row], layer)
        assert alone is not None
        assert (alone[0] == own).all()


def test_layers_behind_the_prefix_are_left_alone() -> None:
    routing = RandomRouting(CATALOGUE, 1, seed=0, names=NAMES)
    assert mask(routing, [(10, 0)], 0) is not None
    assert mask(routing, [(10, 0)], 1) is None
    assert mask(RandomRouting(CATALOGUE, 0, seed=0, names=NAMES), [(10, 0)], 0) is None


def test_draws_are_even_and_differ_between_seeds_rows_and_layers() -> None:
    many = [(10 + place % 3, place // 3) for place in range(6000)]
    one, other = (RandomRouting(CATALOGUE, 3, seed=seed, names=NAMES) for seed in (0, 1))
    first, second = mask(one, many, 1), mask(other, many, 1)
    assert first is not None
    assert second is not None
    assert np.abs(first.mean(axis=0) - 3 / 9).max() < 0.03
    assert (first == second).all(axis=1).mean() < 0.05
    assert len(np.unique(first[:1000], axis=0)) > 70, "of 84 sets of 3"


def test_a_sequence_lacks_one_expert_in_one_layer() -> None:
    lacking = LackingOne(CATALOGUE, 1, {7: 0, 9: 8})
    assert lacking.mask(np.array([7]), np.zeros(1, dtype=np.int64), 0) is None
    got = lacking.mask(np.array([9, 7, 9]), np.zeros(3, dtype=np.int64), 1)
    assert got is not None
    assert [np.flatnonzero(~row).tolist() for row in got] == [[8], [0], [8]]


def test_a_sequence_has_the_experts_that_were_kept_for_it() -> None:
    kept = {7: np.arange(19) % 2 == 0, 9: np.arange(19) % 2 == 1}
    got = KeptExperts(CATALOGUE, kept).mask(np.array([9, 7, 9]), np.zeros(3, dtype=np.int64), 1)
    assert got is not None
    assert got.tolist() == [kept[9][6:15].tolist(), kept[7][6:15].tolist(), kept[9][6:15].tolist()]


class Remembering:
    """A confinement that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def mask(self, sequences: np.ndarray, positions: np.ndarray, layer: int) -> Mask | None:
        self.asked.append((sequences.tolist(), positions.tolist()))
        return None if layer else np.ones((len(sequences), 6), dtype=np.bool_)


def test_the_policy_counts_positions_and_what_it_confined() -> None:
    policy = ConfiningPolicy(CATALOGUE)
    resident = np.ones(19, dtype=np.bool_)

    def step(*sequences: int) -> Step:
        return Step("", 1, np.array(sequences), np.zeros(len(sequences), dtype=np.uint8))

    first = step(7, 7, 8)
    policy.on_step_started(first)
    assert policy.row_mask(first, 0, resident) is None, "no row is confined before it is told to"
    remembering = Remembering()
    assert policy.confine(remembering) == 0
    for one in (first, step(8, 7, 7), step(9)):
        policy.on_step_started(one)
        policy.row_mask(one, 0, resident)
        policy.row_mask(one, 1, resident)
    assert remembering.asked[::2] == [([7, 7, 8], [0, 1, 0]), ([8, 7, 7], [1, 2, 3]), ([9], [0])]
    assert policy.confine(None) == 3, "layers at which there was a mask"
    assert policy.confine(None) == 0
