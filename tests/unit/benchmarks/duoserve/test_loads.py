"""The stage `loads`: its bound, and which rows count as prompts."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.duoserve.loads import PROMPT_ROWS, least_loads, prompted, prompts_of
from greenroom.policies.base.events import Phase
from tests.unit.replay.traces import trace_of


def fewest(uses: tuple[frozenset[int], ...], slots: int) -> int:
    """By trying every choice of who stays."""

    @cache
    def from_here(at: int, resident: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        able = sorted(resident | uses[at])
        stays = [frozenset(some) for some in combinations(able, min(slots, len(able)))]
        return len(uses[at] - resident) + min(from_here(at + 1, some) for some in stays)

    return from_here(0, frozenset())


@given(st.lists(st.frozensets(st.integers(0, 5), max_size=3), max_size=8), st.integers(1, 4))
def test_the_bound_is_the_fewest_loads_of_all_choices(uses: list[frozenset[int]], slots: int) -> None:
    assert least_loads([sorted(layer) for layer in uses], slots) == fewest(tuple(uses), slots)


def test_a_trace_without_phases_gets_prompts_of_at_most_half_a_sequence() -> None:
    trace = prompted(trace_of(3 * PROMPT_ROWS, 10, 1))
    assert trace.phase is not None
    lengths = [int((part == Phase.PREFILL).sum()) for part in np.split(trace.phase, trace.seq_starts[1:-1])]
    assert lengths == [PROMPT_ROWS, 5, 0]
    assert prompted(trace) is trace


def test_prompts_alone_keep_their_sequences() -> None:
    trace = prompted(trace_of(10, 6, layers=2, k=2))
    alone = prompts_of(trace)
    assert alone.seq_starts.tolist() == [0, 5, 8]
    assert (alone.experts == np.concatenate((trace.experts[:5], trace.experts[10:13]))).all()
