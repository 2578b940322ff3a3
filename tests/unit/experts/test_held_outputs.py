"""Outputs that wait for their turn are few."""

from __future__ import annotations

import numpy as np

from greenroom.experts.held_outputs import HeldOutputs, most_held
from greenroom.policies.base.events import LayerRouting, Phase, Step
from greenroom.policies.base.expert_keys import Catalogue

ROWS = 300


def routed(*rows: int) -> HeldOutputs:
    """Of a step of ``ROWS`` rows, so many of them at each expert of layer 1."""
    catalogue = Catalogue.uniform("held", layers=2, experts=len(rows), top_k=len(rows))
    step = Step("held", 1, np.zeros(ROWS, dtype=np.int64), np.full(ROWS, Phase.PREFILL, dtype=np.uint8))
    keys = np.arange(len(rows), dtype=np.int64) + len(rows)
    return HeldOutputs(LayerRouting(catalogue, step, 1, keys, np.array(rows)))


def test_what_runs_in_its_turn_does_not_wait() -> None:
    held = routed(ROWS, ROWS, ROWS)
    for key in (3, 4, 5):
        assert held.may_run(key)
        held.have_run(key)
        assert held.held == 0


def test_as_many_rows_as_the_step_has_may_wait_and_all_go_when_the_turn_comes() -> None:
    held = routed(100, 200, 100, 1)
    held.have_run(5)
    assert held.held == 200
    assert held.may_run(6), "exactly as many as the step has"
    held.have_run(6)
    assert not held.may_run(7)
    assert held.may_run(4), "it is its turn"
    held.have_run(4)
    assert held.held == 0
    assert held.may_run(7)
    held.have_run(7)
    assert held.held == 0


def test_a_short_step_may_hold_all() -> None:
    assert most_held(8) > 8 * 8
    assert most_held(4096) == 4096
