from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.base.expert_keys import Catalogue
from greenroom.profiling.measures.reuse import chosen_for, kept_experts, parts_of, propose, runs_of

tasks = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("perplexity", "proposed"),
    [
        ({0: 1.0, 20: 1.10, 40: 1.105, 60: 1.2, 80: 1.1}, 40),
        ({0: 1.0, 20: 1.10, 40: 1.09, 60: 1.10, 80: 1.10}, 80),
        ({0: 1.0, 20: 1.10, 40: 1.2, 60: 1.1, 80: 1.1}, 20),
        ({0: 1.0}, 1),
    ],
)
def test_proposed_is_the_last_before_the_perplexity_rises(perplexity: dict[int, float], proposed: int) -> None:
    assert propose(perplexity, 0.01) == proposed


@given(st.dictionaries(st.integers(0, 100), st.floats(1, 10), min_size=1), st.floats(0, 0.5))
def test_proposed_is_one_that_was_measured_or_one(perplexity: dict[int, float], tolerance: float) -> None:
    period = propose(perplexity, tolerance)
    assert period == 1 or period in perplexity
    assert period >= 1
    assert propose(perplexity, tolerance + 1) >= period, "a larger tolerance never proposes less"


@given(
    st.integers(1, 4),
    st.integers(2, 9),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
def test_kept_are_as_many_as_fit_at_least_k_a_layer_and_the_worthiest(
    layers: int, size: int, slots: int, random: Random
) -> None:
    k = min(2, size)
    catalogue = Catalogue.uniform("", layers=layers, experts=size, top_k=k)
    worth = np.array([[random.randrange(5) for _ in range(size)] for _ in range(layers)], dtype=np.float64)
    kept = kept_experts(catalogue, worth, slots)
    assert kept.sum() == min(catalogue.size, max(slots, layers * k))
    for layer, span in enumerate(catalogue.spans):
        own = kept[span]
        assert own.sum() >= k
        if not own.all():
            assert worth[layer][own].min() >= worth[layer][~own].max(), "within a layer none stands behind a lesser one"
    extra = [
        (worth[layer, expert], bool(kept[catalogue.key(layer, expert)]))
        for layer in range(layers)
        for expert in np.argsort(-worth[layer], kind="stable")[k:].tolist()
    ]
    taken = [value for value, is_kept in extra if is_kept]
    left = [value for value, is_kept in extra if not is_kept]
    assert not taken or not left or min(taken) >= max(left), "beyond k a layer, layers compete"


def test_experts_are_chosen_anew_for_each_prompt_when_p_is_0() -> None:
    assert chosen_for(["a", "b", "a", "a"], 0, 0, 1, Random(0)) == [0, 1, 2, 3]


def test_experts_are_those_of_the_last_prompt_of_the_task_when_they_were_chosen() -> None:
    arriving = ["a", "b", "a", "b", "b", "a"]
    always_last = Random(0)
    always_last.random = lambda: 0.999  # type: ignore[method-assign]
    assert chosen_for(arriving, 1, 0, 1, always_last) == [5, 4, 0, 1, 3, 2]
    assert chosen_for(arriving, 2, 0, 1, always_last) == [2, 4, 0, 1, 1, 2]
    assert chosen_for(arriving, 2, 0, 2, always_last) == [5, 4, 0, 1, 3, 2], "its first half"


@given(tasks, st.integers(0, 90), st.integers(1, 4), st.integers(0, 99))
def test_experts_are_of_the_same_task_and_as_old_as_they_may_be(
    arriving: list[str], period: int, parts: int, seed: int
) -> None:
    random = Random(seed)
    for part in range(parts):
        for place, source in enumerate(chosen_for(arriving, period, part, parts, random)):
            assert arriving[source] == arriving[place]
            ago = (place - source) % len(arriving)
            if ago >= period:  # older than the choice only because nothing of the task came in between
                between = [arriving[(source + step) % len(arriving)] for step in range(1, ago - period + 1)]
                assert arriving[place] not in between


@given(st.integers(1, 40), st.integers(1, 5))
def test_each_age_is_as_frequent_as_the_others(period: int, parts: int) -> None:
    count = 2000
    ages: Counter[int] = Counter()
    for part in range(parts):
        chosen = chosen_for(["a"] * count, period, part, parts, Random(part))
        ages.update((place - source) % count for place, source in enumerate(chosen))
    assert set(ages) <= set(range(period + 1))
    mean = sum(age * times for age, times in ages.items()) / ages.total()
    assert abs(mean - period / 2) < 0.05 * (period + 1)


@given(st.integers(1, 9))
def test_how_often_prompts_are_run(seeds: int) -> None:
    assert parts_of(0, seeds) == 1
    assert parts_of(20, seeds) == seeds
    assert runs_of(seeds) == 2 + 4 * seeds
