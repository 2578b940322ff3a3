"""Between a client's words and the RPCs' messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.client.settings import Settings
from greenroom.client.types import ModelInfo, Options, Part, Reply, Usage
from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import Slo, Token
from greenroom.fabric.wire import from_end_reason, from_share, from_token_run
from greenroom.v1 import common_pb2, inference_pb2

Metadata = tuple[tuple[str, str], ...]
_AS_THEY_ARE = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "logprobs", "task_type",
                "priority", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
                "min_tokens", "prompt_logprobs")  # fmt: skip
_ELSEWHERE = ("messages", "token_ids", "stop", "stop_token_ids", "slo", "timeout_s", "idempotency_key", "request_id")


def to_request(prompt: str | None, options: Options) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest for what can be told here: not exactly one prompt, a value that does not fit its field."""
    given: Mapping[str, Any] = options
    unknown = sorted(given.keys() - {*_AS_THEY_ARE, *_ELSEWHERE})
    if unknown:
        raise InvalidRequest(
            f"unknown option {unknown[0]!r}; known: {', '.join(sorted((*_AS_THEY_ARE, *_ELSEWHERE)))}", param=unknown[0]
        )
    if (prompt is not None) + ("messages" in given) + ("token_ids" in given) != 1:
        raise InvalidRequest("give a prompt, messages=[...] or token_ids=[...], one of them", param="prompt")
    stop = given.get("stop", ())
    try:
        request = inference_pb2.GenerateRequest(
            stop=[stop] if isinstance(stop, str) else list(stop),
            stop_token_ids=list(given.get("stop_token_ids", ())),
            **{name: given[name] for name in _AS_THEY_ARE if name in given},
        )
        if prompt is not None:
            request.text = prompt
        elif "token_ids" in given:
            request.token_ids.ids.extend(given["token_ids"])
        else:
            request.chat.SetInParent()
            for message in given["messages"]:
                request.chat.messages.add(role=message["role"], content=message["content"])
        if "slo" in given:
            request.slo.CopyFrom(_slo(given["slo"]))
        if "timeout_s" in given:
            request.timeout_ms = max(1, round(given["timeout_s"] * 1000))
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidRequest(f"a value of the request has the wrong type or range: {error}") from error
    return request


def to_metadata(settings: Settings, options: Options) -> Metadata:
    metadata: list[tuple[str, str]] = []
    if settings.api_key is not None:
        metadata.append(("authorization", f"Bearer {settings.api_key}"))
    if "idempotency_key" in options:
        metadata.append(("idempotency-key", options["idempotency_key"]))
    if "request_id" in options:
        metadata.append(("x-request-id", options["request_id"]))
    return tuple(metadata)


def to_reply(response: inference_pb2.GenerateResponse) -> Reply:
    run = common_pb2.TokenRun(ids=response.token_ids, logprobs=response.logprobs)
    return Reply(
        response.request_id,
        response.text,
        tuple(from_token_run(run)),
        from_end_reason(response.reason),
        _usage(response.usage),
        _prompt(response.prompt) if response.HasField("prompt") else None,
    )


def to_model(model: inference_pb2.Model) -> ModelInfo:
    return ModelInfo(model.name, model.max_model_len, model.vocab_size, model.has_chat_template)


class Joiner:
    """The parts of one answer, whichever call they come on.

    A call that is made again under the same idempotency key begins anew and says the same; what was had is left out.
    Invariant: the texts and tokens of all parts, joined, are a prefix of the answer's.
    """

    def __init__(self) -> None:
        self._had_tokens = 0
        self._had_characters = 0
        self._characters = 0

    @property
    def began(self) -> bool:
        """Whether anything has been had."""
        return self._had_tokens > 0 or self._had_characters > 0

    def again(self) -> None:
        """Another call: it begins from the start."""
        self._characters = 0

    def push(self, event: inference_pb2.GenerateEvent) -> Part | None:
        """What is new in it; None if nothing is."""
        text = event.text[max(0, self._had_characters - self._characters) :]
        self._characters += len(event.text)
        self._had_characters = max(self._had_characters, self._characters)
        tokens: list[Token] = [token for token in from_token_run(event.tokens) if token.index >= self._had_tokens]
        self._had_tokens += len(tokens)
        if not event.HasField("end"):
            return Part(event.request_id, text, tuple(tokens)) if text or tokens else None
        end = event.end
        prompt = _prompt(end.prompt) if end.HasField("prompt") else None
        return Part(event.request_id, text, tuple(tokens), from_end_reason(end.reason), _usage(end.usage), prompt)


def _slo(slo: Slo) -> inference_pb2.Slo:
    return inference_pb2.Slo(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms, e2e_ms=slo.e2e_ms)


def _prompt(prompt: inference_pb2.PromptLogprobs) -> tuple[Token, ...]:
    behind = common_pb2.TokenRun(start=1, ids=prompt.ids[1:], logprobs=prompt.logprobs)
    return (*(Token(0, token_id) for token_id in prompt.ids[:1]), *from_token_run(behind))


def _usage(usage: inference_pb2.Usage) -> Usage:
    share = None if usage.approximated_unknown else from_share(usage.approximated)
    return Usage(usage.prompt_tokens, usage.completion_tokens, share)
