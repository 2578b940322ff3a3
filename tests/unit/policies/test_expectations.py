"""What ``NextUse`` was told to expect holds until its layer has run, and replaces only what it was told of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.replacement.next_use import NextUse
from greenroom.policies.reuse.replacement import ReuseRetention
from tests.unit.policies.bench import routing_of, step_of

POOL = Catalogue("p", experts_per_layer=[3, 2, 4, 1], top_k=[1] * 4, expert_bytes=[1] * 4)

Happening = tuple[str, int, int]


@pytest.mark.parametrize("rule", [NextUse, ReuseRetention])
@given(
    st.lists(st.tuples(st.sampled_from(["route", "expect", "nothing", "step"]), st.integers(0, 3), st.integers(1, 2)))
)
def test_expectations_are_as_if_each_key_were_kept_by_itself(rule: type[NextUse], history: list[Happening]) -> None:
    policy, told = rule(POOL), np.full(POOL.size, np.nan)
    for number, (word, layer, layers) in enumerate(history):
        span = slice(int(POOL.first[layer]), int(POOL.first[min(layer + layers, POOL.layers)]))
        if word == "route":
            policy.on_layer_routed(routing_of(POOL, [span.start], layer=layer))
            told[POOL.spans[layer]] = np.nan
        elif word == "expect":
            chances = np.random.default_rng(number).random(span.stop - span.start).astype(np.float32)
            policy.expect(span, chances)
            told[span] = chances
        elif word == "nothing":
            policy.expect_nothing()
            told[:] = np.nan
        else:
            policy.on_step_started(step_of(0, number=number))
        plain = np.where(np.isnan(told), policy.next_turn(), told)
        assert policy.expected().tolist() == pytest.approx(plain.tolist(), abs=0)
