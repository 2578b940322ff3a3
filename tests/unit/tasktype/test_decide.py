"""What becomes of a record of ``requests``."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.collaboration import InputKind
from greenroom.core.generation import SamplingParams, Slo
from greenroom.core.inference import InferenceInput
from greenroom.core.messages import (
    Cancel,
    Inference,
    Rejected,
    Request,
    Task,
    TaskRecord,
    decode,
    encode,
    without_payload,
)
from greenroom.fabric.log import Record
from greenroom.tasktype import open_extractor
from greenroom.tasktype.decide import Bury, Forward, decide
from greenroom.tasktype.keywords import KeywordExtractor, load_profile

POOLS = 2
EXTRACTOR = KeywordExtractor(load_profile())


@pytest.fixture
def extractor() -> KeywordExtractor:
    return EXTRACTOR


def request(**fields: object) -> Request:
    given = {"request_id": "r1", "pool": 1, "model": "m", "prompt_ids": (1, 2), "accepted_ms": 5, "deadline_ms": 9}
    return Request(**{"sampling": SamplingParams(), **given, **fields})  # type: ignore[arg-type]


def record(value: bytes | None, key: bytes | None = b"r1") -> Record:
    return Record("requests", 3, 17, 1000, key, value, (("traceparent", b"00-1"),))


def forwarded(decision: Forward | Bury) -> tuple[Forward, TaskRecord]:
    assert isinstance(decision, Forward)
    return decision, decode(decision.value, TaskRecord)


def test_the_type_is_extracted(extractor: KeywordExtractor) -> None:
    asked = request(prompt="Summarise the following text: ...", slo=Slo(ttft_ms=3.0), tenant="t", keyed=True)
    decision, task = forwarded(decide(record(encode(asked)), extractor, POOLS))
    assert task == Task(request=asked, task_type="summarise", source="keywords")
    assert (decision.partition, decision.request_id) == (1, "r1")
    assert (decision.task_type, decision.source) == ("summarise", "keywords")


def test_on_the_wire_every_extractor_is_keywords() -> None:
    """A new value of ``source`` would be one that readers of version 1 refuse. Metrics have the extractor's name."""
    decision, task = forwarded(decide(record(encode(request(prompt="Summarise this text"))), open_extractor(), POOLS))
    assert isinstance(task, Task)
    assert (task.source, decision.source) == ("keywords", "linear")


@pytest.mark.parametrize(("value", "task_type"), [("R0402", "R0402"), (None, "unknown"), ("x" * 99, "x" * 64)])
def test_an_inference_has_the_routers_value_as_its_type(
    extractor: KeywordExtractor, value: str | None, task_type: str
) -> None:
    image = InferenceInput(kind=InputKind.IMAGE, data=b"Summarise the following text")
    asked = Inference(
        request_id="r1", pool=1, model="board", inputs=(image,), accepted_ms=5, deadline_ms=9, parameter=value
    )
    decision, task = forwarded(decide(record(encode(asked)), extractor, POOLS))
    assert task == Task(request=asked, task_type=task_type, source="client")
    assert (decision.partition, decision.request_id, decision.task_type) == (1, "r1", task_type)


def test_an_inference_that_can_not_be_read_is_buried_and_its_client_told(extractor: KeywordExtractor) -> None:
    value = msgspec.msgpack.encode({"kind": "inference", "v": 1, "request_id": "r1", "pool": 1, "inputs": []})
    decision = decide(record(value), extractor, POOLS)
    assert isinstance(decision, Bury)
    assert decision.rejected is not None
    assert decision.rejected.request_id == "r1"


@pytest.mark.parametrize("prompt", ["", "zzz"])
def test_without_a_keyword_it_is_unknown(extractor: KeywordExtractor, prompt: str) -> None:
    _, task = forwarded(decide(record(encode(request(prompt=prompt))), extractor, POOLS))
    assert isinstance(task, Task)
    assert task.task_type == "unknown"


@pytest.mark.parametrize("given_type", ["question", "haiku", "unknown"])
def test_what_the_client_says_wins(extractor: KeywordExtractor, given_type: str) -> None:
    asked = request(prompt="Summarise the following text", task_type=given_type)
    _, task = forwarded(decide(record(encode(asked)), extractor, POOLS))
    assert task == Task(request=asked, task_type=given_type, source="client")


def test_a_cancel_goes_on_as_it_came(extractor: KeywordExtractor) -> None:
    fields = msgspec.msgpack.decode(encode(Cancel(request_id="r1", pool=0, deadline_ms=9, reason="gone")))
    value = msgspec.msgpack.encode({**fields, "of a later version": [1]})
    decision, _ = forwarded(decide(record(value), extractor, POOLS))
    assert decision.value == value
    assert decision.partition == 0


@pytest.mark.parametrize(
    ("value", "reason", "rejected"),
    [
        (None, "without a value", None),
        (b"\xc1garbage", "not a record", None),
        (msgspec.msgpack.encode({"v": 1, "kind": "request"}), "", None),
        (msgspec.msgpack.encode({"v": 1, "kind": "request", "request_id": "r1", "pool": 1}), "", Rejected),
        (
            msgspec.msgpack.encode({"v": 2, "kind": "request", "request_id": "r1", "pool": 0}),
            "schema version",
            Rejected,
        ),
        (msgspec.msgpack.encode({"v": 1, "kind": "outcome", "request_id": "r1", "pool": 0}), "", Rejected),
        (msgspec.msgpack.encode({"v": 1, "kind": "request", "request_id": "r1", "pool": 2}), "", None),
        (msgspec.msgpack.encode({"v": 1, "kind": "request", "request_id": "r1", "pool": -1}), "", None),
        (msgspec.msgpack.encode({"v": 1, "kind": "request", "request_id": "", "pool": 0}), "", None),
        (encode(request(pool=POOLS)), "pool 2", None),
        (encode(Cancel(request_id="r1", pool=7, deadline_ms=9)), "pool 7", None),
    ],
)
def test_what_can_not_go_on_is_buried(
    extractor: KeywordExtractor, value: bytes | None, reason: str, rejected: type[Rejected] | None
) -> None:
    decision = decide(record(value), extractor, POOLS)
    assert isinstance(decision, Bury)
    letter = decision.letter
    assert reason in letter.reason
    assert (letter.topic, letter.partition, letter.offset, letter.service) == ("requests", 3, 17, "tasktype")
    assert (letter.key, letter.payload) == (b"r1", value)
    assert (decision.rejected is None) == (rejected is None)
    if decision.rejected is not None:
        assert (decision.rejected.request_id, letter.request_id) == ("r1", "r1")
        assert decision.rejected.reason == letter.reason


@given(st.binary(max_size=200))
def test_no_payload_is_too_strange(payload: bytes) -> None:
    decision = decide(record(payload), EXTRACTOR, POOLS)
    assert isinstance(decision, Bury)
    assert len(encode(decision.letter)) < len(payload) + 2000
    smaller = without_payload(decision.letter)
    assert smaller.payload is None
    assert str(len(payload)) in smaller.reason
