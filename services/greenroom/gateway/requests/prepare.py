"""From a request's body to the sequences to generate. No I/O, but it may take seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import GenerationRequest, SamplingParams, ServedModel, Slo
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.replies.choices import Job
from greenroom.gateway.replies.echo import Echo
from greenroom.gateway.replies.reply_writers import StreamUsage
from greenroom.gateway.requests.bodies import ChatBody, CompletionBody, GenerationBody, StreamOptions
from greenroom.gateway.requests.call_headers import CallHeaders
from greenroom.gateway.requests.chat_template import rendered_chat
from greenroom.gateway.requests.prompts import Prompt, encoded, prompts_of, words_of
from greenroom.gateway.requests.sampling_params import Logprobs, sampling_params
from greenroom.gateway.requests.slo_priority_timeout import priority_of, slo_of, timeout_of
from greenroom.gateway.requests.token_limits import Length, within_context, within_limits
from greenroom.text import TextProcessor, Tokenizer
from greenroom.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults

MAX_TASK_TYPE = 64
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to run. ``prompt_tokens``: of all prompts, each counted once however many choices it has.
    ``timeout_s``: from the request's arrival to its end."""

    jobs: tuple[Job, ...]
    prompt_tokens: int
    stream: bool
    usage: StreamUsage
    timeout_s: float


def prepare_chat(
    body: ChatBody,
    text: TextProcessor,
    model: ServedModel,
    *,
    call: CallHeaders,
    config: GatewayConfig,
    defaults: SamplingDefaults = NO_DEFAULTS,
    prompt_logprobs: int | None = None,
) -> Prepared:
    """``defaults``: of sampling, where the body does not say. ``prompt_logprobs``: see SamplingParams. Raises
    InvalidRequest, naming the field."""
    rendered, words = rendered_chat(body, text.chat)
    prompt = Prompt(
        encoded(rendered, text.tokenizer, model, config, "messages", special=bool(body.add_special_tokens)),
        behind_text=bool(body.continue_final_message),
        words=words,
    )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.max_tokens not in (None, limit):
        raise InvalidRequest("max_completion_tokens and max_tokens differ; send one of them", param="max_tokens")
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    length = Length(limit, field, said=limit is not None)
    asked = Logprobs(logprobs, prompt_logprobs)
    return _prepared(body, [prompt], "messages", asked, length, text, model, call, config, defaults)


def prepare_completion(
    body: CompletionBody,
    text: TextProcessor,
    model: ServedModel,
    *,
    call: CallHeaders,
    config: GatewayConfig,
    defaults: SamplingDefaults = NO_DEFAULTS,
    prompt_logprobs: int | None = None,
    default_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
) -> Prepared:
    """``defaults``: of sampling, where the body does not say. ``prompt_logprobs``: see SamplingParams; with ``echo`` as
    many as ``logprobs``. ``default_tokens``: how many are generated where the body does not say; None: up to the end of
    the context. Raises InvalidRequest, naming the field."""
    prompts = prompts_of(body.prompt)
    if len(prompts) > config.max_choices:
        raise InvalidRequest(
            f"prompt has {len(prompts)} prompts; at most {config.max_choices} are allowed", param="prompt"
        )
    special = body.add_special_tokens is not False
    tokenised = [
        Prompt(
            encoded(prompt, text.tokenizer, model, config, "prompt", special=special)
            if isinstance(prompt, str)
            else tuple(prompt),
            behind_text=True,
            words=prompt if isinstance(prompt, str) else None,
        )
        for prompt in prompts
    ]
    limit = body.max_tokens
    if limit is None and default_tokens is not None:  # as OpenAI and vLLM have it, where the context has room for them
        room = model.max_model_len - max((len(prompt.ids) for prompt in tokenised), default=0)
        limit = min(default_tokens, room) if room > 0 else None
    length = Length(limit, "max_tokens", said=body.max_tokens is not None)
    logprobs = Logprobs(body.logprobs, body.logprobs if body.echo else prompt_logprobs)
    return _prepared(body, tokenised, "prompt", logprobs, length, text, model, call, config, defaults)


