"""Every field of OpenAI's API is supported, or refused by name unless it asks for nothing."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat import (
    chat_completion_assistant_message_param,
    chat_completion_stream_options_param,
    completion_create_params,
)
from openai.types.completion_create_params import CompletionCreateParamsBase

from greenroom.core.errors import InvalidRequest
from greenroom.gateway.exchange import REPLY_ID_HEADER
from greenroom.gateway.schema import (
    NEUTRAL,
    NEUTRAL_IN_MESSAGE,
    NEUTRAL_IN_STREAM_OPTIONS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    StreamOptions,
    decode_body,
    refuse_unsupported,
)
from greenroom.gateway.terms import IDEMPOTENCY_HEADER, PRIORITY_HEADER, SLO_HEADERS

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
BODIES: dict[type[GenerationBody], dict[str, Any]] = {ChatBody: CHAT, CompletionBody: COMPLETION}
UNSUPPORTED = [(kind, field) for kind in BODIES for field in sorted(NEUTRAL) if field in kind.__struct_fields__]
ASKS_FOR_MORE: dict[str, Any] = {
    "best_of": 3,
    "frequency_penalty": 0.5,
    "logit_bias": {"7": -100},
    "min_tokens": 3,
    "presence_penalty": -0.5,
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": "yes",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "min_p": 0.1,
}


def decode(kind: type[GenerationBody], body: dict[str, Any]) -> GenerationBody:
    return decode_body(msgspec.json.encode(body), kind)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (completion_create_params.CompletionCreateParamsBase, ChatBody),
        (CompletionCreateParamsBase, CompletionBody),
        (chat_completion_assistant_message_param.ChatCompletionAssistantMessageParam, Message),
        (chat_completion_stream_options_param.ChatCompletionStreamOptionsParam, StreamOptions),
    ],
)
def test_every_field_of_the_installed_openai_package_is_known(theirs: Any, ours: type[msgspec.Struct]) -> None:
    assert set(theirs.__annotations__) - set(ours.__struct_fields__) == set()


@pytest.mark.parametrize(("kind", "field"), UNSUPPORTED)
def test_unsupported_fields_are_taken_at_their_neutral_values_only(kind: type[GenerationBody], field: str) -> None:
    for value in (None, *NEUTRAL[field]):
        decode(kind, {**BODIES[kind], field: value})
    for value in (ASKS_FOR_MORE.get(field, {"some": "thing"}), "junk", 3, [3]):
        with pytest.raises(InvalidRequest, match=rf"^{field} is not supported; leave it out") as caught:
            decode(kind, {**BODIES[kind], field: value})
        assert (caught.value.param, caught.value.code) == (field, "unsupported_field")


def test_the_refusal_says_what_may_be_sent() -> None:
    with pytest.raises(InvalidRequest, match=r'leave it out or send "auto" or "default"$'):
        decode(ChatBody, {**CHAT, "service_tier": "priority"})
    with pytest.raises(InvalidRequest, match=r"leave it out$"):
        decode(ChatBody, {**CHAT, "audio": {}})


@pytest.mark.parametrize(
    ("field", "value"),
    [("frequency_penalty", False), ("store", 0), ("best_of", True), ("echo", 0), ("skip_special_tokens", 1)],
)
def test_a_boolean_is_no_number(field: str, value: Any) -> None:
    kind = CompletionBody if field in CompletionBody.__struct_fields__ else ChatBody
    with pytest.raises(InvalidRequest, match=f"{field} is not supported"):
        decode(kind, {**BODIES[kind], field: value})


def test_every_neutral_field_belongs_to_a_body() -> None:
    known = set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)
    assert set(NEUTRAL) <= known
    assert set(NEUTRAL_IN_MESSAGE) <= set(Message.__struct_fields__)
    assert set(NEUTRAL_IN_STREAM_OPTIONS) <= set(StreamOptions.__struct_fields__)


def test_every_untyped_field_is_a_neutral_one() -> None:
    """A field declared without a type and forgotten in the table would be ignored."""
    tables: dict[type[msgspec.Struct], Collection[str]] = {
        ChatBody: NEUTRAL,
        CompletionBody: NEUTRAL,
        Message: NEUTRAL_IN_MESSAGE,
        StreamOptions: NEUTRAL_IN_STREAM_OPTIONS,
    }
    for struct, table in tables.items():
        untyped = {field.name for field in msgspec.structs.fields(struct) if field.type is Any}
        assert untyped == set(table) & set(struct.__struct_fields__)


def test_the_documentation_names_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "architecture" / "http-api.md").read_text(encoding="utf-8")
    for struct in (ChatBody, CompletionBody, Message, StreamOptions):
        missing = [field for field in struct.__struct_fields__ if f"`{field}`" not in page]
        assert missing in ([], ["role"])


def test_all_unknown_fields_are_named_at_once() -> None:
    with pytest.raises(InvalidRequest, match=r"^unknown field: colour, shape$") as caught:
        decode(ChatBody, {**CHAT, "colour": 1, "shape": 2})
    assert caught.value.param == "colour"


def test_an_unknown_field_before_a_broken_rest_is_still_named() -> None:
    with pytest.raises(InvalidRequest, match="unknown field: x"):
        decode_body(b'{"x":1,"model":"\\ud800"}', ChatBody)


def test_long_names_are_cut() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(ChatBody, {**CHAT, "x" * 5000: 1})
    assert len(str(caught.value)) < 100


def test_a_part_of_a_message_names_its_place() -> None:
    message = Message(role="assistant", content="x", tool_calls=[{}])
    with pytest.raises(InvalidRequest, match=r"messages\[3\]\.tool_calls is not supported"):
        refuse_unsupported(message, NEUTRAL_IN_MESSAGE, "messages[3].")


CODE_AT = {"unavailable": 1, "too_many": 1, "failed": 1, "_refused": 1, "Refusal": 0}
"""Where functions of the gateway take a code, beside those that take it by name."""


def codes_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        given: list[ast.expr] = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        if isinstance(node.func, ast.Name) and node.func.id in CODE_AT:
            given += node.args[CODE_AT[node.func.id] :][:1]
        found |= {each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found


def test_the_documentation_names_every_code_and_header() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "architecture" / "http-api.md").read_text(encoding="utf-8")
    sources = [*(root / "services/greenroom/gateway").glob("*.py"), *(root / "services/greenroom/text").glob("*.py")]
    found = set().union(*map(codes_in, sources))
    assert found >= {"saturated", "shed", "idempotency_conflict", "invalid_api_key", "rate_limited", "cancelled"}
    assert {name for name in found if f"`{name}`" not in page} == set()
    for header in (*SLO_HEADERS.values(), PRIORITY_HEADER, IDEMPOTENCY_HEADER, REPLY_ID_HEADER):
        assert f"`{header.lower()}" in page.lower()
