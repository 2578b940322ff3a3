"""Settings and the fault point."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype import TaskTypeConfig
from greenroom.tasktype.faults import after_append_fault


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_in_flight", 0), ("max_span", 0), ("append_tries", 0), ("group", ""), ("append_timeout_s", 0.0),
     ("retry_s", -1.0), ("max_retry_s", float("inf")), ("commit_every_s", float("nan")), ("revoke_s", 0.0)],
)  # fmt: skip
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=field):
        TaskTypeConfig(**{field: value})


@pytest.mark.parametrize("setting", [None, "", "worker:after-token:3", "scheduler:after-append:1"])
def test_without_its_name_there_is_no_fault(setting: str | None) -> None:
    assert after_append_fault({} if setting is None else {"GREENROOM_FAULT": setting}) is None


@pytest.mark.parametrize(
    "point", ["", "after-append", "after-append:0", "after-append:x", "after-append:-1", "sooner:1"]
)
def test_a_fault_that_is_misspelt_is_refused(point: str) -> None:
    with pytest.raises(InvalidConfig, match="tasktype:after-append:N"):
        after_append_fault({"GREENROOM_FAULT": f"tasktype:{point}"})


def test_the_nth_append_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("greenroom.tasktype.faults.os.kill", lambda pid, number: killed.append(number))
    fault = after_append_fault({"GREENROOM_FAULT": "tasktype:after-append:3"})
    assert fault is not None
    fault()
    fault()
    assert not killed
    fault()
    assert killed == [signal.SIGKILL]
