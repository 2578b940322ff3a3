"""Request bodies: every field of OpenAI's API. None is ignored silently.

A field is one of four kinds: supported; a hint (``HINTS``), on which no answer depends and which the reply's header
names; neutral (``NEUTRAL``), taken only at the values that ask for nothing; or unknown. Every other value is an
InvalidRequest that names the field. docs/architecture/http-api.md has the same as tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from greenroom.core.errors import InvalidRequest

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Body = TypeVar("Body", bound="GenerationBody")
T = TypeVar("T", bound=Struct)

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that are not supported, with the values that ask for nothing. Null always asks for nothing."""

NEUTRAL_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    "echo": (False,),
}
"""Those that are supported in completions alone."""

NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""The same for the fields of a message. A reply that is sent back as it came has them."""

HINTS: Mapping[str, tuple[object, ...]] = {
    "cache_control": (),
    "metadata": ({},),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "user": (),
    "verbosity": ("medium",),
}
"""Fields that no answer depends on, with the values at which they say nothing. Null always says nothing."""

HINTS_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "cache_control": (),
    "reasoning": (),
    "reasoning_content": (),
}
"""The same for the fields of a message. A model's reasoning of earlier turns is left out of the prompt."""

ONLY_OF_THE_ASSISTANT: Mapping[str, tuple[object, ...]] = {"reasoning": (), "reasoning_content": ()}
"""Unsupported in messages of other roles."""

HINT_IN_CONTENT = "cache_control"
"""The same for a part of a message's content."""

NEUTRAL_IN_STREAM_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "include_obfuscation": (False,),
}


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's
    include_obfuscation: Any = None


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    annotations: Any = None
    audio: Any = None
    cache_control: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_call_id: Any = None
    tool_calls: Any = None


class SloBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the client hopes for, in milliseconds from acceptance; ``tpot_ms`` between tokens."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


class GenerationBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both APIs take."""

    model: str
    n: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    max_tokens: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # not OpenAI's, but vLLM's
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    # greenroom's own
    task_type: str | None = None
    slo: SloBody | None = None
    priority: Int64 | None = None
    timeout: float | None = None
    # hints, in both
    cache_control: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    # neutral only, in both
    length_penalty: Any = None
    response_format: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    audio: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    tool_choice: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Int64 | str | list[Int64]]
    logprobs: Int64 | None = None
    echo: bool | None = None
    best_of: Any = None
    suffix: Any = None


_DECODERS: Mapping[type[Struct], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatBody, CompletionBody)
}
_TOP_LEVEL = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"%b%b|(?P<lone>%b|%b)|\\." % (_HIGH, _LOW, _HIGH, _LOW), re.DOTALL)
_NAMED = re.compile(r"(?:unknown|required) field `([^`]*)`")


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """The body as ``kind``. Raises InvalidRequest, naming the field at fault."""
    body: Body = decode_json(raw, _DECODERS[kind], kind)
    if isinstance(body, CompletionBody) and _same(body.best_of, body.n):
        body.best_of = None  # all that are made are told
    refuse_unsupported(body, NEUTRAL)
    if isinstance(body, ChatBody):
        refuse_unsupported(body, NEUTRAL_IN_CHAT)
        if body.tools and body.tool_choice != "none":
            raise InvalidRequest(
                'tools is not supported, since none can be called; leave it out or send tool_choice "none" with it: '
                "then the chat template is told of them",
                param="tools",
                code="unsupported_field",
            )
    if body.stream_options is not None:
        refuse_unsupported(body.stream_options, NEUTRAL_IN_STREAM_OPTIONS, "stream_options.")
    return body


def decode_json(raw: bytes, decoder: msgspec.json.Decoder[T], kind: type[T]) -> T:
    """The JSON in ``raw`` as ``kind``. Raises InvalidRequest, naming the field at fault."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise not_valid(raw, kind, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = _lone_surrogate(raw) or str(error)
        raise InvalidRequest(f"the body is not valid JSON: {what}", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error


def _lone_surrogate(raw: bytes) -> str | None:
    """What is wrong where half of a character is escaped, which the decoder takes for the end of the body. None where
    no half is escaped."""
    for found in _ESCAPES.finditer(raw):
        if found["lone"] is not None:
            escape = found["lone"].decode()
            return (
                f"{escape} at byte {found.start()} is half of a surrogate pair, and the other half is not beside it: "
                "leave it out, or send both"
            )
    return None


def hints_in(body: GenerationBody) -> tuple[str, ...]:
    """The hints that ``body`` has, in order and each once. ``messages[].cache_control`` stands for those of all
    messages, so that they fit into a header."""
    found = _hints(body, HINTS)
    if isinstance(body, ChatBody):
        for message in body.messages:
            found += _hints(message, HINTS_IN_MESSAGE, "messages[].")
            if isinstance(message.content, list) and any(HINT_IN_CONTENT in part for part in message.content):
                found.append(f"messages[].content[].{HINT_IN_CONTENT}")
    return tuple(dict.fromkeys(found))


def _hints(part: Struct, hints: Mapping[str, tuple[object, ...]], where: str = "") -> list[str]:
    said = ((field, getattr(part, field)) for field in hints)
    return [
        where + field
        for field, value in said
        if value is not None and not any(_same(value, silent) for silent in hints[field])
    ]


def refuse_unsupported(part: Struct, neutral: Mapping[str, tuple[object, ...]], where: str = "") -> None:
    """Raises InvalidRequest for the first field of ``part`` that asks for something which is not supported."""
    for field in part.__struct_fields__:
        allowed = neutral.get(field)
        if allowed is None:
            continue
        value = getattr(part, field)
        if value is None or any(_same(value, neutral_value) for neutral_value in allowed):
            continue
        instead = " or ".join(msgspec.json.encode(choice).decode() for choice in allowed)
        hint = f"leave it out{f' or send {instead}' if instead else ''}"
        raise InvalidRequest(f"{where}{field} is not supported; {hint}", param=where + field, code="unsupported_field")


def _same(value: object, neutral: object) -> bool:
    """Whether both are equal as JSON values, where a boolean is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def not_valid(raw: bytes, kind: type[Struct], message: str) -> InvalidRequest:
    """What a decoder's ``message`` says of a body that is no ``kind``, with the field at fault."""
    at = _AT.search(message)
    path = at[1] if at else ""
    named = _NAMED.search(message)
    if named is None:
        return InvalidRequest(
            _say(message[: at.start()] if at else message, path), param=path or None, code="invalid_type"
        )
    if "required" in message:
        field = f"{path}.{named[1]}" if path else named[1]
        return InvalidRequest(f"{field} is missing", param=field, code="missing_field")
    first = f"{named[1]:.64}"
    unknown = [f"{path}.{first}"] if path else _unknown_fields(raw, kind) or [first]
    return InvalidRequest(f"unknown field: {', '.join(unknown)}", param=unknown[0], code="unknown_field")


def _unknown_fields(raw: bytes, kind: type[Struct]) -> list[str]:
    """All unknown fields, so that a client learns of them at once. Long names are cut. Empty if the rest of the body
    can not be read: the first unknown field is found before the end is read."""
    try:
        fields = _TOP_LEVEL.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return [f"{field:.64}" for field in fields if field not in kind.__struct_fields__][:16]


def _say(what: str, path: str) -> str:
    return f"{path or 'the body'}: {what[0].lower()}{what[1:]}"
