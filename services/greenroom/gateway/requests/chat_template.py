"""A chat as the text that the model's chat template makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from greenroom.core.errors import InvalidRequest
from greenroom.gateway.requests.bodies import (
    HINT_IN_CONTENT,
    NEUTRAL_IN_MESSAGE,
    ONLY_OF_THE_ASSISTANT,
    ChatBody,
    Message,
    refuse_unsupported,
)
from greenroom.text import ChatTemplate

ROLES = ("system", "developer", "user", "assistant")


def rendered_chat(body: ChatBody, template: ChatTemplate) -> tuple[str, str]:
    """The prompt, and the last message of the user in it. Raises InvalidRequest, naming the field."""
    if not body.messages:
        raise InvalidRequest("messages is empty", param="messages")
    continues = bool(body.continue_final_message)
    prompts_reply = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    if continues and prompts_reply:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt can not both be true", param="add_generation_prompt"
        )
    if continues and body.messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a final message of the assistant", param="continue_final_message"
        )
    messages = [_message(message, place, template) for place, message in enumerate(body.messages)]
    variables = _variables(body, template)
    if body.tools and not template.reads_tools:
        raise InvalidRequest(
            "tools is not supported: the model's chat template does not use it; leave it out",
            param="tools",
            code="unsupported_field",
        )

    def render(talk: Sequence[Mapping[str, Any]]) -> str:
        return template.render(
            talk,
            add_generation_prompt=prompts_reply,
            continue_final_message=continues,
            variables=variables,
            tools=body.tools or None,
        )

    rendered = render(messages)
    named = next((place for place, message in enumerate(messages) if "name" in message), None)
    if named is not None and rendered == render([{**message, "name": None} for message in messages]):
        raise InvalidRequest(
            f"messages[{named}].name is not supported: the model's chat template does not use it",
            param=f"messages[{named}].name",
            code="unsupported_field",
        )
    asks = [message["content"] for message in messages if message["role"] == "user"] or [messages[-1]["content"]]
    return rendered, asks[-1]


def _message(message: Message, place: int, template: ChatTemplate) -> dict[str, Any]:
    where = f"messages[{place}]"
    if message.role in ("tool", "function"):
        raise InvalidRequest(
            f"{where}.role: tools are not supported, so there is no role {message.role}",
            param=f"{where}.role",
            code="unsupported_field",
        )
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{where}.role: {message.role!r:.64} is not a role; known: {', '.join(ROLES)}", param=f"{where}.role"
        )
    refuse_unsupported(message, NEUTRAL_IN_MESSAGE, f"{where}.")
    if message.role != "assistant":
        refuse_unsupported(message, ONLY_OF_THE_ASSISTANT, f"{where}.")
    # Templates that know no developer messages know them as system messages.
    role = "system" if message.role == "developer" and not template.mentions("developer") else message.role
    rendered: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _content(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content", code="missing_field")
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(content):
        field = f"{where}.content[{place}]"
        kind = part.get("type")
        if kind != "text":
            raise InvalidRequest(
                f"{field}.type: content parts of type {kind!r:.64} are not supported; known: 'text'",
                param=f"{field}.type",
                code="unsupported_field",
            )
        extra = next((key for key in part if key not in ("type", "text", HINT_IN_CONTENT)), None)
        if extra is not None:
            raise InvalidRequest(
                f"unknown field: {field}.{extra:.64}", param=f"{field}.{extra:.64}", code="unknown_field"
            )
        if not isinstance(text := part.get("text"), str):
            raise InvalidRequest(f"{field}.text: expected a string", param=f"{field}.text", code="invalid_type")
        texts.append(text)
    return "\n".join(texts)


def _variables(body: ChatBody, template: ChatTemplate) -> dict[str, Any]:
    """The variables that the caller sets in the template. One that the template does not read is refused, since it
    would be ignored."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name not in template.variables:
            known = ", ".join(sorted(template.variables)) or "none"
            raise InvalidRequest(
                f"chat_template_kwargs.{name:.64}: the model's chat template has no such variable; known: {known}",
                param="chat_template_kwargs",
            )
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in template.variables:
            raise InvalidRequest(
                "reasoning_effort is not supported: the model's chat template does not use it; leave it out",
                param="reasoning_effort",
                code="unsupported_field",
            )
        variables["reasoning_effort"] = body.reasoning_effort
    return variables
