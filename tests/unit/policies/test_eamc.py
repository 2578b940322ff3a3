from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.activation_matrix import ActivationMatrices, tokens_by_expert
from greenroom.policies.base.events import Artifact, LayerRouting, Phase, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.moe_infinity.eamc import (
    EAMC,
    MATRICES,
    NEVER,
    Eamc,
    NearestMembers,
    distance,
    layer_shares,
    unit_layers,
)
from tests.unit.policies.bench import keys_of

TWO = Catalogue.uniform("pool", layers=2, experts=3, top_k=1)
UNEVEN = Catalogue("pool", experts_per_layer=[3, 5, 1], top_k=[1, 2, 1], expert_bytes=[1, 1, 1])
COUNTS = arrays(np.float32, (4, UNEVEN.size), elements=st.integers(0, 40).map(float))


def routed(catalogue: Catalogue, layer: int, picks: list[list[int]], sequences: list[int]) -> LayerRouting:
    step = Step("pool", 0, keys_of(sequences), np.full(len(sequences), Phase.DECODE, dtype=np.uint8))
    return LayerRouting.from_picks(catalogue, step, layer, np.array(picks))


def by_the_book(one: np.ndarray, other: np.ndarray, catalogue: Catalogue) -> float:
    """Eq. 1, written out."""
    total = 0.0
    for span in catalogue.spans:
        a, b = one[span].astype(float), other[span].astype(float)
        lengths = np.linalg.norm(a) * np.linalg.norm(b)
        total += a @ b / lengths if lengths else 0.0
    return 1 - total / catalogue.layers


@given(COUNTS)
def test_the_distance_is_one_less_the_mean_cosine_of_the_layers(counts: np.ndarray) -> None:
    for one in counts:
        for other in counts:
            assert distance(UNEVEN, one, other) == pytest.approx(by_the_book(one, other, UNEVEN), abs=1e-5)


def test_the_distance_does_not_depend_on_how_many_tokens_there_were() -> None:
    one = np.array([4, 2, 0, 1, 5, 0])
    assert distance(TWO, one, 7 * one) == pytest.approx(0, abs=1e-6)
    assert distance(TWO, one, np.roll(one, 1)) > 0.1
    assert distance(TWO, np.zeros(6), one) == 1.0


@given(COUNTS)
def test_ranks_below_n_are_a_members_n_likeliest_of_a_layer(members: np.ndarray) -> None:
    eamc = Eamc(UNEVEN, members)
    for shares, ranks in zip(eamc.ratios, eamc.ranks, strict=True):
        for span in UNEVEN.spans:
            own, used = ranks[span], shares[span] > 0
            assert sorted(own[used].tolist()) == list(range(used.sum()))
            assert (own[~used] == NEVER).all()
            for n in range(int(used.sum())):
                assert shares[span][own < n].min(initial=1) >= shares[span][own >= n].max(initial=0)


def test_layers_are_divided_by_their_own_sums_and_lengths() -> None:
    counts = np.array([[3, 1, 0, 0, 0, 0]], dtype=np.float32)
    assert layer_shares(TWO, counts).tolist() == [[0.75, 0.25, 0, 0, 0, 0]]
    assert np.linalg.norm(unit_layers(TWO, counts)) == pytest.approx(1)
    huge = np.full((1, 6), 1e30, dtype=np.float32)
    assert unit_layers(TWO, huge)[0].tolist() == pytest.approx([3**-0.5] * 6)


@given(COUNTS, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**16)), min_size=1, max_size=25), st.booleans())
def test_what_is_found_layer_by_layer_is_what_a_search_through_all_of_them_finds(
    members: np.ndarray, history: list[tuple[int, int]], swapped: bool
) -> None:
    """Three sequences whose matrices grow in any order, or have when the collection comes; the nearest has the least
    distance by Eq. 1.
    """
    nearest = NearestMembers(Eamc(UNEVEN, members), room=2)
    matrices = ActivationMatrices(UNEVEN)
    for layer, seed in history:
        rng = np.random.default_rng(seed)
        sequences = rng.choice(3, size=rng.integers(1, 4), replace=False).tolist()
        experts = int(UNEVEN.experts_per_layer[layer])
        owners = sorted(rng.choice(sequences, size=rng.integers(1, 9)).tolist())
        picks = [rng.choice(experts + 1, size=min(2, experts), replace=False).tolist() for _ in owners]  # some are none
        routing = routed(UNEVEN, layer, picks, owners)
        rows, span = matrices.rows_of(routing.step.sequences), UNEVEN.spans[layer]
        nearest.grow(matrices.room)
        matrices.add(routing, rows)
        if len(owners) == 1 and len(routing.experts):
            row = int(rows[0])
            counts = matrices.counts[row, routing.experts]
            nearest.add_token(layer, row, routing.experts - span.start, counts)
            continue
        added = tokens_by_expert(routing)
        nearest.add(layer, rows, added, matrices.counts[rows[added.owners], span.start + added.experts])
    if swapped:
        nearest = NearestMembers(nearest.eamc, matrices.room)
        rows = np.array(list(matrices.rows.values()))
        for layer, span in enumerate(UNEVEN.spans):
            nearest.update(layer, rows, matrices.counts[rows, span])
    for row in matrices.rows.values():
        distances = [by_the_book(matrices.counts[row], member, UNEVEN) for member in members]
        assert distances[nearest.nearest[row]] == pytest.approx(min(distances), abs=1e-5)


