"""The last sequences, within their bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.traces.recent_sequences import RecentSequences
from greenroom.predictor.traces.samples import Sample


def sample(width: int = 4, rows: int = 1) -> Sample:
    return Sample("", np.ones((rows, width), np.uint16))


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from([4, 5]), st.integers(1, 3)), max_size=60),
    st.integers(1, 8),
)
def test_it_keeps_its_bounds(arrivals: list[tuple[str, int, int]], most: int) -> None:
    recent: RecentSequences[str] = RecentSequences(max_bytes=60, max_sequences=most)
    taken: dict[str, list[Sample]] = {}
    for key, width, rows in arrivals:
        one = sample(width, rows)
        if recent.add(key, one):
            taken.setdefault(key, []).append(one)
        recent.audit()
        for name in recent:
            kept = recent.sequences(name)
            assert recent.count(name) == len(kept)
            last = taken[name][-len(kept) :]  # oldest first
            assert all(mine is theirs for mine, theirs in zip(kept, last, strict=True))
    for name in "xyz":
        recent.forget(name)
    assert (len(recent), recent.nbytes) == (0, 0)
    recent.audit()


def test_another_shape_does_not_enter() -> None:
    recent: RecentSequences[str] = RecentSequences(max_bytes=1000, max_sequences=9)
    assert recent.add("m", sample(4))
    assert recent.add("m", sample(4, rows=7)), "sequences are as long as they are"
    assert not recent.add("m", sample(5))
    assert not recent.add("other", sample(600))
    assert recent.count("m") == 2
    assert recent.count("other") == 0


def test_it_says_when_the_bytes_hold_no_more_under_a_key() -> None:
    recent: RecentSequences[str] = RecentSequences(max_bytes=60, max_sequences=9)
    for _ in range(8):
        recent.add("m", sample(4))
        recent.add("n", sample(1))
    assert recent.is_full("m")
    assert not recent.is_full("n")
    recent.forget("n")
    assert not recent.is_full("m")  # there is room again
    for _ in range(3):
        recent.add("m", sample(4))
    assert recent.is_full("m")
