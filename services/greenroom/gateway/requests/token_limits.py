"""How many tokens a request may have: by the model's context, by the server, by the caller's key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import ServedModel
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.keys import KeyLimits


@dataclass(frozen=True, slots=True)
class Length:
    """How many tokens a sequence may get. ``limit`` None: up to the end of the context. ``said``: whether the client
    set it."""

    limit: int | None
    field: str
    said: bool


def within_context(
    ids: Sequence[int], limit: int | None, model: ServedModel, prompt_field: str, limit_field: str
) -> int:
    """How many tokens may be generated: ``limit``, or up to the context's end. Raises InvalidRequest."""
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