def test_a_row_that_is_cleared_starts_anew() -> None:
    members = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1]])
    nearest = NearestMembers(Eamc(TWO, members), room=1)
    row = np.array([0])
    nearest.update(0, row, np.array([[0, 0, 1]], dtype=np.float32))
    assert nearest.nearest[0] == 1
    nearest.clear(0)
    assert nearest.nearest[0] == 0
    nearest.update(0, row, np.array([[0.6, 0, 0.4]], dtype=np.float32))
    assert nearest.nearest[0] == 0


@pytest.mark.parametrize(
    ("matrices", "why"),
    [
        (np.zeros((0, 6)), "members"),
        (np.zeros((2, 5)), "6"),
        (np.zeros(6), "members"),
        (np.array([[0, 0, 0, 0, 0, -1.0]]), "counts of tokens"),
        (np.array([[0, 0, 0, 0, 0, np.nan]]), "counts of tokens"),
    ],
)
def test_what_is_no_collection_of_this_pool_is_refused(matrices: np.ndarray, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        Eamc(TWO, matrices)


def test_an_artifact_of_another_kind_is_refused() -> None:
    assert len(Eamc.of_artifact(TWO, Artifact(EAMC, "1", {MATRICES: np.ones((3, 6))}))) == 3
    for artifact in (Artifact("popularity", "1", {MATRICES: np.ones((3, 6))}), Artifact(EAMC, "1", {})):
        with pytest.raises(InvalidConfig, match=MATRICES):
            Eamc.of_artifact(TWO, artifact)


def test_a_sequence_keeps_its_row_and_leaves_it_to_another_when_it_ends() -> None:
    matrices = ActivationMatrices(TWO)
    many = list(range(7))
    rows = matrices.rows_of(keys_of(many))
    assert sorted(rows.tolist()) == many
    matrices.add(routed(TWO, 1, [[number % 3] for number in many], many), rows)
    assert matrices.counts.sum() == 7
    assert matrices.rows_of(keys_of(many)).tolist() == rows.tolist()
    assert matrices.end(3) == rows[3]
    assert matrices.end(3) is None
    assert matrices.counts.sum() == 6
    assert matrices.ratios[rows[3]].sum() == 0


def test_rows_of_layers_sum_to_the_picks_of_all_tokens_prefill_and_decode_together() -> None:
    matrices = ActivationMatrices(UNEVEN)
    prompt = routed(UNEVEN, 1, [[0, 1], [1, 2], [0, 1]], [5, 5, 5])
    rows = matrices.rows_of(prompt.step.sequences)
    matrices.add(prompt, rows)
    matrices.add(routed(UNEVEN, 1, [[4, 1]], [5]), rows)
    own = matrices.counts[rows[0], UNEVEN.spans[1]]
    assert own.tolist() == [2, 4, 1, 0, 1]
    assert matrices.ratios[rows[0], UNEVEN.spans[1]].tolist() == pytest.approx([0.25, 0.5, 0.125, 0, 0.125])


def test_where_picks_are_not_recorded_tokens_are_shared_by_rows() -> None:
    step = Step("pool", 0, keys_of([4, 9, 9]), np.zeros(3, dtype=np.uint8))
    routing = LayerRouting(TWO, step, 0, keys_of([0, 2]), keys_of([2, 1]))
    matrices = ActivationMatrices(TWO)
    rows = matrices.rows_of(step.sequences)
    matrices.add(routing, rows)
    assert matrices.counts[rows].tolist() == [
        pytest.approx([2 / 3, 0, 1 / 3, 0, 0, 0]), pytest.approx([4 / 3, 0, 2 / 3, 0, 0, 0])
    ]  # fmt: skip
    fewer = LayerRouting(TWO, step, 1, keys_of([0, 2]), keys_of([1, 1]))  # two thirds of a token for the first
    matrices.add(fewer, rows)
    assert matrices.ratios[rows, TWO.spans[1]].tolist() == [pytest.approx([0.5, 0, 0.5])] * 2
