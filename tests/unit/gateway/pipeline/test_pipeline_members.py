"""What a gateway makes of the workers that it hears of."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.errors import InvalidRequest, Saturated
from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.core.messages import Member, MemberKind, QueueDepth
from greenroom.fabric.log import Topic
from greenroom.fabric.log.memory.memory_log import MemoryLog
from greenroom.fabric.topics import REQUESTS
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.pipeline import Pipeline
from tests.unit.gateway.pipeline.members import Members, worker

REQUEST = GenerationRequest("r", (1,), SamplingParams(max_tokens=1))


def pipeline(members: Members) -> Pipeline:
    directory: Any = members
    return Pipeline(PipelineConfig(), instance="g", log=MemoryLog(), directory=directory, text_digest="ours")


def test_the_model_is_the_least_that_all_of_its_workers_take_and_is_remembered() -> None:
    members = Members()
    made = pipeline(members)
    members.here = [worker("a", length=200), worker("b", length=100)]
    assert made.model.max_model_len == 100
    assert made.model is made.model
    members.here = []
    assert made.model.max_model_len == 100
    members.here = [worker("a", length=150)]
    assert made.model.max_model_len == 150


def test_workers_with_another_tokenizer_are_not_served_for_and_the_reason_is_told() -> None:
    members = Members()
    made = pipeline(members)
    made._journal.caught_up.set()
    members.here = [worker("a", text="another")]
    assert "tokenizer is another" in (made.unready or "")
    members.here.append(worker("b"))
    assert made.unready is None


def scheduler(waiting: int, limit: int) -> Member:
    depth = QueueDepth(waiting=waiting, limit=limit)
    return Member(member=MemberKind.SCHEDULER, instance="s", address="", ttl_ms=1000, depth=depth)


def test_refused_from_what_the_scheduler_says_or_from_what_waits_here() -> None:
    members = Members()
    made = pipeline(members)
    made._check_room(REQUEST)
    members.here = [scheduler(3, limit=3)]
    with pytest.raises(Saturated, match="3 requests wait"):
        made._check_room(REQUEST)
    members.here = [scheduler(0, limit=2)]
    for number in range(2):
        made.in_flight.begin(f"r{number}", b"", keyed=False)
    with pytest.raises(Saturated, match="2 requests wait"):
        made._check_room(REQUEST)


def test_what_runs_does_not_wait_however_long_the_scheduler_says_nothing_new() -> None:
    members = Members()
    made = pipeline(members)
    members.here = [scheduler(0, limit=2)]
    for number in range(20):
        made._check_room(REQUEST)
        made.in_flight.begin(f"r{number}", b"", keyed=False)
        made.in_flight.book.open(f"r{number}", Attempt(0, number), object())


async def test_what_the_log_does_not_take_is_told_without_its_topics(caplog: pytest.LogCaptureFixture) -> None:
    members = Members()
    made = pipeline(members)
    members.here = [worker("a")]
    await made._log.ensure([Topic(REQUESTS, max_message_bytes=1000)])
    request = GenerationRequest("r", (1,) * 2000, SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest) as caught:
        await anext(aiter(made.generate(request)))
    assert caught.value.code == "too_large"
    assert str(caught.value) == "the request is larger than can be queued here; shorten it"
    assert "requests takes" in caplog.text
    assert len(made.in_flight) == 0
