"""A worker's configuration refuses at once what can not be meant."""

from __future__ import annotations

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.worker.config import WorkerConfig
from greenroom.worker.machine import usable_cores


def test_threads_are_some_a_core() -> None:
    assert WorkerConfig("model", threads=1).threads == 1
    for wrong in (0, 100 * usable_cores()):
        with pytest.raises(InvalidConfig, match="threads"):
            WorkerConfig("model", threads=wrong)
