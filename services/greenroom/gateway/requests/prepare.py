"""From a request's body to the sequences to generate: templates, tokens, limits. No I/O, but it may take seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import MAX_SEED, GenerationRequest, SamplingParams, ServedModel, Slo
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.keys import MAX_PRIORITY, KeyLimits
from greenroom.gateway.replies.choices import Job
from greenroom.gateway.replies.reply_writers import StreamUsage
from greenroom.gateway.requests.bodies import (
    HINT_IN_CONTENT,
    NEUTRAL_IN_MESSAGE,
    ONLY_OF_THE_ASSISTANT,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    StreamOptions,
    refuse_unsupported,
)
from greenroom.gateway.requests.call_headers import PRIORITY_HEADER, SLO_HEADERS, CallHeaders
from greenroom.text import ChatTemplate, TextProcessor, Tokenizer

ROLES = ("system", "developer", "user", "assistant")
MAX_STOP_TOKEN_IDS = 256
MAX_TASK_TYPE = 64
DEFAULT_COMPLETION_TOKENS = 16
MAX_WORDS = 4096
"""How many characters of a prompt the task type is found from."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to run. ``prompt_tokens``: of all prompts, each counted once however many choices it has.
    ``timeout_s``: from the request's arrival to its end."""

    jobs: tuple[Job, ...]
    prompt_tokens: int
    stream: bool
    usage: StreamUsage
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt. ``words``: the text that a task type is found from; None: the decoded ids."""

    ids: tuple[int, ...]
    behind_text: bool
    words: str | None


@dataclass(frozen=True, slots=True)
class Length:
    """How many tokens a sequence may get. ``limit`` None: up to the end of the context. ``said``: whether the client
    set it."""

    limit: int | None
    field: str
    said: bool


def prepare_chat(
    body: ChatBody, text: TextProcessor, model: ServedModel, *, call: CallHeaders, config: GatewayConfig
) -> Prepared:
    """Raises InvalidRequest, naming the field."""
    template = text.chat
    rendered, words = _render(body, template)
    prompt = _Prompt(
        _encoded(rendered, text.tokenizer, model, config, "messages", special=bool(body.add_special_tokens)),
        behind_text=bool(body.continue_final_message),
        words=words,
    )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.max_tokens not in (None, limit):
        raise InvalidRequest("max_completion_tokens and max_tokens differ; send one of them", param="max_tokens")
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    length = Length(limit, field, said=limit is not None)
    return _prepared(body, [prompt], "messages", logprobs, length, text, model, call, config)


def prepare_completion(
    body: CompletionBody,
    text: TextProcessor,
    model: ServedModel,
    *,
    call: CallHeaders,
    config: GatewayConfig,
    default_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
) -> Prepared:
    """``default_tokens``: how many are generated where the body does not say; None: up to the end of the context.
    Raises InvalidRequest, naming the field."""
    prompts = _prompts(body.prompt)
    if len(prompts) > config.max_choices:
        raise InvalidRequest(
            f"prompt has {len(prompts)} prompts; at most {config.max_choices} are allowed", param="prompt"
        )
    special = body.add_special_tokens is not False
    encoded = [
        _Prompt(
            _encoded(prompt, text.tokenizer, model, config, "prompt", special=special)
            if isinstance(prompt, str)
            else tuple(prompt),
            behind_text=True,
            words=prompt if isinstance(prompt, str) else None,
        )
        for prompt in prompts
    ]
    limit = body.max_tokens
    if limit is None and default_tokens is not None:  # as OpenAI and vLLM have it, where the context has room for them
        room = model.max_model_len - max((len(prompt.ids) for prompt in encoded), default=0)
        limit = min(default_tokens, room) if room > 0 else None
    length = Length(limit, "max_tokens", said=body.max_tokens is not None)
    return _prepared(body, encoded, "prompt", body.logprobs, length, text, model, call, config)


def _encoded(
    prompt: str, tokenizer: Tokenizer, model: ServedModel, config: GatewayConfig, field: str, *, special: bool
) -> tuple[int, ...]:
    """The prompt's token ids. Raises InvalidRequest for a prompt that is certainly too long, before encoding it."""
    fewest = tokenizer.fewest_tokens(prompt)
    if config.max_prompt_tokens is not None and fewest > config.max_prompt_tokens:
        raise InvalidRequest(
            f"the {field} has {fewest} tokens or more; at most {config.max_prompt_tokens} are allowed here",
            param=field,
            code="token_limit_exceeded",
        )
    if fewest > model.max_model_len:
        raise InvalidRequest(
            f"this model's maximum context length is {model.max_model_len} tokens, but the {field} has {fewest} or "
            f"more; shorten the {field}",
            param=field,
            code="context_length_exceeded",
        )
    return tuple(tokenizer.encode(prompt, add_special_tokens=special))


