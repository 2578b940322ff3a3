"""A worker's configuration refuses at once what can not be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.usable_memory import usable_cores


def test_threads_are_some_a_core() -> None:
    assert WorkerConfig("model", threads=1).threads == 1
    for wrong in (0, 100 * usable_cores()):
        with pytest.raises(InvalidConfig, match="threads"):
            WorkerConfig("model", threads=wrong)


@pytest.mark.parametrize(("kind", "taker"), [("eamc", "moe-infinity"), ("reuse", "reuse")])
def test_a_file_is_for_the_policy_that_predicts_by_it(kind: str, taker: str) -> None:
    file: dict[str, Any] = {kind: Path("a.safetensors")}
    assert WorkerConfig("model", policy=taker, **file).artifact_files == {kind: Path("a.safetensors")}
    assert WorkerConfig("model", policy=taker).artifact_files == {}
    with pytest.raises(InvalidConfig, match=f"lru takes no {kind}: leave it out, or choose the policy {taker}"):
        WorkerConfig("model", policy="lru", **file)
