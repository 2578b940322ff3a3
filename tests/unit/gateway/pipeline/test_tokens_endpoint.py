"""Where workers deliver tokens, as a part of a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from greenroom.fabric.log import MemoryBroker, MemoryLog
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.pipeline import Pipeline
from greenroom.gateway.service import tokens_endpoint
from tests.unit.gateway.pipeline.members import Members


class Recorded:
    """An endpoint that records how it was stopped."""

    def __init__(self) -> None:
        self.servicers: Sequence[object] = ()
        self.graces: list[float] = []

    async def listen(self, servicers: Sequence[object]) -> str:
        self.servicers = servicers
        return "here"

    def serving(self, serving: bool) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        self.graces.append(grace_s)


async def test_streams_of_workers_which_have_no_end_are_not_waited_for() -> None:
    directory: Any = Members()
    pipeline = Pipeline(PipelineConfig(), instance="g", log=MemoryLog(MemoryBroker()), directory=directory)
    endpoint = Recorded()
    part = tokens_endpoint(pipeline, endpoint)
    await part.start()
    assert endpoint.servicers == [pipeline.tokens]
    assert pipeline.address == "here"
    await part.stop()
    assert endpoint.graces == [0.0]
