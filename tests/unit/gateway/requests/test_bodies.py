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
from greenroom.gateway.replies.reply_headers import REPLY_ID_HEADER
from greenroom.gateway.requests.bodies import (
    HINTS,
    HINTS_IN_MESSAGE,
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    NEUTRAL_IN_MESSAGE,
    NEUTRAL_IN_STREAM_OPTIONS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    StreamOptions,
    decode_body,
    hints_in,
    refuse_unsupported,
)
from greenroom.gateway.requests.call_headers import IDEMPOTENCY_HEADER, PRIORITY_HEADER, SLO_HEADERS

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
BODIES: dict[type[GenerationBody], dict[str, Any]] = {ChatBody: CHAT, CompletionBody: COMPLETION}
TABLES = {ChatBody: {**NEUTRAL, **NEUTRAL_IN_CHAT}, CompletionBody: NEUTRAL}
UNSUPPORTED = [
    (kind, field) for kind, table in TABLES.items() for field in sorted(table) if field in kind.__struct_fields__
]
ASKS_FOR_MORE: dict[str, Any] = {
    "best_of": 3,
    "response_format": {"type": "json_object"},
    "tool_choice": "auto",
    "parallel_tool_calls": "yes",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


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
    for value in (None, *TABLES[kind][field]):
        decode(kind, {**BODIES[kind], field: value})
    for value in (ASKS_FOR_MORE.get(field, {"some": "thing"}), "junk", 3, [3]):
        with pytest.raises(InvalidRequest, match=rf"^{field} is not supported; leave it out") as caught:
            decode(kind, {**BODIES[kind], field: value})
        assert (caught.value.param, caught.value.code) == (field, "unsupported_field")


def test_the_best_of_all_that_are_told_are_all_of_them() -> None:
    """Some clients send it with n, since OpenAI's best_of must not be less."""
    for count in (1, 2, 7):
        body = decode(CompletionBody, {**COMPLETION, "n": count, "best_of": count})
        assert body.n == count
    for fields in ({"n": 2, "best_of": 3}, {"best_of": 2}, {"n": 2, "best_of": True}, {"n": 2, "best_of": "2"}):
        with pytest.raises(InvalidRequest, match=r"^best_of is not supported"):
            decode(CompletionBody, {**COMPLETION, **fields})


def test_the_refusal_says_what_may_be_sent() -> None:
    with pytest.raises(InvalidRequest, match=r"leave it out or send true or false$"):
        decode(ChatBody, {**CHAT, "parallel_tool_calls": "some"})
    with pytest.raises(InvalidRequest, match=r"leave it out$"):
        decode(ChatBody, {**CHAT, "audio": {}})


@pytest.mark.parametrize(
    ("field", "value"),
    [("length_penalty", True), ("best_of", True), ("echo", 0), ("skip_special_tokens", 1)],
)
def test_a_boolean_is_no_number(field: str, value: Any) -> None:
    kind = CompletionBody if field == "best_of" else ChatBody
    with pytest.raises(InvalidRequest, match=f"{field} is not supported"):
        decode(kind, {**BODIES[kind], field: value})


@pytest.mark.parametrize("choice", [{}, {"tool_choice": None}, {"tool_choice": "auto"}, {"tool_choice": "required"}])
def test_tools_that_could_be_called_are_refused_by_name(choice: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^tool(s|_choice) is not supported") as caught:
        decode(ChatBody, {**CHAT, "tools": TOOLS, **choice})
    assert caught.value.code == "unsupported_field"
    assert caught.value.param == ("tool_choice" if choice.get("tool_choice") else "tools")


def test_tools_that_are_not_to_be_called_are_taken() -> None:
    body = decode(ChatBody, {**CHAT, "tools": TOOLS, "tool_choice": "none"})
    assert isinstance(body, ChatBody)
    assert body.tools == TOOLS
    decode(ChatBody, {**CHAT, "tools": []})


def test_every_neutral_field_belongs_to_a_body() -> None:
    known = set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)
    assert set(NEUTRAL) <= known
    assert set(NEUTRAL_IN_CHAT) <= set(ChatBody.__struct_fields__)
    assert set(NEUTRAL_IN_MESSAGE) <= set(Message.__struct_fields__)
    assert set(NEUTRAL_IN_STREAM_OPTIONS) <= set(StreamOptions.__struct_fields__)
    assert set(HINTS) <= known
    assert set(HINTS_IN_MESSAGE) <= set(Message.__struct_fields__)
    assert not set(HINTS) & set(NEUTRAL)


def test_every_untyped_field_is_a_neutral_one_or_a_hint() -> None:
    """A field declared without a type and forgotten in the tables would be ignored without a word."""
    typed_hints = {"user", "safety_identifier"}
    tables: dict[type[msgspec.Struct], Collection[str]] = {
        ChatBody: {*NEUTRAL, *NEUTRAL_IN_CHAT, *HINTS} - typed_hints,
        CompletionBody: {*NEUTRAL, *HINTS} - typed_hints,
        Message: {*NEUTRAL_IN_MESSAGE, *HINTS_IN_MESSAGE},
        StreamOptions: NEUTRAL_IN_STREAM_OPTIONS,
    }
    for struct, table in tables.items():
        untyped = {field.name for field in msgspec.structs.fields(struct) if field.type is Any}
        assert untyped == set(table) & set(struct.__struct_fields__)


HINTED: dict[str, Any] = {
    "metadata": {"team": "a"},
    "store": True,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"x": 1},
    "prompt_cache_retention": "24h",
    "service_tier": "priority",
    "verbosity": "low",
    "user": "ann",
    "safety_identifier": "s",
    "cache_control": {"type": "ephemeral"},
}


