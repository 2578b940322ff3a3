"""What is usual of a task type."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.kinds.emoe.priors import MAX_TASKS, priors_of, tasks_of, without_each
from greenroom.predictor.kinds.emoe.sequences import Sequences
from tests.unit.predictor.kinds.emoe.worlds import random_sequences


@given(st.integers(0, 100), st.integers(1, 9))
def test_shares_sum_to_one_and_none_is_impossible(seed: int, count: int) -> None:
    sequences = random_sequences(count, seed=seed)
    sequences.counts[:, 1, 1] = 0  # a slot that is never used
    priors = priors_of(sequences, tasks_of(sequences))
    np.testing.assert_allclose(priors.by_slot.sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(priors.by_layer.sum(axis=-1), 1, rtol=1e-5)
    assert (priors.by_slot > 0).all()
    assert priors.slots[1, 1] == 0


def test_a_rare_type_is_nearer_to_all_types() -> None:
    counts = np.zeros((21, 1, 1, 2), np.uint16)
    counts[:20, 0, 0, 0] = 1
    counts[20, 0, 0, 1] = 1
    sequences = Sequences(("often",) * 20 + ("rare",), counts)
    priors = priors_of(sequences, tasks_of(sequences))
    assert priors.tasks == ("", "often", "rare")
    often, rare = priors.by_slot[1, 0, 0], priors.by_slot[2, 0, 0]
    assert often[0] > 0.98
    assert 0.3 < rare[1] < 0.5
    assert priors.number("never") == 0


@given(st.integers(0, 50))
def test_without_each_is_as_if_it_had_not_been_there(seed: int) -> None:
    sequences = random_sequences(8, seed=seed, tasks="abc")
    priors = priors_of(sequences, tasks_of(sequences))
    numbers = np.asarray([priors.number(task) for task in sequences.tasks])
    found = without_each(sequences, priors, numbers)
    shares = sequences.by_slot()
    for place, task in enumerate(sequences.tasks):
        others = [other for other in range(8) if sequences.tasks[other] == task and other != place]
        present = (shares[others].sum(axis=-1, keepdims=True) > 0).sum(axis=0)
        expected = (shares[others].sum(axis=0) + 2 * priors.by_slot[0]) / (present + 2)
        np.testing.assert_allclose(found[place], expected, atol=1e-5)


def test_only_the_most_frequent_types_have_their_own() -> None:
    names = (*(f"t{number}" for number in range(MAX_TASKS + 9)), "often", "often", "")
    sequences = Sequences(names, np.ones((len(names), 1, 1, 2), np.uint16))
    tasks = tasks_of(sequences)
    assert len(tasks) == MAX_TASKS + 1
    assert tasks[0] == ""
    assert "often" in tasks
