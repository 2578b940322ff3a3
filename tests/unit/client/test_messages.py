"""From a client's words to messages and back."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.client import FinishReason, Options, Slo, Tls
from greenroom.client.messages import Joiner, to_metadata, to_request
from greenroom.client.settings import Settings, as_addresses
from greenroom.core.errors import InvalidConfig, InvalidRequest
from greenroom.v1 import common_pb2, inference_pb2


def test_a_request_says_what_was_said_and_no_more() -> None:
    assert to_request("hi", {}) == inference_pb2.GenerateRequest(text="hi")
    options: Options = {
        "model": "m", "max_tokens": 3, "temperature": 0.0, "top_p": 0.5, "top_k": 4, "seed": -1, "stop": "x",
        "stop_token_ids": [1], "ignore_eos": True, "logprobs": 0, "task_type": "sort", "priority": -5,
        "slo": Slo(ttft_ms=100), "timeout_s": 1.5, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.2, "logit_bias": {7: -3.0}, "min_tokens": 2, "prompt_logprobs": 4,
    }  # fmt: skip
    request = to_request("hi", options)
    assert (request.model, request.max_tokens, request.seed, list(request.stop)) == ("m", 3, -1, ["x"])
    assert request.HasField("temperature")
    assert request.HasField("logprobs")
    assert (request.slo.ttft_ms, request.slo.HasField("e2e_ms"), request.timeout_ms) == (100, False, 1500)
    assert (request.min_p, request.presence_penalty, request.frequency_penalty) == (0.1, 1.0, -1.0)
    assert (request.repetition_penalty, dict(request.logit_bias)) == (1.2, {7: -3.0})
    assert (request.min_tokens, request.prompt_logprobs) == (2, 4)
    assert list(to_request("hi", {"stop": ["a", "b"]}).stop) == ["a", "b"]


def test_the_kinds_of_prompt() -> None:
    chat = to_request(None, {"messages": [{"role": "user", "content": "hi"}]})
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "hi")]
    assert to_request(None, {"messages": []}).WhichOneof("prompt") == "chat"
    assert list(to_request(None, {"token_ids": [1, 2]}).token_ids.ids) == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (None, {}, "one of them"),
        ("a", {"messages": []}, "one of them"),
        (None, {"messages": [], "token_ids": []}, "one of them"),
        ("a", {"max_tokens": -1}, "wrong type or range"),
        ("a", {"temperature": "hot"}, "wrong type or range"),
        (None, {"token_ids": [-1]}, "wrong type or range"),
        (None, {"messages": [{"role": "user"}]}, "wrong type or range"),
        ("a", {"colour": 1}, "unknown option 'colour'; known: .*max_tokens"),
    ],
)
def test_what_can_be_refused_here(prompt: str | None, options: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        to_request(prompt, options)


def test_metadata() -> None:
    settings = Settings(addresses=("a:1",), api_key="grk_x")
    assert to_metadata(settings, {}) == (("authorization", "Bearer grk_x"),)
    options: Options = {"idempotency_key": "k", "request_id": "r"}
    assert to_metadata(Settings(addresses=("a:1",)), options) == (("idempotency-key", "k"), ("x-request-id", "r"))


@pytest.mark.parametrize(
    "fields",
    [
        {"addresses": ()},
        {"addresses": ("a",)},
        {"addresses": (":1",)},
        {"addresses": ("a:0",)},
        {"addresses": ("a:1",), "api_key": "a b"},
        {"addresses": ("a:1",), "timeout_s": 0},
        {"addresses": ("a:1",), "max_retries": -1},
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Settings(**fields)
    assert caught.value.field in fields
    assert "a b" not in str(caught.value), "a key is not shown"


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"ca: .*PEM file"):
        Tls(ca=tmp_path / "none.pem").credentials()


def test_addresses() -> None:
    assert as_addresses("a:1, b:2,") == ("a:1", "b:2")
    assert as_addresses(["[::1]:8001"]) == ("[::1]:8001",)


def event(start: int, ids: list[int], text: str, *, end: bool = False) -> inference_pb2.GenerateEvent:
    made = inference_pb2.GenerateEvent(request_id="r", text=text, tokens=common_pb2.TokenRun(start=start, ids=ids))
    if end:
        made.end.reason = common_pb2.END_REASON_STOP
        made.end.usage.completion_tokens = start + len(ids)
    return made


def answer(cuts: list[int]) -> list[inference_pb2.GenerateEvent]:
    """Twenty tokens, some of no text, some of several characters, cut into events."""
    texts = ["" if token % 4 == 1 else "ab" * (token % 3) + "é" for token in range(20)]
    places = sorted({0, *(cut for cut in cuts if 0 < cut < 20), 20})
    pieces = list(itertools.pairwise(places))
    return [
        event(begin, list(range(begin, stop)), "".join(texts[begin:stop]), end=stop == 20) for begin, stop in pieces
    ]


CUTS = st.lists(st.integers(1, 19), max_size=8)


@given(attempts=st.lists(st.tuples(CUTS, st.integers(0, 8)), max_size=4), last=CUTS)
def test_an_answer_that_broke_off_goes_on_where_it_was(attempts: list[tuple[list[int], int]], last: list[int]) -> None:
    joiner = Joiner()
    parts = []
    for cuts, kept in attempts:
        events = answer(cuts)[:-1][:kept]
        parts += [part for part in map(joiner.push, events) if part is not None]
        joiner.again()
    parts += [part for part in map(joiner.push, answer(last)) if part is not None]
    assert "".join(part.text for part in parts) == "".join(one.text for one in answer([]))
    assert [token.index for part in parts for token in part.tokens] == list(range(20))
    assert [part.reason for part in parts] == [None] * (len(parts) - 1) + [FinishReason.STOP]
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 20


def test_it_brings_no_server_and_no_torch() -> None:
    script = (
        "import sys; import greenroom.client; "
        "bad = [name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'aiohttp', 'aiokafka')"
        " or name.startswith(('greenroom.gateway', 'greenroom.moe', 'greenroom.worker', 'greenroom.scheduler'))]; "
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
