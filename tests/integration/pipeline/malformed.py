"""Unreadable records of many kinds, the same ones every time."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

SAMPLES = Path(__file__).resolve().parents[2] / "contract" / "payloads" / "v1.json"
_BROKEN_FIELDS = {
    "requests": ("prompt_ids", "sampling", "deadline_ms", "accepted_ms"),
    "tasks": ("request", "reason", "deadline_ms"),
    "journal": ("epoch", "read_to", "scheduler", "worker"),
    "traces": ("rows", "layers", "experts", "dtype"),
    "members": ("ttl_ms", "address", "instance", "member"),
}


@dataclass(frozen=True)
class Bad:
    """``request_id``: one that can be read all the same, of a request of pool 0."""

    kind: str
    value: bytes | None
    key: bytes
    request_id: str | None = None


def samples(topic: str) -> list[dict[str, Any]]:
    """Version 1's committed payloads of the topic as maps, fields of the future included."""
    committed = json.loads(SAMPLES.read_text())
    return [msgspec.msgpack.decode(base64.b64decode(one["base64"])) for one in committed if one["topic"] == topic]


def malformed(topic: str, count: int, seed: int = 5) -> list[Bad]:
    draw = random.Random(f"{topic} {seed}")
    makers = (_noise, _truncated, _no_map, _broken, _version, _kind, _followed, _not_text, _deep, _missing)
    made = _each(topic, draw, makers)
    return [next(made) for _ in range(count)]


def _each(topic: str, draw: random.Random, makers: tuple[Callable[..., Bad | None], ...]) -> Iterator[Bad]:
    number = 0
    while True:
        for make in makers:
            number += 1
            bad = make(topic, draw, f"bad-{topic}-{number}")
            if bad is not None:
                yield bad


def _bad(
    make: str, topic: str, name: str, content: bytes | dict[str, Any] | None, request_id: str | None = None
) -> Bad:
    """``request_id`` counts where a request is owed an outcome for it."""
    value = msgspec.msgpack.encode(content) if isinstance(content, dict) else content
    return Bad(make, value, name.encode(), request_id if topic in ("requests", "tasks") else None)


def _sample(topic: str, draw: random.Random, name: str) -> dict[str, Any]:
    """A valid record of an id of its own."""
    content = dict(draw.choice(samples(topic)))
    for owner in (content, content.get("request")):
        if isinstance(owner, dict) and "request_id" in owner:
            owner["request_id"] = name
            if "pool" in owner:
                owner["pool"] = 0
    if topic == "members":
        content |= {"instance": name, "address": "127.0.0.1:1", "pool": 0}
    return content


def _named(content: dict[str, Any]) -> str | None:
    """The id that can be read, where the pool can be too; a task's are its request's."""
    owner = content.get("request", content)
    return owner.get("request_id") if isinstance(owner, dict) else None


def _noise(topic: str, draw: random.Random, name: str) -> Bad:
    return _bad("noise", topic, name, draw.randbytes(draw.randrange(200)))


def _truncated(topic: str, draw: random.Random, name: str) -> Bad:
    whole = msgspec.msgpack.encode(_sample(topic, draw, name))
    return _bad("truncated", topic, name, whole[: draw.randrange(1, len(whole))])


def _no_map(topic: str, draw: random.Random, name: str) -> Bad:
    return _bad("no map", topic, name, msgspec.msgpack.encode(draw.choice([None, 1, 1.5, "text", b"bytes", [1, 2]])))


def _broken(topic: str, draw: random.Random, name: str) -> Bad | None:
    content = _sample(topic, draw, name)
    named = _named(content)
    field = draw.choice([field for field in _BROKEN_FIELDS[topic] if field in content])
    if field == "request" and draw.random() < 0.5:
        content[field]["prompt_ids"] = "these are no numbers"
    else:
        content[field] = 7 if field == "instance" else ["thing"]
    return _bad("broken body", topic, name, content, named if isinstance(content.get("request", {}), dict) else None)


def _version(topic: str, draw: random.Random, name: str) -> Bad:
    content = _sample(topic, draw, name) | {"v": draw.choice([0, 2, 99, "1", None])}
    return _bad("version", topic, name, content, _named(content))


def _kind(topic: str, draw: random.Random, name: str) -> Bad:
    content = _sample(topic, draw, name) | {"kind": draw.choice(["dead-letter", "", "Request", 5, None])}
    return _bad("kind", topic, name, content, _named(content))


def _followed(topic: str, draw: random.Random, name: str) -> Bad:
    return _bad("followed", topic, name, msgspec.msgpack.encode(_sample(topic, draw, name)) + draw.randbytes(3))


def _not_text(topic: str, draw: random.Random, name: str) -> Bad:
    """Where a text should be there are bytes that are no UTF-8."""
    content = msgspec.msgpack.encode({"v": 1, "kind": "xxxx"})
    return _bad("no UTF-8", topic, name, content.replace(b"xxxx", b"\xff\xfe\xc3\x28"))


def _deep(topic: str, draw: random.Random, name: str) -> Bad:
    return _bad("deep", topic, name, b"\x91" * draw.choice([200, 5_000, 50_000]) + b"\x01")


def _missing(topic: str, draw: random.Random, name: str) -> Bad | None:
    """No value at all; on a compacted topic that means something."""
    return None if topic == "members" else _bad("nothing", topic, name, draw.choice([None, b""]))
