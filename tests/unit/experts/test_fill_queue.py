"""The order of what a fill brings, where some sizes have no room."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.experts.deciding.fill_queue import FillQueue
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from tests.examples import examples

SIZES = SlotSizes(Catalogue("p", experts_per_layer=[4] * 3, top_k=[1] * 3, expert_bytes=[20, 10, 30]))
CLASSES = range(SIZES.classes)
some_classes = st.sets(st.sampled_from(CLASSES))
some_places = st.lists(st.integers(0, 5), min_size=SIZES.classes, max_size=SIZES.classes)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), some_classes),
        st.tuples(st.just("put back"), st.booleans()),
        st.tuples(st.just("drop"), st.sets(st.integers(0, SIZES.experts - 1), max_size=3)),
    )
)


@settings(max_examples=examples(60))
@given(
    order=st.permutations(range(SIZES.experts)), taken=steps, places=st.lists(st.integers(0, 5), min_size=3, max_size=3)
)
def test_it_is_one_list_of_which_the_first_that_has_room_is_taken(
    order: list[int], taken: list[tuple[str, object]], places: list[int]
) -> None:
    queue, plain, out = FillQueue(SIZES), list(order), list[int]()
    queue.extend(order)
    for what, how in taken:
        if what == "take":
            assert isinstance(how, set)
            expected = next((key for key in plain if SIZES.class_of[key] in how), None)
            assert queue.take(how) == expected
            if expected is not None:
                plain.remove(expected)
                out.append(expected)
        elif what == "drop":
            assert isinstance(how, set)
            unwanted = np.isin(np.arange(SIZES.experts), list(how))
            queue.drop(unwanted)
            plain = [key for key in plain if not unwanted[key]]
        elif out:
            key = out.pop()
            if how:
                queue.put_back(key)
                plain.insert(0, key)
            else:
                queue.extend([key])
                plain.append(key)
        assert bool(queue) == bool(plain)
        found = queue.within(places)
        assert found == SIZES.placed(np.array(plain, dtype=np.int64), np.array(places)).tolist()
        assert queue.count_within(places) == len(found)
    assert [queue.take(CLASSES) for _ in plain] == plain
    queue.extend(order)
    queue.clear()
    assert not queue
    assert queue.take(CLASSES) is None
