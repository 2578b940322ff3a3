"""What can be told of a record that can not be read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from greenroom.core.messages import RequestRecord, TaskRecord, Undecodable, decode


def undecodable(content: Any, kind: Any) -> Undecodable:
    with pytest.raises(Undecodable) as raised:
        decode(msgspec.msgpack.encode(content), kind)
    return raised.value


def test_an_unreadable_requests_id_and_pool_are_told_where_they_can_be_read() -> None:
    error = undecodable({"v": 2, "kind": "request", "request_id": "r", "pool": 3}, RequestRecord)
    assert (error.request_id, error.pool) == ("r", 3)
    assert "schema version 2" in str(error)


def test_an_unreadable_tasks_are_those_of_its_request() -> None:
    content = {"v": 1, "kind": "task", "task_type": "t", "request": {"request_id": "r", "pool": 3, "prompt_ids": "x"}}
    error = undecodable(content, TaskRecord)
    assert (error.request_id, error.pool) == ("r", 3)


@pytest.mark.parametrize("request_id", [None, "", "x" * 257, 7, ["r"]])
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_no_id_is_not_told(request_id: object, nested: bool) -> None:
    named = {"request_id": request_id, "pool": True}
    content = {"v": 1, "kind": "task", **({"request": named} if nested else named)}
    error = undecodable(content, TaskRecord)
    assert (error.request_id, error.pool) == (None, None)


def test_a_request_that_is_no_map_does_not_hide_the_record_own_id() -> None:
    assert undecodable({"v": 1, "kind": "task", "request": [1], "request_id": "r"}, TaskRecord).request_id == "r"