@pytest.mark.parametrize("kind", BODIES)
def test_hints_are_taken_and_named(kind: type[GenerationBody]) -> None:
    assert set(HINTED) == set(HINTS)
    for field, value in HINTED.items():
        assert hints_in(decode(kind, {**BODIES[kind], field: value})) == (field,)
    assert set(hints_in(decode(kind, {**BODIES[kind], **HINTED}))) == set(HINTED)
    assert hints_in(decode(kind, BODIES[kind])) == ()


@pytest.mark.parametrize("field", sorted(HINTS))
def test_a_hint_that_says_nothing_is_not_named(field: str) -> None:
    for value in (None, *HINTS[field]):
        assert hints_in(decode(ChatBody, {**CHAT, field: value})) == ()


def test_hints_in_messages_are_named_once() -> None:
    """However many there are, a header has room for them."""
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    talk = [
        {"role": "user", "content": [part, part], "cache_control": {}},
        {"role": "assistant", "content": "x", "reasoning_content": "well", "reasoning": "hm"},
    ]
    assert hints_in(decode(ChatBody, {**CHAT, "messages": talk * 500, "store": True})) == (
        "store",
        "messages[].cache_control",
        "messages[].content[].cache_control",
        "messages[].reasoning",
        "messages[].reasoning_content",
    )


@pytest.mark.parametrize(
    ("text", "escape", "at"),
    [
        (rb"\ud800", r"\ud800", 10),
        (rb"\udc00 and more", r"\udc00", 10),
        (rb"\ud83d\u0041", r"\ud83d", 10),
        (rb"\ud83d\ude80 \uD83D", r"\uD83D", 23),
        (rb"\\\ud800", r"\ud800", 12),
    ],
)
def test_half_a_surrogate_pair_is_told_as_such(text: bytes, escape: str, at: int) -> None:
    """To the decoder it looks like the end of the body."""
    with pytest.raises(InvalidRequest) as caught:
        decode_body(b'{"model":"' + text + b'"}', ChatBody)
    assert caught.value.code == "invalid_json"
    assert f"{escape} at byte {at} is half of a surrogate pair" in str(caught.value)


@pytest.mark.parametrize("raw", [b'{"model":"abc', rb'{"model":"\\ud800', rb'{"model":"\ud83d\ude80'])
def test_what_is_cut_off_is_told_as_such(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="truncated"):
        decode_body(raw, ChatBody)


def test_the_documentation_names_every_field() -> None:
    page = (Path(__file__).parents[4] / "docs" / "architecture" / "http-api.md").read_text(encoding="utf-8")
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
    root = Path(__file__).parents[4]
    page = (root / "docs" / "architecture" / "http-api.md").read_text(encoding="utf-8")
    sources = [*(root / "services/greenroom/gateway").rglob("*.py"), *(root / "services/greenroom/text").rglob("*.py")]
    found = set().union(*map(codes_in, sources))
    assert found >= {"saturated", "shed", "idempotency_conflict", "invalid_api_key", "rate_limited", "cancelled"}
    assert {name for name in found if f"`{name}`" not in page} == set()
    for header in (*SLO_HEADERS.values(), PRIORITY_HEADER, IDEMPOTENCY_HEADER, REPLY_ID_HEADER):
        assert f"`{header.lower()}" in page.lower()
