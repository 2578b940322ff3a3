"""Which sequences are recorded, and when the collection is rebuilt."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.predictor.kinds.config import DriftConfig
from greenroom.predictor.kinds.eamc.drift import Drift

RECALLS = st.one_of(st.none(), st.floats(0, 1))
CONFIGS = st.builds(
    DriftConfig,
    share=st.floats(0, 1),
    least=st.sampled_from([0.0, 0.0, 0.3]),
    after=st.integers(1, 6),
    again=st.integers(1, 20),
    settle=st.integers(1, 6),
)


@given(CONFIGS, st.booleans(), st.lists(st.one_of(RECALLS, st.just("built")), max_size=60))
def test_it_is_as_its_words_say(config: DriftConfig, made: bool, happens: list[float | str | None]) -> None:
    """Against the definition, worked out anew from everything since the last one was built."""
    drift = Drift(config, made=made)
    since: list[float | None] = []
    low = 0
    for one in happens:
        if isinstance(one, str):
            drift.made()
            made, since, low = True, [], 0
        else:
            told = [recall for recall in since if recall is not None]
            if one is None:
                expected = not made
            else:
                known = len(told) >= config.settle
                usual = statistics.median(told[: config.settle]) if known else None
                expected = one < config.least or (usual is not None and one < config.share * usual)
            assert drift.note(one) == expected
            since.append(one)
            low += expected
        assert (drift.low, drift.sequences) == (low, len(since))
        assert drift.due == (low >= config.after or len(since) >= config.again)


@given(st.lists(st.floats(0.5, 0.55), min_size=200, max_size=200))
def test_what_is_foreseen_as_usual_is_not_recorded(recalls: list[float]) -> None:
    drift = Drift(DriftConfig(), made=True)
    assert not any(drift.note(recall) for recall in recalls)
    assert not drift.due


def test_a_shift_is_found_after_so_many_sequences_and_ends_when_it_is_rebuilt() -> None:
    """As in §8.5: a hundred sequences of one kind, then of another."""
    drift = Drift(DriftConfig(), made=True)
    for _ in range(100):
        assert not drift.note(0.8)
    for count in range(100):
        assert not drift.due, f"after {count} of the other kind"
        assert drift.note(0.5)
    assert drift.due
    for _ in range(13):  # while it is rebuilt
        assert drift.note(0.5)
    drift.made()
    for _ in range(300):
        assert not drift.note(0.6), "what is usual is another number now"
    assert not drift.due


def test_a_few_stragglers_do_not_say_what_is_usual() -> None:
    drift = Drift(DriftConfig(), made=True)
    for _ in range(20):  # their workers had not swapped yet
        drift.note(0.1)
    for _ in range(30):
        drift.note(0.8)
    assert drift.usual == 0.8


def test_without_any_collection_the_first_sequences_make_one() -> None:
    drift = Drift(DriftConfig(after=3), made=False)
    assert [drift.note(None) for _ in range(3)] == [True] * 3
    assert drift.due
    drift.made()
    assert not drift.note(None)


def test_a_threshold_may_be_a_number() -> None:
    drift = Drift(DriftConfig(least=0.4, share=0.0), made=True)
    assert [drift.note(recall) for recall in (0.39, 0.4, 0.0, 1.0)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [("share", 1.1), ("share", float("nan")), ("least", -0.1), ("after", 0), ("again", 0), ("settle", 0)],
)
def test_a_bad_value_is_named(field: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=f"eamc_{field}"):
        DriftConfig(**{field: value})  # type: ignore[arg-type]
