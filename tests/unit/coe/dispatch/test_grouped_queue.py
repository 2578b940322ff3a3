"""A queue of groups is a list of requests whose groups are never parted."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.coe.dispatch.grouped_queue import GroupedQueue
from greenroom.policies.placement.placement_policy import PendingRequest, QueuedGroup


def request(name: str, expert: int) -> PendingRequest:
    return PendingRequest(name, 0, 1, 1, 1, 1e9, expert=expert)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["end", "behind", "take", "remove", "remove all"]), st.integers(0, 3), st.integers(1, 4)
        )
    )
)
def test_it_is_a_list(history: list[tuple[str, int, int]]) -> None:
    queue, model = GroupedQueue(), list[PendingRequest]()
    for place, (what, expert, most) in enumerate(history):
        new = request(str(place), expert)
        if what == "take" and model:
            same = [one for one in model if one.expert == model[0].expert]
            taken = queue.take(most)
            assert taken == model[: len(taken)]
            assert 1 <= len(taken) <= min(most, len(same))
            del model[: len(taken)]
        elif what == "remove":
            gone = model[most % len(model)] if model else None
            assert queue.remove(gone or request("nobody", expert)) == gone
            if gone:
                model.remove(gone)
        elif what == "remove all":
            assert queue.remove_all(expert) == [one for one in model if one.expert == expert]
            model = [one for one in model if one.expert != expert]
        elif what == "behind" and any(one.expert == expert for one in model):
            position = max(at for at, one in enumerate(model) if one.expert == expert) + 1
            queue.insert(new, position)
            model.insert(position, new)
        elif what == "end":
            queue.insert(new, None)
            model.append(new)
        assert list(queue) == model
        assert len(queue) == len(model) == sum(group.requests for group in queue.groups())
        assert not model or queue.head == model[0].expert
        described = [(expert, len(list(own))) for expert, own in groupby(model, key=lambda one: one.expert)]
        assert list(queue.groups()) == described


def test_neighbours_of_one_expert_are_one_group_at_the_end_only() -> None:
    queue = GroupedQueue()
    for name, expert in (("a", 1), ("b", 1), ("c", 2), ("d", 1)):
        queue.insert(request(name, expert), None)
    assert queue.groups() == (QueuedGroup(1, 2), QueuedGroup(2, 1), QueuedGroup(1, 1))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_no_group_is_parted(position: int) -> None:
    queue = GroupedQueue()
    for name, expert in (("a", 1), ("b", 1), ("c", 2)):
        queue.insert(request(name, expert), None)
    with pytest.raises(ValueError, match="expert 3"):
        queue.insert(request("x", 3), position)
    assert [one.request_id for one in queue] == ["a", "b", "c"]
    assert len(queue) == 3
