"""What goes in and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from greenroom.core.generation import FinishReason, Slo, Token


class Options(TypedDict, total=False):
    """What a request may say beside its prompt; what is left out is the server's default.

    ``messages``: a chat, each with ``role`` and ``content``, instead of a prompt. ``token_ids``: a prompt in tokens.
    ``logprobs`` n: the chosen token's log-probability and those of the n most likely. ``prompt_logprobs`` n: the same
    of the prompt's tokens. The other fields of sampling: ``greenroom.core.generation.SamplingParams``.
    ``slo``: milliseconds hoped for.
    ``priority``: -100 to 100, higher is sooner. ``timeout_s``: for the whole call, retries included; the server gives
    the request up then. ``idempotency_key``: the same key is the same request, at every gateway; so a call with one is
    sent again when its connection breaks, and goes on where it was, and leaving it does not end the request.
    ``request_id``: stands in the gateway's log.
    """

    messages: Sequence[Mapping[str, str]]
    token_ids: Sequence[int]
    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    task_type: str
    slo: Slo
    priority: int
    timeout_s: float
    idempotency_key: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Usage:
    """In tokens. ``approximated``: of all times that a layer's router chose experts for one of them, the share where it
    was kept from those it would have chosen, since they were not in memory; 0 where the server is exact,
    None where it is not known."""

    prompt_tokens: int
    completion_tokens: int
    approximated: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. ``request_id`` is what ``cancel`` takes. ``tokens``: all that were generated, the one that ended
    it too. ``prompt``: the prompt's tokens where ``prompt_logprobs`` were asked for; the first has none."""

    request_id: str
    text: str
    tokens: tuple[Token, ...]
    reason: FinishReason
    usage: Usage
    prompt: tuple[Token, ...] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What came at once of an answer: joined, the texts are the whole. ``reason``, ``usage`` and ``prompt`` (see Reply)
    in the last only."""

    request_id: str
    text: str
    tokens: tuple[Token, ...]
    reason: FinishReason | None = None
    usage: Usage | None = None
    prompt: tuple[Token, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """``max_model_len``: tokens of prompt and answer together."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
