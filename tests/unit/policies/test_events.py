"""What events say of rows, sequences and picks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.base.events import LayerRouting, Phase, Step
from greenroom.policies.base.expert_keys import Catalogue
from tests.unit.policies.bench import keys_of, routing_of, step_of

CATALOGUE = Catalogue("pool", experts_per_layer=[3, 5], top_k=[2, 2], expert_bytes=[1, 1])


def test_a_step_knows_its_distinct_sequences_wherever_their_rows_lie() -> None:
    step = step_of(7, 4, 7, 9, 4)

    assert step.rows == 5
    assert step.sequences.tolist() == [4, 7, 9]
    assert step.sequence_of_row.tolist() == [1, 0, 1, 2, 0]
    assert step_of(7, 4).sequence_of_row.tolist() == [1, 0]


def test_the_phase_of_a_step_is_that_of_all_its_rows() -> None:
    assert step_of(1, 2, phase=Phase.PREFILL).phase is Phase.PREFILL
    assert step_of(1, 2, phase=Phase.DECODE).phase is Phase.DECODE
    mixed = Step("pool", 0, keys_of([1, 2]), np.array([Phase.PREFILL, Phase.DECODE], dtype=np.uint8))
    assert mixed.phase is None
    assert step_of().phase is None


def test_an_encoders_rows_are_a_prompts() -> None:
    assert step_of(1, 2, phase=Phase.PREFILL).has_prompt_rows
    assert step_of(1, 2, phase=Phase.ENCODE).has_prompt_rows
    assert Step("pool", 0, keys_of([1, 2]), np.array([Phase.DECODE, Phase.ENCODE], dtype=np.uint8)).has_prompt_rows
    assert not step_of(1, 2, phase=Phase.DECODE).has_prompt_rows
    assert not step_of().has_prompt_rows


def test_routing_gives_distinct_keys_with_their_rows_and_skips_picks_that_are_none() -> None:
    picks = np.array([[4, 0], [0, 5], [2, 9]])

    routing = LayerRouting.from_picks(CATALOGUE, step_of(1, 2, 1), 1, picks)

    assert routing.experts.tolist() == [3, 5, 7]
    assert routing.rows.tolist() == [2, 1, 1]
    assert routing.by_sequence().tolist() == [[1, 0, 1, 0, 1], [1, 0, 0, 0, 0]]


def test_counts_by_sequence_need_the_picks() -> None:
    with pytest.raises(ValueError, match="not recorded"):
        routing_of(CATALOGUE, [0, 1]).by_sequence()


@given(st.data())
def test_counts_by_sequence_are_those_of_a_plain_loop(data: st.DataObject) -> None:
    layer = data.draw(st.integers(0, 1))
    experts = int(CATALOGUE.experts_per_layer[layer])
    sequences = data.draw(st.lists(st.integers(0, 4), max_size=12))
    picks = np.array(
        [data.draw(st.lists(st.integers(0, experts + 1), min_size=2, max_size=2)) for _ in sequences], dtype=np.int64
    ).reshape(len(sequences), 2)

    routing = LayerRouting.from_picks(CATALOGUE, step_of(*sequences), layer, picks)

    expected = {sequence: [0] * experts for sequence in sorted(set(sequences))}
    for sequence, row in zip(sequences, picks.tolist(), strict=True):
        for pick in row:
            if pick < experts:
                expected[sequence][pick] += 1
    assert routing.by_sequence().tolist() == list(expected.values())
    totals = np.array(list(expected.values()), dtype=np.int64).reshape(-1, experts).sum(axis=0)
    assert routing.experts.tolist() == (np.flatnonzero(totals) + int(CATALOGUE.first[layer])).tolist()
    assert routing.rows.tolist() == totals[totals > 0].tolist()