def _prepared(
    body: GenerationBody,
    prompts: Sequence[_Prompt],
    prompt_field: str,
    logprobs: int | None,
    length: Length,
    text: TextProcessor,
    model: ServedModel,
    call: CallHeaders,
    config: GatewayConfig,
) -> Prepared:
    n = 1 if body.n is None else body.n
    if not 1 <= n * len(prompts) <= config.max_choices:
        raise InvalidRequest(f"n must be at least 1, and n times the prompts at most {config.max_choices}", param="n")
    if length.limit is not None and length.limit < 1:
        raise InvalidRequest(f"{length.field} must be at least 1, not {length.limit}", param=length.field)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is for stream: true only", param="stream_options")
    if body.task_type is not None and not 1 <= len(body.task_type) <= MAX_TASK_TYPE:
        raise InvalidRequest(f"task_type must have 1 to {MAX_TASK_TYPE} characters", param="task_type")
    slo, priority, timeout_s = _slo(body, call), _priority(body, call), _timeout(body, call, config)
    allowed = [_allowed_tokens(prompt.ids, length.limit, model, prompt_field, length.field) for prompt in prompts]
    allowed = within_limits(
        [len(prompt.ids) for prompt in prompts], n, allowed, length, prompt_field, config, call.caller.limits
    )
    keep_stop = bool(body.include_stop_str_in_output)
    asked = [
        (prompt, _sampling(body, logprobs, tokens, model, choice))
        for prompt, tokens in zip(prompts, allowed, strict=True)
        for choice in range(n)
    ]
    digest = _digest(model, body.task_type, keep_stop, slo, priority, asked) if call.keyed else b""
    jobs = [
        Job(
            index,
            GenerationRequest(
                request_id=f"{call.base}-{index}",
                prompt_ids=prompt.ids,
                sampling=sampling,
                task_type=body.task_type,
                prompt=_words(prompt, text.tokenizer),
                tenant=call.caller.name,
                keyed=call.keyed,
                digest=digest,
                slo=slo,
                priority=priority,
                timeout_s=timeout_s,
            ),
            prompt.behind_text,
            keep_stop,
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


def _stream_usage(options: StreamOptions | None) -> StreamUsage:
    if options is None:
        return StreamUsage()
    return StreamUsage(at_end=bool(options.include_usage), in_parts=bool(options.continuous_usage_stats))


def within_limits(
    prompts: Sequence[int],
    n: int,
    allowed: Sequence[int],
    length: Length,
    prompt_field: str,
    config: GatewayConfig,
    limits: KeyLimits,
) -> list[int]:
    """How many tokens each prompt's answers may have: ``allowed``, or less where the server or the key allow less and
    the client did not say how many.

    ``prompts``: their lengths in tokens. Raises InvalidRequest where the client asked for more, or no token is left.
    """

    def refuse(message: str, param: str) -> InvalidRequest:
        return InvalidRequest(message, param=param, code="token_limit_exceeded")

    most = config.max_prompt_tokens
    if most is not None and max(prompts) > most:
        raise refuse(f"the {prompt_field} has {max(prompts)} tokens; at most {most} are allowed here", prompt_field)
    tokens = list(allowed)
    if config.max_new_tokens is not None and max(tokens) > config.max_new_tokens:
        if length.said:
            raise refuse(f"{length.field} is {max(tokens)}; at most {config.max_new_tokens} is allowed", length.field)
        tokens = [min(each, config.max_new_tokens) for each in tokens]
    total = sum(prompts) + n * sum(tokens)
    if limits.token_limit is None or total <= limits.token_limit:
        return tokens
    share = (limits.token_limit - sum(prompts)) // (n * len(prompts))
    if length.said or share < 1:
        message = (
            f"{sum(prompts)} tokens in the {prompt_field} and {n * sum(tokens)} to generate were asked for; this key "
            f"is allowed {limits.token_limit} in one request"
        )
        raise refuse(message, prompt_field if share < 1 else length.field)
    return [min(each, share) for each in tokens]


def _slo(body: GenerationBody, call: CallHeaders) -> Slo:
    """From the body or the headers. Where both say a value, it must be the same."""
    if body.slo is None:
        return call.slo
    found: dict[str, float | None] = {}
    for name, header in SLO_HEADERS.items():
        here, there = getattr(body.slo, name), getattr(call.slo, name)
        if here is not None and there is not None and here != there:
            raise InvalidRequest(f"slo.{name} and the header {header} differ; send one of them", param=f"slo.{name}")
        found[name] = there if here is None else here
    return Slo(**found)


def _priority(body: GenerationBody, call: CallHeaders) -> int:
    """The priority asked for, at most what the key allows. Absent: 0, or less where the key allows only that."""
    most = call.caller.limits.max_priority
    asked = _asked_priority(body, call)
    if asked is not None and asked > most:
        raise InvalidRequest(
            f"this key is allowed a priority of at most {most}, not {asked}",
            param="priority" if body.priority is not None else PRIORITY_HEADER,
            code="priority_not_allowed",
        )
    return min(0, most) if asked is None else asked


def _asked_priority(body: GenerationBody, call: CallHeaders) -> int | None:
    if body.priority is None:
        return call.priority
    if abs(body.priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority")
    if call.priority not in (None, body.priority):
        raise InvalidRequest(f"priority and the header {PRIORITY_HEADER} differ; send one of them", param="priority")
    return body.priority


def _timeout(body: GenerationBody, call: CallHeaders, config: GatewayConfig) -> float:
    wanted = config.request_timeout_s if body.timeout is None else body.timeout
    if not 0 < wanted <= config.max_request_timeout_s:
        raise InvalidRequest(
            f"timeout must be above 0 and at most {config.max_request_timeout_s:g} seconds, not {wanted:g}",
            param="timeout",
        )
    return wanted if call.patience_s is None else min(wanted, call.patience_s)


def _digest(
    model: ServedModel,
    task_type: str | None,
    keep_stop: bool,
    slo: Slo,
    priority: int,
    asked: Sequence[tuple[_Prompt, SamplingParams]],
) -> bytes:
    """Equal for two requests that ask for the same. ``stream``, ``timeout`` and ``user`` are not part of it."""
    meaning = (
        model.name,
        task_type,
        keep_stop,
        slo,
        priority,
        [(prompt.ids, prompt.behind_text, sampling) for prompt, sampling in asked],
    )
    return hashlib.blake2b(msgspec.msgpack.encode(meaning), digest_size=32).digest()


def _words(prompt: _Prompt, tokenizer: Tokenizer) -> str:
    """The two ends of the prompt: the task stands at one of them."""
    words = prompt.words
    if words is None:
        ids = prompt.ids
        words = tokenizer.decode(ids if len(ids) <= MAX_WORDS else ids[: MAX_WORDS // 2] + ids[-(MAX_WORDS // 2) :])
    if len(words) <= MAX_WORDS:
        return words
    return f"{words[: MAX_WORDS // 2]}\n{words[-(MAX_WORDS // 2) :]}"


def _allowed_tokens(
    ids: Sequence[int], limit: int | None, model: ServedModel, prompt_field: str, limit_field: str
) -> int:
    """How many tokens may be generated: ``limit``, or up to the context's end."""
    if not ids:
        raise InvalidRequest(f"{prompt_field} is empty: it has no tokens", param=prompt_field)
    stray = next((token_id for token_id in ids if not 0 <= token_id < model.vocab_size), None)
    if stray is not None:
        raise InvalidRequest(
            f"{prompt_field} has the token id {stray}; the model's are 0 to {model.vocab_size - 1}", param=prompt_field
        )
    room = model.max_model_len - len(ids)
    if room < (1 if limit is None else limit):
        asked = "at least 1" if limit is None else str(limit)
        raise InvalidRequest(
            f"this model's maximum context length is {model.max_model_len} tokens, but {len(ids)} in the "
            f"{prompt_field} and {asked} to generate were asked for; shorten the {prompt_field}"
            + ("" if limit is None else f" or lower {limit_field}"),
            param=prompt_field if room < 1 else limit_field,
            code="context_length_exceeded",
        )
    return room if limit is None else limit


def _sampling(
    body: GenerationBody, logprobs: int | None, max_tokens: int, model: ServedModel, choice: int
) -> SamplingParams:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    stop_token_ids = tuple(body.stop_token_ids or ())
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS or not all(0 <= stop < model.vocab_size for stop in stop_token_ids):
        raise InvalidRequest(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids from 0 to {model.vocab_size - 1}",
            param="stop_token_ids",
        )
    try:
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=0 if body.top_k in (None, -1) else body.top_k,
            seed=_seed(body.seed, choice),
            stop=stop,
            stop_token_ids=stop_token_ids,
            max_tokens=max_tokens,
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
        )
    except InvalidRequest as error:
        if error.param == "logprobs" and isinstance(body, ChatBody):
            raise InvalidRequest(f"top_{error}", param="top_logprobs") from error
        raise


def _seed(seed: int | None, choice: int) -> int | None:
    """The first choice has the request's own seed, so it is what n=1 gives. The others derive theirs from it."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED


def _prompts(prompt: str | list[int | str | list[int]]) -> list[str] | list[list[int]]:
    """Every form of OpenAI's ``prompt`` as a list of texts or of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if not prompt or len(prompt) not in (len(texts), len(ids), len(lists)):
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, and not "
            "empty",
            param="prompt",
        )
    return texts or lists or [ids]


def _render(body: ChatBody, template: ChatTemplate) -> tuple[str, str]:
    """The prompt, and the last message of the user in it."""
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

    def render(talk: Sequence[Mapping[str, Any]]) -> str:
        return template.render(
            talk, add_generation_prompt=prompts_reply, continue_final_message=continues, variables=variables
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
