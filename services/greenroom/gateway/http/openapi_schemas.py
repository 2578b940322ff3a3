"""The schemas of /openapi.json: bodies and replies, and of each field what it means and may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from greenroom.core.generation import MAX_BIAS, MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_PENALTY, MAX_STOP_STRINGS
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.keys import MAX_PRIORITY
from greenroom.gateway.replies.infer_bodies import INFER_REPLIES
from greenroom.gateway.replies.reply_bodies import REPLIES
from greenroom.gateway.replies.reply_headers import HINTS_HEADER
from greenroom.gateway.requests.bodies import (
    HINT_IN_CONTENT,
    HINTS,
    HINTS_IN_MESSAGE,
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    NEUTRAL_IN_MESSAGE,
    NEUTRAL_IN_STREAM_OPTIONS,
    ChatBody,
    CompletionBody,
    Message,
    StreamOptions,
)
from greenroom.gateway.requests.chat_template import ROLES
from greenroom.gateway.requests.inferences.infer_body import InferBody
from greenroom.gateway.requests.prepare import MAX_TASK_TYPE
from greenroom.gateway.requests.sampling_params import MAX_STOP_TOKEN_IDS
from greenroom.gateway.requests.token_bodies import DetokenizeBody, TokenizeBody

Json = dict[str, Any]
REF = "#/components/schemas/{name}"
_NEUTRAL: Mapping[type[msgspec.Struct], Mapping[str, Sequence[object]]] = {
    ChatBody: {**NEUTRAL, **NEUTRAL_IN_CHAT},
    CompletionBody: NEUTRAL,
    Message: NEUTRAL_IN_MESSAGE,
    StreamOptions: NEUTRAL_IN_STREAM_OPTIONS,
}
_HINTS: Mapping[type[msgspec.Struct], Mapping[str, Sequence[object]]] = {
    ChatBody: HINTS,
    CompletionBody: HINTS,
    Message: HINTS_IN_MESSAGE,
}
_HINT = f"Taken, but no answer depends on it: named in the reply's header {HINTS_HEADER}."
_ABSENT = "Absent: the model's own default, else"
_WHAT: Mapping[str, str] = {
    "model": "The served model's name, as /v1/models has it.",
    "tools": "Only with tool_choice none: told to the model by the chat template, if that reads them.",
    "messages": "The talk so far, through the model's chat template.",
    "prompt": "A text, several, token ids, or several lists of token ids.",
    "max_tokens": "Absent: up to the end of the context for chat, 16 for completions. 0: nothing is generated.",
    "max_completion_tokens": "The same as max_tokens.",
    "temperature": f"0 is greedy. {_ABSENT} 1.",
    "top_p": f"0 is greedy. {_ABSENT} 1.",
    "top_k": f"0 and -1 are off. {_ABSENT} off.",
    "min_p": f"Leaves the tokens that have at least this share of the likeliest one's probability. {_ABSENT} 0, off.",
    "repetition_penalty": f"Of all tokens in prompt and answer, as in transformers. {_ABSENT} 1, off.",
    "presence_penalty": "Subtracted from the logits of all tokens in the answer.",
    "frequency_penalty": "Subtracted from a token's logit as often as it is in the answer.",
    "logit_bias": "Added to the logits of these token ids.",
    "min_tokens": "No end of the model's own and no stop before so many tokens.",
    "echo": "The prompt comes before the answer, with its log-probabilities where logprobs are asked for.",
    "n": "That many independent answers; times the number of prompts at most as many.",
    "stop": "A string, or several, that end the answer and are left out of it.",
    "task_type": "What kind of task this is; absent: found from the prompt.",
    "slo": "What the client hopes for. Where the headers say it too, they must agree.",
    "priority": "Higher is sooner, where the scheduling policy heeds it. Where the header says it too, it must agree.",
    "timeout": "Seconds from arrival after which the request is given up.",
    "user": f"Goes to the access log. {_HINT}",
    "safety_identifier": f"Goes to the access log. {_HINT}",
}
_LOGIT_BIAS: Json = {
    "anyOf": [
        {
            "type": "object",
            "maxProperties": MAX_BIASED_TOKENS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        },
        {"type": "null"},
    ],
    "default": None,
}
_CONTENT: Json = {
    "description": "A text, or parts of text, which are joined by line breaks.",
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "text"},
                    "text": {"type": "string"},
                    HINT_IN_CONTENT: {"description": _HINT},
                },
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        },
    ],
}


def schemas_of(config: GatewayConfig) -> Json:
    """By name."""
    _, schemas = msgspec.json.schema_components(
        (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, InferBody, *REPLIES, *INFER_REPLIES), ref_template=REF
    )
    for kind, neutral in _NEUTRAL.items():
        properties = schemas[kind.__name__]["properties"]
        for field in properties.keys() & neutral.keys():
            properties[field] = {"enum": [None, *neutral[field]], "description": "Not supported: asks for nothing."}
    for kind, hints in _HINTS.items():
        properties = schemas[kind.__name__]["properties"]
        for field in properties.keys() & hints.keys():
            properties[field]["description"] = _HINT
    for kind in (ChatBody, CompletionBody):
        properties = schemas[kind.__name__]["properties"]
        properties["logit_bias"] = dict(_LOGIT_BIAS)
        for field, more in _bounds(config).items():
            if field in properties:
                properties[field].update(more)
        for field, text in _WHAT.items():
            if field in properties:
                properties[field]["description"] = text
    for field in schemas["SloBody"]["properties"].values():
        field["exclusiveMinimum"] = 0
    schemas["ChatBody"]["properties"]["top_logprobs"].update(minimum=0, maximum=MAX_LOGPROBS)
    schemas["CompletionBody"]["properties"]["logprobs"].update(minimum=0, maximum=MAX_LOGPROBS)
    message = schemas["Message"]
    message["properties"]["role"]["enum"] = list(ROLES)
    message["properties"]["content"] = _CONTENT
    message["required"] = ["role", "content"]
    return dict(schemas)


def _bounds(config: GatewayConfig) -> Json:
    """Bounds that are checked after decoding, so that each refusal can say why."""
    tokens: Json = {"minimum": 0}
    if config.max_new_tokens is not None:
        tokens["maximum"] = config.max_new_tokens
    return {
        "temperature": {"minimum": 0, "maximum": 2},
        "top_p": {"minimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "repetition_penalty": {"exclusiveMinimum": 0},
        "presence_penalty": {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY},
        "frequency_penalty": {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY},
        "min_tokens": {"minimum": 0},
        "top_k": {"minimum": -1},
        "n": {"minimum": 1, "maximum": config.max_choices},
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "task_type": {"minLength": 1, "maxLength": MAX_TASK_TYPE},
        "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
        "timeout": {"exclusiveMinimum": 0, "maximum": config.max_request_timeout_s},
        "messages": {"minItems": 1},
        "stop": {"minLength": 1, "maxItems": MAX_STOP_STRINGS},
        "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    }
