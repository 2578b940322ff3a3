"""Payloads of version 1, as they were written once, are read for ever; and no change breaks a reader."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenroom.core.messages import JournalRecord, Member, Message, RequestRecord, TaskRecord, Trace, decode, encode
from greenroom.core.messages.dead_letters import DeadLetter
from tests.contract.payloads.schema import MESSAGES, Schema, breaks, present

HERE = Path(__file__).parent
SAMPLES: list[dict[str, Any]] = json.loads((HERE / "v1.json").read_text())
PROMISED: Schema = json.loads((HERE / "v1-schema.json").read_text())
TOPICS = {
    "requests": RequestRecord,
    "tasks": TaskRecord,
    "journal": JournalRecord,
    "traces": Trace,
    "members": Member,
    "dead-letters": DeadLetter,
}
HOW = """
Topics may hold records of before, and services of two versions run side by side while they are replaced. So:
- a field that has a default may be added; then write the promise anew:
    python -m tests.contract.payloads.schema > tests/contract/payloads/v1-schema.json
- anything else is a new version: add a message type with v: Literal[2] beside the old one, read both, deploy the
  readers, then write the new one; keep v1.json, and put v2.json and v2-schema.json beside it.
See docs/architecture/topics.md.
"""


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample['topic']}-{sample['name']}")
def test_what_was_written_once_is_read(sample: dict[str, Any]) -> None:
    read: Message = decode(base64.b64decode(sample["base64"]), TOPICS[sample["topic"]])
    assert _without_news(json.loads(msgspec.json.encode(read)), sample["reads"]) == sample["reads"], HOW


def _without_news(read: Any, expected: Any) -> Any:
    """``read`` without the fields that were not there when ``expected`` was written."""
    if isinstance(read, dict) and isinstance(expected, dict):
        return {key: _without_news(value, expected[key]) for key, value in read.items() if key in expected}
    return read


def test_every_message_has_a_full_sample_and_a_bare_one_with_fields_of_the_future() -> None:
    assert {(sample["reads"]["kind"], sample["name"]) for sample in SAMPLES} == {
        (msgspec.inspect.type_info(message).tag, name)  # type: ignore[attr-defined]
        for message in MESSAGES
        for name in ("full", "bare")
    }
    for sample in SAMPLES:
        assert "from_the_future" in msgspec.msgpack.decode(base64.b64decode(sample["base64"]))


def test_what_is_written_now_is_what_was_promised() -> None:
    """The names on the wire: what is read is written again with the same ones."""
    for sample in SAMPLES:
        data = base64.b64decode(sample["base64"])
        written = msgspec.msgpack.decode(encode(decode(data, TOPICS[sample["topic"]])))
        assert set(msgspec.msgpack.decode(data)) - {"from_the_future"} <= set(written)
        assert written["v"] == 1


def test_nothing_that_was_promised_is_broken() -> None:
    assert not breaks(PROMISED, present()), "\n".join([*breaks(PROMISED, present()), HOW])


def test_the_promise_is_written_down_in_full() -> None:
    assert present() == PROMISED, f"the payloads have changed, compatibly or not.{HOW}"


def _remove(schema: Schema) -> None:
    del schema["Request"]["fields"]["prompt"]


def _retype(schema: Schema) -> None:
    schema["Trace"]["fields"]["rows"]["type"] = "float"


def _require(schema: Schema) -> None:
    schema["Member"]["fields"]["pool"]["required"] = True


def _release(schema: Schema) -> None:
    schema["Claim"]["fields"]["read_to"]["required"] = False


def _redefine(schema: Schema) -> None:
    schema["Outcome"]["fields"]["keyed"]["default"] = "True"


def _retag(schema: Schema) -> None:
    schema["Task"]["tag"] = "job"


def _reorder(schema: Schema) -> None:
    schema["Attempt"]["fields"] = dict(reversed(schema["Attempt"]["fields"].items()))


def _drop(schema: Schema) -> None:
    del schema["Cancel"]


def _demand(schema: Schema) -> None:
    schema["Slo"]["fields"]["x"] = {"type": "int", "required": True, "default": None}


def _insert(schema: Schema) -> None:
    new = {"x": {"type": "int", "required": False, "default": "0"}}
    schema["Attempt"]["fields"] = new | schema["Attempt"]["fields"]


def _widen(schema: Schema) -> None:
    schema["Cancel"]["fields"]["reason"]["type"] += " | none"


@pytest.mark.parametrize(
    "change", [_widen, _remove, _retype, _require, _release, _redefine, _retag, _reorder, _drop, _demand, _insert]
)
def test_a_breaking_change_is_found(change: Callable[[Schema], None]) -> None:
    now = copy.deepcopy(PROMISED)
    change(now)
    assert breaks(PROMISED, now)


def test_a_field_with_a_default_may_be_added_and_a_kind_of_record_too() -> None:
    now = copy.deepcopy(PROMISED)
    now["Request"]["fields"]["x"] = {"type": "int", "required": False, "default": "0"}
    now["Attempt"]["fields"]["x"] = {"type": "int", "required": False, "default": "0"}
    now["New"] = {"tag": "new", "array": False, "fields": {}}
    now["Task"]["fields"]["request"]["type"] += " | New"
    assert breaks(PROMISED, now) == []
