"""What is held out of a trace, and what is said where too little is left."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.replay import RoutingTrace
from greenroom.replay.traces.held_out import sequences_to_learn_from


def trace_of(*lengths: int) -> RoutingTrace:
    starts = np.concatenate(([0], np.cumsum(lengths)))
    return RoutingTrace(np.zeros((starts[-1], 2, 1), np.uint8), starts, np.array([4, 4]))


def test_the_last_sequences_are_held_out_and_at_least_one() -> None:
    assert sequences_to_learn_from(trace_of(*[10] * 20), 0.1, least=180) == 18
    assert sequences_to_learn_from(trace_of(10, 10), 0.1, least=10) == 1


def test_sequences_that_were_not_recorded_are_not_held_out_in_place_of_those_that_were() -> None:
    assert sequences_to_learn_from(trace_of(*[10] * 20, *[0] * 80), 0.1, least=180) == 18
    assert sequences_to_learn_from(trace_of(0, 10, 0, 10, 0), 0.1, least=10) == 3


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((22,), r"prompts: '0 tokens to learn from' .*500 tokens, beside the 22 tokens of 1 of 1 sequences held out"),
        (
            [20] * 20,
            r"'360 tokens to learn from' .*beside the 40 tokens of 2 of 20 sequences held out: give more prompts",
        ),
    ],
)
def test_too_little_is_said_with_what_was_held_out_and_what_to_do(lengths: list[int], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        sequences_to_learn_from(trace_of(*lengths), 0.1, least=500, field="prompts")
