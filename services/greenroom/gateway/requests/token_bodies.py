"""Bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import ServedModel
from greenroom.gateway.requests.bodies import ChatBody, Int64, Message, decode_json
from greenroom.gateway.requests.chat_template import rendered_chat
from greenroom.text import TextProcessor


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a text, or a chat through the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # of a chat
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Int64]


ONLY_OF_A_CHAT = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


def tokenize_body(raw: bytes) -> TokenizeBody:
    """Raises InvalidRequest, naming the field at fault."""
    body = decode_json(raw, _TOKENIZE, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send prompt or messages, one of them", param="prompt", code="missing_field")
    if body.messages is None:
        for field in ONLY_OF_A_CHAT:
            if getattr(body, field) is not None:
                raise InvalidRequest(f"{field} is for messages only", param=field)
    return body


def detokenize_body(raw: bytes) -> DetokenizeBody:
    """Raises InvalidRequest, naming the field at fault."""
    return decode_json(raw, _DETOKENIZE, DetokenizeBody)


def tokens_of(body: TokenizeBody, text: TextProcessor, model: ServedModel) -> list[int]:
    """The tokens that a completion of the prompt, or a chat of the messages, has. Raises InvalidRequest."""
    if body.messages is None:
        return text.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    chat = ChatBody(
        model=model.name,
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    return text.tokenizer.encode(rendered_chat(chat, text.chat)[0], add_special_tokens=bool(body.add_special_tokens))


def text_of(body: DetokenizeBody, text: TextProcessor, model: ServedModel) -> str:
    """The text of the tokens, special ones by their names. Raises InvalidRequest for an id that the model has not."""
    stray = next((token_id for token_id in body.tokens if not 0 <= token_id < model.vocab_size), None)
    if stray is not None:
        raise InvalidRequest(
            f"tokens has the token id {stray}; the model's are 0 to {model.vocab_size - 1}", param="tokens"
        )
    return text.tokenizer.decode(body.tokens, special=True)
