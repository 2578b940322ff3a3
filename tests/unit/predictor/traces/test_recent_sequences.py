"""The ring that keeps the last sequences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from greenroom.predictor.traces.recent_sequences import Ring

Kept = npt.NDArray[np.uint16]


def sample(width: int = 4, rows: int = 1) -> Kept:
    return np.ones((rows, width), np.uint16)


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from([4, 5]), st.integers(1, 3)), max_size=60),
    st.integers(1, 8),
)
def test_it_keeps_its_bounds(arrivals: list[tuple[str, int, int]], most: int) -> None:
    ring: Ring[str, Kept] = Ring(max_bytes=60, max_sequences=most)
    taken: dict[str, list[Kept]] = {}
    for key, width, rows in arrivals:
        one = sample(width, rows)
        if ring.add(key, one):
            taken.setdefault(key, []).append(one)
        ring.audit()
        for name in ring:
            kept = ring.sequences(name)
            assert ring.count(name) == len(kept)
            last = taken[name][-len(kept) :]  # oldest first
            assert all(mine is theirs for mine, theirs in zip(kept, last, strict=True))
    for name in "xyz":
        ring.forget(name)
    assert (len(ring), ring.nbytes) == (0, 0)
    ring.audit()


def test_another_shape_does_not_enter() -> None:
    ring: Ring[str, Kept] = Ring(max_bytes=1000, max_sequences=9)
    assert ring.add("m", sample(4))
    assert ring.add("m", sample(4, rows=7)), "sequences are as long as they are"
    assert not ring.add("m", sample(5))
    assert not ring.add("other", sample(600))
    assert ring.count("m") == 2
    assert ring.count("other") == 0


def test_it_says_when_the_bytes_hold_no_more_under_a_key() -> None:
    ring: Ring[str, Kept] = Ring(max_bytes=60, max_sequences=9)
    for _ in range(8):
        ring.add("m", sample(4))
        ring.add("n", sample(1))
    assert ring.is_full("m")
    assert not ring.is_full("n")
    ring.forget("n")
    assert not ring.is_full("m")  # there is room again
    for _ in range(3):
        ring.add("m", sample(4))
    assert ring.is_full("m")
