"""What is known of all models: the budget, the least recently used, restoring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import Trace
from greenroom.predictor import PredictorConfig
from greenroom.predictor.kinds.statistics.library import Evicted, Library
from greenroom.predictor.kinds.statistics.snapshot import dump_snapshot, load_snapshot
from greenroom.predictor.traces.counted_ids import CountedIds
from greenroom.predictor.traces.counts import BadTrace, count
from tests.examples import examples
from tests.unit.predictor.kinds.statistics.libraries import ENTRY, config, new, one
from tests.unit.predictor.worlds import trace


def learn(library: Library, given: Trace) -> list[Evicted]:
    library.check(given)
    gone = library.learn(given, count(given))
    library.audit()
    return gone


def test_a_task_type_is_known_and_so_are_all_tasks() -> None:
    library = new()
    for number in range(3):
        learn(library, one(f"a{number}", "question"))
    learn(library, one("b", "compare"))
    learn(library, one("c"))
    known = library.models["m"]
    assert {name: statistics.sequences for name, statistics in known.tasks.items()} == {"question": 3, "compare": 1}
    assert known.everything.sequences == known.unsaved == 5
    assert library.has_seen("m", "a2")
    assert not library.has_seen("m", "a3")
    assert not library.has_seen("other", "a2")


def test_another_shape_under_the_same_name_is_refused() -> None:
    library = new()
    learn(library, one("a"))
    with pytest.raises(BadTrace, match="under another name"):
        library.check(trace([[[0]]], 4))
    with pytest.raises(BadTrace, match="5 experts"):
        library.check(trace([[[0], [1]]], 5))
    library.check(trace([[[0]]], 4, model="another"))


@pytest.mark.parametrize(("layers", "experts"), [(2, 10_000), (10**9, 1), (2**60, 2**60)])
def test_a_shape_beyond_the_budget_is_refused_before_anything_is_allocated(layers: int, experts: int) -> None:
    with pytest.raises(BadTrace, match="max_bytes"):
        new().check(one("a", layers=layers, num_experts=experts))


def test_the_least_recently_used_task_type_goes() -> None:
    library = new(config(8))
    for number in range(7):
        assert learn(library, one(str(number), f"t{number}")) == []
    library.touch("m", "t0")
    assert learn(library, one("7", "t7")) == [Evicted("m", "t1")]
    assert "t0" in library.models["m"].tasks
    assert library.models["m"].everything.sequences == 8


def test_a_model_goes_last_with_its_statistics_over_all_tasks() -> None:
    library = new(config(8))
    learn(library, one("1", "a", model="old"))
    for number in range(5):
        learn(library, one(str(number), f"t{number}"))
    assert learn(library, one("6", "t6")) == [Evicted("old", "a")]
    assert learn(library, one("7", "t7")) == [Evicted("old", None)]
    assert set(library.models) == {"m"}
    library.touch("old", "a")
    library.audit()


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.sampled_from("mno"), st.sampled_from(["", "a", "b", "c", "d"]), st.booleans()), max_size=60)
)
def test_the_books_agree_whatever_happens(events: list[tuple[str, str, bool]]) -> None:
    library = new(config(8))
    for number, (model, task_type, asked) in enumerate(events):
        if asked:
            library.touch(model, task_type)
        else:
            learn(library, one(str(number), task_type, model))
        library.audit()
        assert number == 0 or library.nbytes <= 8 * ENTRY


def test_restoring_gives_the_same_knowledge() -> None:
    rules = config(half_life_sequences=5.0)
    library = new(rules)
    random = np.random.default_rng(1)
    traces = [
        trace(random.integers(0, 4, (5, 2, 2)), 4, request_id=str(number), task_type="ab"[number % 2])
        for number in range(40)
    ]
    for each in traces[:30]:
        learn(library, each)
    other = new(rules)
    snapshot = load_snapshot(dump_snapshot(library.snapshot("m", 7, 123)))
    assert (snapshot.version, snapshot.created_ms) == (7, 123)
    assert other.restore(snapshot) == []
    other.audit()
    assert other.models["m"].unsaved == 0
    assert all(other.has_seen("m", str(number)) for number in range(30))
    for each in traces[30:]:
        learn(library, each)
        learn(other, each)
    mine, its = library.models["m"], other.models["m"]
    for name in ("a", "b"):
        np.testing.assert_array_equal(mine.tasks[name].popularity, its.tasks[name].popularity)
        np.testing.assert_array_equal(mine.tasks[name].affinity, its.tasks[name].affinity)
    np.testing.assert_array_equal(mine.everything.affinity, its.everything.affinity)
    assert (mine.everything.weight, mine.everything.sequences) == (its.everything.weight, its.everything.sequences)
    assert dump_snapshot(library.snapshot("m", 1, 1)) == dump_snapshot(other.snapshot("m", 1, 1))


def test_a_snapshot_does_not_change_with_what_is_learnt_after_it() -> None:
    library = new()
    learn(library, one("1", "a"))
    snapshot = library.snapshot("m", 1, 0)
    before = dump_snapshot(snapshot)
    learn(library, one("2", "a"))
    assert dump_snapshot(snapshot) == before


def test_the_window_of_what_was_seen_is_bounded() -> None:
    window = CountedIds(3)
    for name in "abcab":
        window.add(name)
    window.add("d")
    assert [name in window for name in "abcd"] == [True, True, False, True]
    again = CountedIds.from_array(window.to_array(), 2)
    assert [name in again for name in "abcd"] == [False, True, False, True]
    assert len(CountedIds.from_array(CountedIds(3).to_array(), 3)) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("group", ""), ("publish_every", 0), ("keep", 0), ("max_bytes", 0), ("half_life_sequences", 0.0),
     ("publish_after_s", float("inf")), ("part_bytes", 4 * 2**20), ("max_unsaved", 10), ("seen_window", 5000)],
)  # fmt: skip
def test_a_bad_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=field):
        PredictorConfig(**{field: value})