def _prepared(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    prompt_field: str,
    logprobs: Logprobs,
    length: Length,
    text: TextProcessor,
    model: ServedModel,
    call: CallHeaders,
    config: GatewayConfig,
    defaults: SamplingDefaults,
) -> Prepared:
    n = 1 if body.n is None else body.n
    if not 1 <= n * len(prompts) <= config.max_choices:
        raise InvalidRequest(f"n must be at least 1, and n times the prompts at most {config.max_choices}", param="n")
    if length.limit is not None and length.limit < 0:
        raise InvalidRequest(f"{length.field} must be at least 0, not {length.limit}", param=length.field)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is for stream: true only", param="stream_options")
    if body.task_type is not None and not 1 <= len(body.task_type) <= MAX_TASK_TYPE:
        raise InvalidRequest(f"task_type must have 1 to {MAX_TASK_TYPE} characters", param="task_type")
    slo, priority, timeout_s = slo_of(body, call), priority_of(body, call), timeout_of(body, call, config)
    allowed = [within_context(prompt.ids, length.limit, model, prompt_field, length.field) for prompt in prompts]
    allowed = within_limits(
        [len(prompt.ids) for prompt in prompts], n, allowed, length, prompt_field, config, call.caller.limits
    )
    keep_stop = bool(body.include_stop_str_in_output)
    words = [words_of(prompt, text.tokenizer) for prompt in prompts]
    echoed = isinstance(body, CompletionBody) and bool(body.echo)
    special = body.add_special_tokens is not False
    echoes = [_echo(prompt, text.tokenizer, special) if echoed else None for prompt in prompts]
    asked = [
        (prompt, sampling_params(body, logprobs, tokens, model, choice, defaults))
        for prompt, tokens in zip(prompts, allowed, strict=True)
        for choice in range(n)
    ]
    digest = _digest(model, body.task_type, keep_stop, slo, priority, asked, echoed) if call.keyed else b""
    jobs = [
        Job(
            index,
            GenerationRequest(
                request_id=f"{call.base}-{index}",
                prompt_ids=prompt.ids,
                sampling=sampling,
                task_type=body.task_type,
                prompt=words[index // n],
                tenant=call.caller.name,
                keyed=call.keyed,
                digest=digest,
                slo=slo,
                priority=priority,
                timeout_s=timeout_s,
            ),
            prompt.behind_text,
            keep_stop,
            echoes[index // n],
        )
        for index, (prompt, sampling) in enumerate(asked)
    ]
    return Prepared(
        jobs=tuple(jobs),
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        stream=bool(body.stream),
        usage=_stream_usage(body.stream_options),
        timeout_s=timeout_s,
    )


def _echo(prompt: Prompt, tokenizer: Tokenizer, special: bool) -> Echo:
    """``special``: the tokenizer has put its special tokens around a text."""
    if prompt.words is None:
        return Echo.of_tokens(prompt.ids, tokenizer)
    return Echo.of_text(prompt.words, prompt.ids, tokenizer, add_special_tokens=special)


def _stream_usage(options: StreamOptions | None) -> StreamUsage:
    if options is None:
        return StreamUsage()
    return StreamUsage(at_end=bool(options.include_usage), in_parts=bool(options.continuous_usage_stats))


def _digest(
    model: ServedModel,
    task_type: str | None,
    keep_stop: bool,
    slo: Slo,
    priority: int,
    asked: Sequence[tuple[Prompt, SamplingParams]],
    echoed: bool,
) -> bytes:
    """Equal for two requests that ask for the same. ``stream``, ``timeout`` and ``user`` are not part of it."""
    meaning = (
        model.name,
        task_type,
        keep_stop,
        slo,
        priority,
        [(prompt.ids, prompt.behind_text, sampling) for prompt, sampling in asked],
        echoed,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(meaning), digest_size=32).digest()
